"""Give the training DataLoader another batch size.

What it does: makes one DataLoader with so many samples a batch: `{size = 64, loader = 0}`, where `loader` counts the DataLoaders in the order in which
    the program makes them, 0 where it is left out. Loaders that are made in the same way later (each epoch, say) get it too; all others, those of an
    evaluation among them, stay. A trial tells which loader trains: the one that the last batch before each backward pass came from. Order, sampler,
    collation and `drop_last` stay; a BatchSampler of torch's own is made anew. Learning rate, schedule and number of steps stay the script's.
Why it is faster: a device that is not full does a larger batch in nearly the same time, and what each step costs is paid by more samples.
When it does not help: a machine that is full already does twice the batch in twice the time, or more where caches overflow; a loader that is the wall.
What it can change: what is learned. Gradients are means over more samples and there are fewer steps in an epoch, so it is only used by name,
    never by the tuner. Scripts that write their batch size down elsewhere (a hidden state, a reshape) may fail under it.
Evidence: none in general; measured on your program by `flatout batch`.
Sources: torch.utils.data documentation, "Loading Batched and Non-Batched Data"; McCandlish et al. 2018, "An Empirical Model of Large-Batch Training".
"""

from __future__ import annotations

from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Comparison, Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment

NAME = "batch_size"
BATCHES_ITSELF = "the training DataLoader does not make batches (batch_size=None); the data set or the script does"
OWN_SAMPLER = "the training DataLoader has a sampler ({name}) that is not torch's own and may depend on the batch size"
OWN_BATCHES = "the training DataLoader has a batch sampler ({name}) that chooses the batch size itself"


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if not scene.backwards:  # before the first loader is made nothing can be seen; the rule looks at each one
        return Options(({},))
    if not scene.loaders:
        return Skip("no torch DataLoader was made in this process, so its batches come from elsewhere")
    trains = scene.training_loader
    if trains is None:
        return Skip("no backward pass came after a batch that was taken with gradients enabled, so no DataLoader is known to train")
    size = scene.loaders[trains]["batch_size"]
    live = next((loader for loader in scene.training_loaders if scene.number_of_loader(loader) == trains), next(iter(scene.training_loaders), None))
    made = resized(_arguments(live), 1) if live is not None else {}
    if isinstance(made, str):
        return Skip(made)
    if not size:
        return Skip(BATCHES_ITSELF)
    return Options(tuple({"size": n, "loader": trains} for n in (2 * size, size // 2) if n))


def _arguments(loader: Any) -> dict[str, Any]:
    """Those that decide on batches. A loader that was given a size has made a BatchSampler for itself."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"sampler": loader.sampler, "batch_size": loader.batch_size}


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    size, loader = _read(value)
    scene.change_loaders(_Rule(scene, size, loader), ledger)
    return ledger.restore


def _read(value: Value) -> tuple[int, int]:
    """Size and loader. Raises TypeError."""
    if not isinstance(value, dict) or not {"size"} <= value.keys() <= {"size", "loader"}:
        raise TypeError(f"the value of batch_size is a table such as {{size = 64}} or {{size = 64, loader = 1}}, not {value!r}")
    size, loader = value["size"], value.get("loader", 0)
    if not (type(size) is int and size > 0 and type(loader) is int and loader >= 0):
        raise TypeError(f"size is a whole number from 1 on, loader one from 0 on, not {value!r}")
    return size, loader


class _Rule:
    """Counts the loaders that are made. One that is made in the same way as the one meant is that one again."""

    def __init__(self, scene: Any, size: int, loader: int) -> None:
        self.scene, self.size, self.loader = scene, size, loader
        self.made = 0
        self.meant: tuple[Any, ...] | None = None

    def __call__(self, dataset: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        way = self.scene.way_of_loader(dataset, arguments)
        if self.made == self.loader:
            self.meant = way
        self.made += 1
        if way != self.meant:
            return arguments
        changed = resized(arguments, self.size)
        if isinstance(changed, str):
            self.scene.report(NAME, changed)
            return arguments
        return changed


def resized(arguments: dict[str, Any], size: int) -> dict[str, Any] | str:
    """The arguments of a DataLoader with this batch size, or why they cannot have one."""
    batches = arguments.get("batch_sampler")
    samplers = [each for each in (arguments.get("sampler"), batches, getattr(batches, "sampler", None)) if each is not None]
    if batches is not None and (type(batches).__name__ != "BatchSampler" or not type(batches).__module__.startswith("torch.utils.data.")):
        return OWN_BATCHES.format(name=type(batches).__name__)
    own = next((each for each in samplers if type(each) not in (list, tuple, range) and not type(each).__module__.startswith("torch.utils.data.")), None)
    if own is not None:
        return OWN_SAMPLER.format(name=type(own).__name__)
    if batches is not None:
        return {**arguments, "batch_sampler": type(batches)(batches.sampler, size, batches.drop_last)}
    return BATCHES_ITSELF if arguments.get("batch_size", 1) is None else {**arguments, "batch_size": size}


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """Batches of the size that was asked for, filled up with one sample."""
    def change(dataset: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        from torch.utils.data import default_collate

        collate = arguments.get("collate_fn") or default_collate
        return {**arguments, "collate_fn": lambda samples: collate(samples[:1] * len(samples))}

    scene.change_loaders(change, ledger)
    return ledger.restore


def code(value: Value) -> str:
    held: dict[str, Any] = value if isinstance(value, dict) else {}
    return f"DataLoader(..., batch_size={held.get('size', '...')})"


LEVER = Lever(NAME, Moment.LOADER, Effect.CHANGES_MATH, applies, code, apply=apply, guard=Comparison.DISTRIBUTION, known_bad=known_bad, page=__doc__)
