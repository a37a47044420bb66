"""Counts costly calls with place and time: emptying the cache, saving, collecting garbage. Also names kernels of attention."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from tempfile import TemporaryFile
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, place_of, user_line
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer

MAX_ATTENTIONS = 16  # kinds of inputs whose kernel is named


@dataclass
class _Counter:
    calls: int = 0
    ns: int = 0
    lines: Counter[Line | None] = field(default_factory=Counter)


class CallCounters:
    def __init__(self, torch: ModuleType, ledger: Ledger, now_ns: Callable[[], int]) -> None:
        self.torch, self.ledger, self.now_ns = torch, ledger, now_ns
        self._counters: dict[str, _Counter] = {}
        self.attention: dict[object, str] = {}  # by kind of inputs: the kernel, and why not a faster one

    def install(self) -> None:
        torch = self.torch
        optimizer = torch.optim.Optimizer
        for name, owner, function in (
            ("empty_cache", torch.cuda, "empty_cache"),
            ("gc_collect", gc, "collect"),
            ("save", torch, "save"),
            ("data_parallel", torch.nn.DataParallel, "forward"),
            ("clip", torch.nn.utils, "clip_grad_norm_"),
            ("make_optimizer", optimizer, "__init__"),
            ("make_scheduler", torch.optim.lr_scheduler.LRScheduler, "__init__"),
            ("set_threads", torch, "set_num_threads"),
            ("anomaly", torch.autograd.anomaly_mode.detect_anomaly, "__enter__"),
        ):
            self.ledger.set(owner, function, self._wrap(name, getattr(owner, function)))
        counted = [self._wrap(name, optimizer.zero_grad) for name in ("zero_grad_to_zero", "zero_grad")]

        @wraps(optimizer.zero_grad)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> Any:
            return counted[bool(set_to_none)](optimizer, set_to_none)

        self.ledger.set(optimizer, "zero_grad", zero_grad)
        fused = torch.nn.functional.scaled_dot_product_attention
        self.ledger.set(torch.nn.functional, fused.__name__, self._wrap_attention(fused))

    def per_step(self, steps: int) -> dict[str, Any]:
        return {
            name: {
                "calls": counter.calls / steps,
                "ms": counter.ns / 1e6 / steps,
                "most": max(counter.lines.values()),
                "places": [
                    place.to_json()
                    for line, _ in counter.lines.most_common(5)
                    if (place := place_of(line)) is not None
                ],
            }
            for name, counter in self._counters.items()
        }

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def counted(*args: object, **kwargs: object) -> Any:
            start = self.now_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._note(name, self.now_ns() - start, sys._getframe(1))

        return counted

    def _wrap_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def attention(*inputs: Any, **options: Any) -> Any:
            plain = (
                inputs and type(inputs[0]) is self.torch.Tensor and inputs[0].device.type in ("cpu", "cuda")
            )
            if plain and len(self.attention) < MAX_ATTENTIONS and not self.torch.compiler.is_compiling():
                key = tuple(
                    (value.dtype, value.shape, value.device)
                    if isinstance(value, self.torch.Tensor)
                    else value
                    for value in (*inputs, *options.values())
                )
                if key not in self.attention:
                    self.attention[key] = attention_kernel(self.torch, *inputs, **options)
            return original(*inputs, **options)

        return attention

    def _note(self, name: str, ns: int, caller: FrameType) -> None:
        counter = self._counters.setdefault(name, _Counter())
        counter.calls += 1
        counter.ns += ns
        counter.lines[user_line(caller)] += 1


def attention_kernel(
    torch: ModuleType,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """The kernel that torch chooses for this call and, on a GPU, why not flash attention."""
    inputs, sdpa = (query, key, value, attn_mask, dropout_p, is_causal), torch.nn.attention
    kernel = sdpa.SDPBackend(torch._fused_sdp_choice(*inputs, scale=scale, enable_gqa=enable_gqa))
    why = ""
    if query.is_cuda and kernel == sdpa.SDPBackend.FLASH_ATTENTION:
        why = f" ({sdpa.current_flash_attention_impl() or 'FA2'})"
    elif query.is_cuda:
        with TemporaryFile() as file:  # torch's C++ code writes the reason to standard error
            stderr = os.dup(2)
            os.dup2(file.fileno(), 2)
            try:
                params = torch.backends.cuda.SDPAParams(*inputs, enable_gqa)
                torch.backends.cuda.can_use_flash_attention(params, True)
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)
            file.seek(0)
            reasons = re.findall(r"Warning: (.*?)\.? \(function", file.read().decode(errors="replace"))
        why = "; not flash attention" + (f", because: {reasons[0]}" if reasons else "")
    return f"{list(query.shape)} in {query.dtype}: {kernel.name.lower().replace('_', ' ')}{why}"
