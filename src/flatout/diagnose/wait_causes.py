"""Assigns a wait for data to one of the data rules, so that one problem gives one finding."""

from enum import Enum

from flatout.diagnose.gains import (
    HOW_BY_TIME,
    MIN_REPEATS,
    certain_gain,
    how_by_what_if,
    speedup_without,
    was_measured,
)
from flatout.schema.profile import LoaderRecord, ProfileRecord
from flatout.schema.records import Ratio

MAX_WORKERS_PER_CORE = 2  # more of them only compete for cores
MAIN_SHARE = 0.5
MIN_WAIT_GAIN = 1.1  # every loader costs a little; below this the data set is not to blame


class WaitCause(Enum):
    """Causes from the narrowest to the widest: a wait gets the first that applies."""

    REMADE = "remade"
    RESTARTED = "restarted"
    TOO_MANY_WORKERS = "too many workers"
    SLOW_FETCH = "slow fetch"
    WAIT = "wait"


def wait_cause(profile: ProfileRecord, loader: LoaderRecord) -> WaitCause | None:
    """The narrowest cause of the wait for this loader, or None if the wait is negligible."""
    if gain_without_wait(profile, loader) is None:
        return None
    if loader.created >= MIN_REPEATS and loader.iterators <= loader.created + 1:
        return WaitCause.REMADE
    if has_too_many_workers(profile, loader):
        return WaitCause.TOO_MANY_WORKERS
    if (
        loader.workers
        and not loader.persistent_workers
        and loader.iterators >= MIN_REPEATS
        and iterator_start_ms(profile, loader) > MAIN_SHARE * loader.wait_ms
    ):
        return WaitCause.RESTARTED
    if loader.slow_place is not None and (loader.slow_share or 0) > 0.2:
        return WaitCause.SLOW_FETCH
    return WaitCause.WAIT


def has_too_many_workers(profile: ProfileRecord, loader: LoaderRecord) -> bool:
    cores = int(profile.settings.get("cores") or 0)
    return bool(cores and loader.workers > max(MAX_WORKERS_PER_CORE * cores, 4))


def iterator_start_ms(profile: ProfileRecord, loader: LoaderRecord) -> float:
    """The cost of starting its iterators per mean step: starting workers and waiting for the first batch."""
    return loader.start_ms * loader.iterators / max(1, loader.batches or profile.steps)


def gain_without_wait(profile: ProfileRecord, loader: LoaderRecord) -> Ratio | None:
    """The speed-up without this loader's wait, or None if the wait is negligible.

    The what-if gives the speed-up if this loader causes most of the wait; otherwise its own wait time does.
    Workers also take cores from the model. If that is a loader's only cost, nothing waits for it and a
    shorter wait would not help."""
    total = sum(other.wait_ms for other in profile.loaders)
    share = loader.wait_ms / total if total > 0 else 1.0 / max(1, len(profile.loaders))
    wait_ms = max(
        loader.wait_ms, iterator_start_ms(profile, loader) if loader.iterators >= MIN_REPEATS else 0.0
    )
    by_time = speedup_without(profile, wait_ms, MIN_WAIT_GAIN) if loader.wait_ms else None
    if by_time is None:
        return None
    ratio = certain_gain(profile, "loader")
    if ratio is not None:
        return ratio if share > MAIN_SHARE and ratio.median >= MIN_WAIT_GAIN else None
    return None if was_measured(profile, "loader") else by_time


def how_measured(profile: ProfileRecord) -> str:
    return (
        how_by_what_if("loader")
        if certain_gain(profile, "loader")
        else HOW_BY_TIME.replace("these calls", "the wait for data")
    )
