"""Choose the fastest number of DataLoader workers: more or fewer.

What it does: sets workers, prefetching and persistent workers. With a CUDA device, it also sets pinned memory
    and non-blocking copies, with or without workers. Batch size, order, sampler and collation stay.
Why it is faster: workers prepare batches while the model computes, and persistent workers are not restarted
    each epoch. Fewer are faster if workers and the model compete for cores.
When it does not help: batches that are ready at once; more workers than cores.
What it can change: nothing if the data set draws no random numbers, or if fewer workers replace the requested
    ones: each batch then draws from the generators of the worker that would have made it. Otherwise workers
    draw from other streams: augmentations have the same distribution but other values.
Evidence: per-item PIL pipelines ran 6,920 images/s with two workers and 8,512 with none on 2 cores.
Sources: torch.utils.data documentation, "Multi-process data loading"; pytorch issue 13246 on copies in
    workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import NO_LOADER
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import SWITCH, Lever, Number, Options, Skip, Table, Undo, Value

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from flatout.schema.program import Ledger, TrainingContext

CUSTOM_SAMPLER = "the training DataLoader has a sampler ({name}) that may depend on earlier steps, so batches cannot be loaded ahead"
MIN_BATCHES = 4  # shorter loaders do not repay the start of workers


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.backwards:  # no loader exists yet; the rule checks each one as it is created
        return Options(({},))
    if not context.loaders:
        return Skip(NO_LOADER)
    training_numbers = context.training_loader_numbers
    usable = [
        loader
        for number, loader in enumerate(context.loaders)
        if not loader["iterable"] and (number in training_numbers or not training_numbers)
    ]
    if not usable:
        return Skip(
            "the training data set is an IterableDataset; another number of workers could repeat or reorder its samples"
        )
    from flatout.data.streams import can_emulate, custom_sampler, seeds_itself

    training_loaders = context.training_loaders
    pin: dict[str, Any] = {"pin": True} if context.device_type == "cuda" else {}
    if training_loaders and all(
        custom_sampler(loader.sampler, loader.batch_sampler) for loader in training_loaders
    ):
        return Skip(
            CUSTOM_SAMPLER.format(
                name=custom_sampler(training_loaders[0].sampler, training_loaders[0].batch_sampler)
            )
        )
    requested, cores, random = usable[0]["asked_workers"], max(1, facts.cores), context.data_is_random()
    if random and requested >= cores and not any(map(seeds_itself, context.live_loaders)):
        counts = [n for n in range(requested - 1, -1, -1) if can_emulate(n, requested)]
        return Options(tuple({"workers": n, **pin} for n in counts[:4]), effect=Effect.EXACT)
    counts = [n for n in dict.fromkeys((1, min(2, cores), cores // 2, cores, 0)) if n != requested and n >= 0]
    values: list[Value] = [{"workers": n} for n in counts]
    if pin:  # include the script's number: with 0, its own thread pins each batch
        values = [
            {"workers": n, **pin}
            for n in dict.fromkeys((min(8, cores - 1), requested, *counts))
            if n > 0 or n == requested
        ]
    if requested:
        values.append({"workers": requested, "persistent": True})
    return Options(tuple(values[:4]), effect=Effect.RESAMPLED if random else Effect.EXACT)


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, dict)

    def change(dataset: Dataset, arguments: dict[str, Any]) -> dict[str, Any]:
        return _worker_arguments(dataset, arguments, value)

    context.change_loaders(change, ledger)
    context.feed_loaders(_replace_workers, ledger)
    if value.get("pin") and context.torch.cuda.is_available():
        from flatout.data.device import move_without_waiting

        move_without_waiting(ledger)
    return ledger.restore


def _replace_workers(loader: DataLoader, requested: dict[str, Any], feed: Any) -> Any:
    from flatout.data.streams import can_emulate, seeds_itself

    workers = requested.get("num_workers", 0)
    if not can_emulate(loader.num_workers, workers) or loader.batch_sampler is None or seeds_itself(loader):
        return feed
    from flatout.data.feed import Feed

    feed = feed or Feed(loader)
    feed.emulated_workers = workers
    return feed


def _worker_arguments(dataset: Dataset, arguments: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which this loader is created.

    Loaders that are short or not map-style keep theirs.
    """
    # An IterableDataset inherits a __getitem__; a second worker would repeat its samples.
    if not hasattr(dataset, "__getitem__") or any(
        kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__
    ):
        return arguments
    try:
        batches = len(dataset) / (arguments.get("batch_size") or 1)
    except TypeError:
        return arguments
    if batches < MIN_BATCHES:
        return arguments
    from flatout.data.streams import can_emulate, custom_sampler, without_workers

    if custom_sampler(arguments.get("sampler"), arguments.get("batch_sampler")):
        return arguments
    requested = arguments.get("num_workers", 0)
    workers = int(value.get("workers", requested))
    if (
        arguments.get("worker_init_fn") is not None and requested and not workers
    ):  # it may open files or assign work to workers
        return arguments
    changed = {**arguments, "num_workers": workers} if workers else without_workers(arguments)
    if workers:
        changed["persistent_workers"] = arguments.get("persistent_workers", False) or not can_emulate(
            workers, requested
        )
        if "prefetch" in value:
            changed["prefetch_factor"] = int(value["prefetch"])
    if value.get("pin"):
        changed["pin_memory"] = True
    return changed


def code(value: Value) -> str:
    settings: dict[str, Any] = value if isinstance(value, dict) else {}
    arguments = f"num_workers={settings.get('workers', 0)}"
    arguments += ", persistent_workers=True" if settings.get("workers") else ""
    return f"DataLoader(..., {arguments}{', pin_memory=True' if settings.get('pin') else ''})" + (
        "  # and images.to(device, non_blocking=True)" if settings.get("pin") else ""
    )


LEVER = Lever(
    "loader",
    Moment.LOADER,
    Effect.RESAMPLED,
    applies,
    code,
    apply=apply,
    accepts=(
        Table(
            {
                "workers": (Number(0, 1000),),
                "prefetch": (Number(1, 1000),),
                "pin": SWITCH,
                "persistent": SWITCH,
            }
        ),
    ),
    page=__doc__,
)
