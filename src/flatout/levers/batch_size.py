"""Change the batch size of the training DataLoader.

What it does: creates one DataLoader with the given batch size: `{size = 64, loader = 0}`. `loader` is the
    position of the DataLoader in the order in which the program creates them; the default is 0. Loaders
    created later in the same way (each epoch, say) get the size too. All others, including those for
    evaluation, are unchanged. A trial identifies the training loader: it delivers the last batch before each
    backward pass. Order, sampler, collation and `drop_last` stay; torch's own BatchSampler is created again.
    Learning rate, schedule and number of steps stay as the script sets them.
Why it is faster: an underused device processes a larger batch in nearly the same time, and more samples share
    the fixed cost of a step.
When it does not help: a fully used device takes twice the time for twice the batch, or more if caches
    overflow; a loader that is the bottleneck.
What it can change: what the model learns. Gradients are means over more samples, and an epoch has fewer
    steps. So you select it by name; the tuner never does. Scripts that hard-code their batch size elsewhere
    (a hidden state, a reshape) may fail.
Evidence: none in general; measured on your program by `flatout batch`.
Sources: torch.utils.data documentation, "Loading Batched and Non-Batched Data"; McCandlish et al. 2018, "An
    Empirical Model of Large-Batch Training".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import NO_LOADER
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Table, Undo, Value

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from flatout.schema.program import Ledger, TrainingContext

NAME = "batch_size"
BATCHES_ITSELF = (
    "the training DataLoader does not make batches (batch_size=None); the data set or the script does"
)
OWN_SAMPLER = "the training DataLoader has a sampler ({name}) of its own, which may depend on the batch size"
OWN_BATCHES = "the training DataLoader has a batch sampler ({name}) that sets the batch size"


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.backwards:  # no loader exists yet; the rule checks each one as it is created
        return Options(({},))
    if not context.loaders:
        return Skip(NO_LOADER)
    position = context.training_loader
    if position is None:
        return Skip(
            "no backward pass followed a batch loaded with gradients enabled, so the training DataLoader is unknown"
        )
    size = context.loaders[position]["batch_size"]
    loader = next(
        (loader for loader in context.training_loaders if context.number_of_loader(loader) == position),
        next(iter(context.training_loaders), None),
    )
    changed = resized(_arguments(loader), 1) if loader is not None else {}
    if isinstance(changed, str):
        return Skip(changed)
    if not size:
        return Skip(BATCHES_ITSELF)
    return Options(tuple({"size": n, "loader": position} for n in (2 * size, size // 2) if n))


def _arguments(loader: DataLoader) -> dict[str, Any]:
    """The arguments that set the batches. A loader that received a size has created its own BatchSampler."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"sampler": loader.sampler, "batch_size": loader.batch_size}


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, dict)
    context.change_loaders(_LoaderRule(context, value["size"], value.get("loader", 0)), ledger)
    return ledger.restore


class _LoaderRule:
    """Counts the loaders as they are created. Loaders created like the selected one count as selected."""

    def __init__(self, context: TrainingContext, size: int, loader: int) -> None:
        self.context, self.size, self.loader = context, size, loader
        self.created = 0
        self.selected_key: tuple[Any, ...] | None = None

    def __call__(self, dataset: Dataset, arguments: dict[str, Any]) -> dict[str, Any]:
        key = self.context.loader_key(dataset, arguments)
        if self.created == self.loader:
            self.selected_key = key
        self.created += 1
        if key != self.selected_key:
            return arguments
        changed = resized(arguments, self.size)
        if isinstance(changed, str):
            self.context.report(NAME, changed)
            return arguments
        return changed


def resized(arguments: dict[str, Any], size: int) -> dict[str, Any] | str:
    """The arguments of a DataLoader with this batch size, or the reason why there are none."""
    batch_sampler = arguments.get("batch_sampler")
    if batch_sampler is not None and (
        type(batch_sampler).__name__ != "BatchSampler" or not _is_from_torch(batch_sampler)
    ):
        return OWN_BATCHES.format(name=type(batch_sampler).__name__)
    samplers = (arguments.get("sampler"), getattr(batch_sampler, "sampler", None))
    custom = next((sampler for sampler in samplers if not _is_from_torch(sampler)), None)
    if custom is not None:
        return OWN_SAMPLER.format(name=type(custom).__name__)
    if batch_sampler is not None:
        return {
            **arguments,
            "batch_sampler": type(batch_sampler)(batch_sampler.sampler, size, batch_sampler.drop_last),
        }
    return BATCHES_ITSELF if arguments.get("batch_size", 1) is None else {**arguments, "batch_size": size}


def _is_from_torch(sampler: object) -> bool:
    return type(sampler) in (type(None), list, tuple, range) or type(sampler).__module__.startswith(
        "torch.utils.data."
    )


def code(value: Value) -> str:
    settings: dict[str, Any] = value if isinstance(value, dict) else {}
    return f"DataLoader(..., batch_size={settings.get('size', '...')})"


LEVER = Lever(
    NAME,
    Moment.LOADER,
    Effect.CHANGES_MATH,
    applies,
    code,
    apply=apply,
    accepts=(Table({"size": (Number(1, 2**31 - 1),), "loader": (Number(0, 1000),)}, ("size",)),),
    bare=False,
    page=__doc__,
)
