"""The training state of a Loop: collect it for a checkpoint, and restore it from one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.gradient import Gradient
from flatout.loop.sizing import Sized, Sizer
from flatout.loop.update import Update
from flatout.schema.errors import CheckpointError, LoopError

if TYPE_CHECKING:
    from torch.nn import Module


PLAIN_TYPES = (bool, int, str, bytes, float, type(None), complex)


def check_not_sharded(model: Module) -> None:
    """Raises LoopError if the model is sharded: no rank has all of its state."""
    module = sys.modules.get("torch.distributed.fsdp")
    is_fsdp1 = module is not None and any(
        isinstance(rank_part, module.FullyShardedDataParallel) for rank_part in model.modules()
    )
    if is_fsdp1 or any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise LoopError(
            "checkpoint_dir= does not support a model that is sharded over ranks: each rank has only its part. Remove checkpoint_dir, "
            "and save with torch.distributed.checkpoint (the page 'A model over several devices' shows how)."
        )


class LoopState:
    """``extra_state``: further objects to store by name, each with ``state_dict`` and ``load_state_dict``."""

    def __init__(
        self,
        loop: Any,
        gradient: Gradient,
        update: Update,
        sizer: Sizer | None,
        extra_state: Mapping[str, Any],
    ) -> None:
        self.loop, self.extra_state, self.torch = loop, extra_state, loop.torch
        self._gradient, self._update, self._sizer = gradient, update, sizer
        parallel = isinstance(loop.model, loop.torch.nn.parallel.DistributedDataParallel)
        self.model = loop.model.module if parallel else loop.model

    def state(self) -> dict[str, Any]:
        loop = self.loop
        sized = loop.sized
        return {
            "model": dict(self.model.state_dict()),
            "buffers": self._buffers(),
            "modes": self._modes(),
            "optimizer": loop.optimizer.state_dict(),
            "scheduler": loop.scheduler.state_dict() if hasattr(loop.scheduler, "state_dict") else None,
            "extra_state": {name: stateful.state_dict() for name, stateful in self.extra_state.items()},
            "precision": loop.precision.state(),
            "micro_batches": loop.micro_batches.state(),
            "gradient": self._gradient.state(),
            "sized": {"micro_batch": sized.micro_batch, "ms": dict(sized.ms)} if sized is not None else None,
        }

    def rank_part(self) -> dict[str, Any]:
        """The contribution of a rank other than the first: everything that differs between ranks."""
        return {
            "all buffers": {key: dict(stateful.named_buffers()) for key, stateful in self._modules().items()}
        }

    def parameters(self) -> set[str]:
        """The names of the parameters in a checkpoint."""
        return {f"model.{name}" for name, _ in self.model.named_parameters()}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the state and list what differs from it.

        Raises CheckpointError if the state is of another training."""
        loop = self.loop
        self._load("model", self.model, state["model"])
        self.restore_buffers(state["buffers"])
        for key, root in self._modules().items():
            for name, module in root.named_modules():
                module.training = name not in state["modes"].get(key, ())
        self._load("optimizer", loop.optimizer, state["optimizer"])
        if hasattr(loop.scheduler, "state_dict") != (state["scheduler"] is not None):
            raise CheckpointError(
                "the training was saved with a scheduler and has none now, or vice versa. Restore it, name another folder, or use "
                "from_scratch=True."
            )
        if state["scheduler"] is not None:
            self._load("scheduler", loop.scheduler, state["scheduler"])
        for name, value in state["extra_state"].items():
            if name not in self.extra_state:
                raise CheckpointError(
                    f"the training was saved with extra_state={{{name!r}: ...}} and has none of that name now. Pass it, name another folder, or use "
                    "from_scratch=True."
                )
            self._load(f"extra_state[{name!r}]", self.extra_state[name], value)
        loop.precision.load_state(state["precision"])
        loop.micro_batches.load_state(state["micro_batches"])
        sized = state["sized"]
        self._gradient.load_state(state["gradient"])
        self._update.reset()
        if self._sizer is not None and sized is not None:
            self._sizer.result = Sized(sized["micro_batch"], sized["ms"])
        differing: list[str] = [
            f"extra_state[{name!r}] is new" for name in self.extra_state if name not in state["extra_state"]
        ]
        for part, now in self.state().items():
            _compare(self.torch, state[part], now, part, differing.append)
        return differing

    def restore_buffers(self, buffers: Mapping[str, Any]) -> None:
        for key, root in self._modules().items():
            named = dict(root.named_buffers())
            with self.torch.no_grad():
                for name, value in buffers.get(key, {}).items():
                    if name in named and named[name].shape == value.shape:
                        named[name].copy_(value)

    def _load(self, what: str, stateful: Any, state: Any) -> None:
        try:
            stateful.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"the checkpoint does not fit the {what} of this training: {reason}. If it is of another training, name another folder, or use "
                "from_scratch=True, which moves it to a subfolder."
            ) from error

    def _modules(self) -> dict[str, Any]:
        extra = ((f"extra_state {name}", stateful) for name, stateful in self.extra_state.items())
        modules = {name: stateful for name, stateful in extra if isinstance(stateful, self.torch.nn.Module)}
        return {"model": self.model, **modules}

    def _buffers(self) -> dict[str, Any]:
        buffers = {}
        for key, root in self._modules().items():
            stored = set(root.state_dict(keep_vars=True))
            buffers[key] = {name: buffer for name, buffer in root.named_buffers() if name not in stored}
        return buffers

    def _modes(self) -> dict[str, list[str]]:
        return {
            key: [name for name, module in root.named_modules() if not module.training]
            for key, root in self._modules().items()
        }


def _compare(
    torch: ModuleType, saved: object, now: object, where: str, differs: Callable[[str], None]
) -> None:
    """Report every place where the restored value differs from the saved one.

    A load_state_dict may cast, round or omit values."""
    if isinstance(saved, torch.Tensor) or isinstance(now, torch.Tensor):
        if not _same_bits(torch, saved, now):
            differs(where)
    elif isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in [*saved, *(key for key in now if key not in saved)]:
            if key not in saved or key not in now:
                differs(f"{where}.{key}")
            else:
                _compare(torch, saved[key], now[key], f"{where}.{key}", differs)
    elif isinstance(saved, (list, tuple)) and isinstance(now, (list, tuple)):
        if len(saved) != len(now):
            differs(where)
            return
        for number, saved_entry in enumerate(saved):
            _compare(torch, saved_entry, now[number], f"{where}[{number}]", differs)
    elif type(saved) is type(now) and type(saved) in PLAIN_TYPES and repr(saved) != repr(now):
        differs(where)


def _same_bits(torch: ModuleType, a: Any, b: Any) -> bool:
    from flatout.data.batch_comparison import same_bits

    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.layout is not torch.strided:
        return False
    return same_bits(a.detach().cpu(), b.detach().cpu())
