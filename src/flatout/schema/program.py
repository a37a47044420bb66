"""What levers, guard and diagnosis may ask of a running program, and the only way in which they may change it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Ledger(Protocol):
    """Changes objects of others, so that every change can be undone (`flatout.agent.ledger`)."""

    def set(self, owner: object, name: str, value: object, *, new: bool = False) -> Any:
        """Set an attribute; return the value it replaced. ``new``: it may be missing."""

    def set_flag(self, owner: object, name: str, value: object) -> None: ...
    def set_item(self, owner: object, key: object, value: object) -> None: ...
    def on_restore(self, title: str, undo: Callable[[], object]) -> None: ...
    def mark(self) -> int: ...
    def restore(self, mark: int = 0) -> None: ...


class TrainingContext(Protocol):
    """The live objects of a training script, and facts about its steps (`flatout.agent.training_context`)."""

    torch: ModuleType
    steps: int  # completed optimizer cycles
    backwards: int
    backwards_in_last_step: int
    closure_steps: bool  # a step runs forward and backward several times
    autocast_seen: bool  # in a forward pass of the first step that a backward pass followed
    anomaly_seen: bool
    create_graph_seen: bool
    compiled_by_script: bool
    distributions_seen: bool
    threads_at_import: int
    flags_of_script: dict[str, bool]  # while flatout asks for other kernels (`kernel_flags`)
    paused: bool  # True stops the observation of steps
    reports: list[tuple[str, str]]  # messages of levers after they were applied
    shared_samples: Any  # where the runs of a search pass on their cached samples
    data_parallel: Any  # the state of `data_parallel`, for levers that act through it; None in one process
    graph_passes: list[Any]  # graph passes of levers, before `compile` compiles the graph
    uncompiled: list[Any]  # modules that `compile` excludes
    boundaries: Any
    listener: Any  # receives the events of the program
    untimed: Callable[
        [], AbstractContextManager[None]
    ]  # around work inside a step that no measurement may count

    @property
    def ledger(self) -> Ledger: ...
    @property
    def roots(self) -> list[Module]:
        """Outermost trainable modules called with gradients enabled, in the order first seen."""

    @property
    def optimizers(self) -> list[Optimizer]: ...
    @property
    def parameters(self) -> list[Tensor]:
        """Every trainable parameter, without duplicates."""

    @property
    def scalers(self) -> list[Any]:
        """The enabled GradScalers of the script."""

    @property
    def device(self) -> Device:
        """The device of the first parameter."""

    @property
    def device_type(self) -> str: ...
    @property
    def model_is_split(self) -> bool:
        """Whether the script calls parts of its model separately."""

    @property
    def ddp_modules(self) -> list[Module]: ...
    @property
    def has_global_hooks(self) -> bool:
        """Whether hooks run around every module's forward."""

    @property
    def loaders(self) -> list[dict[str, Any]]:
        """The arguments that the script passed to each DataLoader, and those that it got."""

    @property
    def training_loader(self) -> int | None: ...
    @property
    def training_loader_numbers(self) -> list[int]: ...
    @property
    def live_loaders(self) -> list[DataLoader]: ...
    @property
    def training_loaders(self) -> list[DataLoader]: ...
    def number_of_loader(self, loader: DataLoader) -> int | None: ...
    def first_loader_like(self, loader: DataLoader) -> int | None: ...
    def loader_key(self, dataset: Dataset, arguments: dict[str, Any]) -> tuple[Any, ...]: ...
    def data_is_random(self) -> bool: ...
    def change_loaders(
        self, change: Callable[[Any, dict[str, Any]], dict[str, Any]], ledger: Ledger
    ) -> None: ...
    def feed_loaders(self, rule: Any, ledger: Ledger) -> None: ...
    def wrap_loader_method(
        self, what: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], ledger: Ledger
    ) -> None: ...
    def rebuild_loader(self, loader: DataLoader, ledger: Ledger) -> DataLoader: ...
    def samples_in(self, batch: object, batch_size: int | None = None) -> int | None: ...
    def rows_of(self, batch: object, samples: int, start: int, stop: int) -> Any: ...
    def has_layer(self, *names: str) -> bool: ...
    def unwrap_ddp(self, root: Module) -> Module: ...
    def without_scale(self, loss: Tensor) -> Tensor: ...
    def without_hooks(self, held: dict[str, Any], is_ours: Callable[[Any], bool]) -> dict[str, Any]: ...
    def compiler_off(self) -> str: ...
    def variables_of(self, frame: FrameType, always: bool = False) -> dict[str, Any]: ...
    def kernel_flags(self) -> dict[str, bool]: ...
    def report(self, lever: str, sentence: str) -> None: ...
    def wrap_forward(self, root: Module, wrapper: Wrapper, ledger: Ledger) -> Callable[[], None]:
        """Replace ``root.forward``; the returned function removes the wrapper."""

    def describe(self) -> dict[str, Any]: ...
