"""Times batches inside the data set and finds the slow line.

Fetches some batches again, in the program's own thread. Runs at the end of a trial, because it advances
random generators and the data set's own state.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import is_user_file, place_of
from flatout.measure.clock import HostClock, seconds
from flatout.measure.line_timer import LineTimer
from flatout.measure.statistics import median

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.schema.program import TrainingContext

MAX_BATCHES = 6
MAX_S = 2.0
MAX_LOADERS = 4


def time_fetches(torch: ModuleType, context: TrainingContext) -> list[dict[str, Any]]:
    """The place of each live loader, its milliseconds a batch, and its slowest line with its share."""
    timings = []
    context.paused = True
    try:
        for loader in context.live_loaders[:MAX_LOADERS]:
            number = context.number_of_loader(loader)
            made_at = context.loaders[number]["place"] if number is not None else None
            try:
                timings.append({"made_at": made_at, **_fetch(torch, loader)})
            except Exception as error:  # the data set's own error: it may need a worker, for example
                timings.append({"made_at": made_at, "why_not": f"{type(error).__name__}: {error}"})
    finally:
        context.paused = False
    return timings


def _fetch(torch: ModuleType, loader: DataLoader) -> dict[str, Any]:
    kinds = torch.utils.data.dataloader._DatasetKind
    fetcher = kinds.create_fetcher(
        loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    epochs = chain.from_iterable(
        repeat(loader._index_sampler, 2 * MAX_BATCHES)
    )  # an epoch may have one batch
    clock, until_s, times = HostClock(), seconds() + MAX_S / 2, []
    for index in islice(epochs, MAX_BATCHES):
        start = clock.mark()
        fetcher.fetch(index)
        times.append(clock.elapsed_ms(start, clock.mark()))
        if seconds() > until_s:
            break
    until_s = seconds() + MAX_S / 2
    with LineTimer(is_user_file) as timer:
        for index in islice(epochs, MAX_BATCHES):
            if seconds() > until_s:
                break
            fetcher.fetch(index)
    if not times:
        return {}
    slowest = timer.ns.most_common(1)
    place = place_of(slowest[0][0]) if slowest else None
    return {
        "fetch_ms": median(times),
        "slow_place": place.to_json() if place else None,
        "slow_share": slowest[0][1] / max(1, timer.ns.total()) if slowest else None,
    }
