"""The settings of a Loop, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.loop.accumulation import COMBINE_MODES, MEAN, SUM
from flatout.schema.errors import LoopError
from flatout.schema.plan import Plan

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

AUTO = "auto"


@dataclass(frozen=True)
class LoopSettings:
    """The keywords of `flatout.Loop`, which explains them. Raises LoopError for an invalid one."""

    plan: Plan | str | Path | None
    epochs: int
    steps: int | None
    effective_batch: int | None
    micro_batch: int | str | None
    reduction: str | None
    scheduler: Any
    clip: float | None
    precision: str
    metrics: Mapping[str, str]
    on_nan: str
    allow_inexact: bool
    checkpoint_dir: str | Path | None
    save_every: int | None
    extra_state: Mapping[str, Any]
    from_scratch: bool
    on_drift: str

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "effective_batch", "micro_batch", "save_every"):
            _check_positive(name, getattr(self, name), AUTO if name == "micro_batch" else None)
        if self.clip is not None and not self.clip > 0:
            raise LoopError(
                f"clip={self.clip!r} is not positive and would stop all training. Give the maximum norm of the gradient, or remove clip."
            )
        for name, allowed in (
            ("reduction", (MEAN, SUM, None)),
            ("on_nan", ("stop", "ignore")),
            ("on_drift", ("warn", "stop")),
        ):
            if (value := getattr(self, name)) not in allowed:
                *first, last = (f'"{one}"' if one is not None else "None" for one in allowed)
                raise LoopError(f"{name}={value!r} is not supported. Use {', '.join(first)} or {last}.")
        if unsupported := {name: how for name, how in self.metrics.items() if how not in COMBINE_MODES}:
            raise LoopError(
                f"metrics={unsupported!r} is not supported. Combine the values of micro-batches with one of {', '.join(COMBINE_MODES)}."
            )
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        if self.checkpoint_dir is None and (
            self.save_every is not None or self.extra_state or self.from_scratch
        ):
            raise LoopError(
                'save_every=, extra_state= and from_scratch= need a folder for checkpoints. Name one: checkpoint_dir="checkpoints".'
            )
        if unsupported := {
            name: type(thing).__name__
            for name, thing in self.extra_state.items()
            if not hasattr(thing, "load_state_dict")
        }:
            raise LoopError(
                f"extra_state={unsupported!r} cannot be stored. Each object needs state_dict and load_state_dict."
            )

    @property
    def largest_micro_batch(self) -> int | None:
        return None if isinstance(self.micro_batch, str) else self.micro_batch

    def drift_settings(self, model: Module, optimizer: Optimizer) -> dict[str, Any]:
        """The settings that a resumed training must share with the checkpoint."""
        return {
            "model": type(getattr(model, "module", model)).__name__,
            "optimizer": type(optimizer).__name__,
            "scheduler": type(self.scheduler).__name__,
            "precision": self.precision,
            "clip": self.clip,
            "effective batch": self.effective_batch,
            "micro-batch": self.micro_batch,
        }


def _check_positive(name: str, value: object, accepted: str | None) -> None:
    if (value is None and name != "epochs") or (value is not None and value == accepted):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LoopError(
            f"{name}={value!r} is not a whole number from 1" + ("." if name == "epochs" else ", or None.")
        )
