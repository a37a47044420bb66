"""Counts costly calls with place and time: emptying the cache, saving, collecting garbage. Looks at the inputs of
attention and of cross_entropy: the kernel, a copy of the logits, the share of padding."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, place_of, user_line
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer

MAX_KINDS = 16  # of a function's inputs that are looked at
MIN_PADDED, MAX_LOOKS = (
    8,
    16,
)  # batches that tell the share of padding, and calls whose values are read for it


@dataclass
class _Counter:
    calls: int = 0
    ns: int = 0
    lines: Counter[Line | None] = field(default_factory=Counter)


class CallCounters:
    def __init__(self, torch: ModuleType, ledger: Ledger, now_ns: Callable[[], int]) -> None:
        self.torch, self.ledger, self.now_ns = torch, ledger, now_ns
        self._counters: dict[str, _Counter] = {}
        self.kinds: set[object] = set()  # of inputs that were looked at
        self.attention: dict[str, list[str]] = {}  # the kernel, and why not a faster one -> shapes
        self.looks = 0  # calls whose values were read
        self.padding: list[tuple[int, int]] = []  # of each batch: elements, and those that are padding
        self.notes: dict[str, str] = {}

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
            ("anomaly", torch.autograd.anomaly_mode.set_detect_anomaly, "__init__"),
        ):
            self.ledger.set(owner, function, self._wrap(name, getattr(owner, function)))
        counted = [self._wrap(name, optimizer.zero_grad) for name in ("zero_grad_to_zero", "zero_grad")]

        @wraps(optimizer.zero_grad)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> Any:
            return counted[bool(set_to_none)](optimizer, set_to_none)

        self.ledger.set(optimizer, "zero_grad", zero_grad)
        for name, look in (
            ("scaled_dot_product_attention", self._attention),
            ("cross_entropy", self._cross_entropy),
        ):
            original = getattr(torch.nn.functional, name)
            self.ledger.set(torch.nn.functional, name, self._looking(original, look))

    @property
    def attention_kernels(self) -> list[str]:
        """One line for each kernel: a shape, and the number of further ones."""
        return [
            shapes[0] + (f" and {len(shapes) - 1} more" if len(shapes) > 1 else "") + how
            for how, shapes in self.attention.items()
        ]

    def per_step(self, steps: int) -> dict[str, Any]:
        return {
            name: {
                "calls": counter.calls / steps,
                "ms": counter.ns / 1e6 / steps,
                "most": max(counter.lines.values()),
                "note": self.notes.get(name, ""),
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

    def _looking(self, original: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
        @wraps(original)
        def called(*inputs: Any, **options: Any) -> Any:
            plain = (
                inputs and type(inputs[0]) is self.torch.Tensor and inputs[0].device.type in ("cpu", "cuda")
            )
            if plain and not self._in_transformation():
                look(sys._getframe(1), *inputs, **options)
            return original(*inputs, **options)

        return called

    def _in_transformation(self) -> bool:
        """Whether values cannot be read: while a compiler traces, under vmap, or while a CUDA graph is captured."""
        return (
            self.torch.compiler.is_compiling()
            or self.torch._C._functorch.peek_interpreter_stack() is not None
            or (self.torch.cuda.is_initialized() and self.torch.cuda.is_current_stream_capturing())
        )

    def _attention(self, caller: FrameType, *inputs: Any, **options: Any) -> None:
        mask = inputs[3] if len(inputs) > 3 else options.get("attn_mask")
        if mask is not None and self._may_read():
            hidden = ~mask if mask.dtype == self.torch.bool else mask <= self.torch.finfo(mask.dtype).min / 2
            unseen = hidden.all(-2)  # keys that no query sees
            self._add_padding(caller, unseen.numel(), int(unseen.sum()))
        if len(self.kinds) >= MAX_KINDS or (key := self._kind(*inputs, *options.values())) in self.kinds:
            return
        self.kinds.add(key)
        kernel, why = attention_kernel(self.torch, *inputs, **options)
        shape, how = list(inputs[0].shape), f" in {inputs[0].dtype}: {kernel}{why}"
        self.attention.setdefault(how, []).append(f"{shape}")
        if kernel == "math":
            self._note("slow_attention", 0, caller)
            self.notes["slow_attention"] = f"{shape} in {inputs[0].dtype}{why}"

    def _cross_entropy(
        self,
        caller: FrameType,
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        *_: Any,
        **others: Any,
    ) -> None:
        if input.ndim == 3 and not input.is_contiguous() and input.mT.is_contiguous():
            size = f"{input.numel() * input.element_size() / 1e6:.3g} MB"
            self.notes["transposed_logits"] = f"{list(input.shape)}, {size}"
            self._note("transposed_logits", 0, caller)
        rows = target if target.ndim == 2 else target._base
        if rows is None or rows.ndim != 2 or rows.shape.numel() != target.numel() or rows.is_floating_point():
            return
        if self._may_read():
            behind = (rows == ignore_index).flip(1).long().cumprod(1).sum(1)  # the last label of each row
            if (behind != behind[0]).any():  # rows of different lengths
                self._add_padding(caller, rows.numel(), int(behind.sum()))

    def _may_read(self) -> bool:
        """Whether a call's values may be read, which waits for a GPU: only in the first calls, before steps are measured."""
        self.looks += 1
        return self.looks <= MAX_LOOKS

    def _add_padding(self, caller: FrameType, elements: int, padding: int) -> None:
        self.padding.append((elements, padding))
        if len(self.padding) >= MIN_PADDED:
            self._note("padding", 0, caller)
        share = sum(padding for _, padding in self.padding) / sum(elements for elements, _ in self.padding)
        self.notes["padding"] = f"{share:.3f}"

    def _kind(self, *inputs: Any) -> tuple[object, ...]:
        return tuple(
            (value.dtype, value.shape, value.device) if isinstance(value, self.torch.Tensor) else value
            for value in inputs
        )

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
) -> tuple[str, str]:
    """The kernel that torch chooses for this call, and what keeps it from flash attention: the argument without which
    it would be chosen."""
    Kernel = torch.nn.attention.SDPBackend

    def choose(*inputs: Any) -> Any:
        return Kernel(torch._fused_sdp_choice(*inputs, scale=scale, enable_gqa=enable_gqa))

    tensors = query, key, value
    kernel = choose(*tensors, attn_mask, dropout_p, is_causal)
    name = kernel.name.lower().replace("_", " ")
    if kernel == Kernel.FLASH_ATTENTION:
        return name, f" ({torch.nn.attention.current_flash_attention_impl() or 'FA2'})" * query.is_cuda
    half = [each.to(torch.bfloat16) for each in tensors]
    for why, inputs in (
        ("dropout", (*tensors, attn_mask, 0.0, is_causal)),
        ("attn_mask", (*tensors, None, dropout_p, is_causal)),
        (f"{query.dtype}", (*half, attn_mask, dropout_p, is_causal)),
        ("the layout", (*(each.contiguous() for each in tensors), attn_mask, dropout_p, is_causal)),
        ("attn_mask, dropout and the dtype together", (*half, None, 0.0, is_causal)),
    ):
        if choose(*inputs) == Kernel.FLASH_ATTENTION:
            return name, f"; not flash attention, because of {why}"
    return name, "; not flash attention"
