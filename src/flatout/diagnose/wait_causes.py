"""Assigns a wait for data to one of the data rules, so that one problem gives one finding."""

from __future__ import annotations

from enum import Enum

from flatout.diagnose.gains import OFTEN, TIMED, certain_gain, how, measured, without
from flatout.schema.profile import LoaderRecord, ProfileRecord
from flatout.schema.records import Ratio

CROWD = 2  # workers per core: more of them only compete for cores
MOST_OF_IT = 0.5
LEAST = 1.1  # every loader costs a little; below this the data set is not to blame


class WaitCause(Enum):
    """Causes from the narrowest to the widest: a wait gets the first that applies."""

    REMADE = "remade"
    RESTARTED = "restarted"
    CROWDED = "crowded"
    SLOW_FETCH = "slow fetch"
    WAIT = "wait"


def cause(profile: ProfileRecord, loader: LoaderRecord) -> WaitCause | None:
    """The narrowest cause of the wait for this loader, or None if the wait is negligible."""
    if gain_without_wait(profile, loader) is None:
        return None
    if loader.created >= OFTEN and loader.iterators <= loader.created + 1:
        return WaitCause.REMADE
    if crowded(profile, loader):
        return WaitCause.CROWDED
    if (
        loader.workers
        and not loader.persistent_workers
        and loader.iterators >= OFTEN
        and begin_ms(profile, loader) > MOST_OF_IT * loader.wait_ms
    ):
        return WaitCause.RESTARTED
    if loader.slow_place is not None and (loader.slow_share or 0) > 0.2:
        return WaitCause.SLOW_FETCH
    return WaitCause.WAIT


def crowded(profile: ProfileRecord, loader: LoaderRecord) -> bool:
    cores = int(profile.settings.get("cores") or 0)
    return bool(cores and loader.workers > max(CROWD * cores, 4))


def begin_ms(profile: ProfileRecord, loader: LoaderRecord) -> float:
    """The cost of starting its iterators per mean step: starting workers and waiting for the first batch."""
    return loader.start_ms * loader.iterators / max(1, loader.batches or profile.steps)


def gain_without_wait(profile: ProfileRecord, loader: LoaderRecord) -> Ratio | None:
    """The speed-up without this loader's wait, or None if the wait is negligible.

    The what-if gives the speed-up if this loader causes most of the wait; otherwise its own wait time does.
    Workers also take cores from the model. If that is a loader's only cost, nothing waits for it and a
    shorter wait would not help.
    """
    total = sum(each.wait_ms for each in profile.loaders)
    mine = loader.wait_ms / total if total > 0 else 1.0 / max(1, len(profile.loaders))
    waited = max(loader.wait_ms, begin_ms(profile, loader) if loader.iterators >= OFTEN else 0.0)
    alone = without(profile, waited, LEAST) if loader.wait_ms else None
    if alone is None:
        return None
    ratio = certain_gain(profile, "loader")
    if ratio is not None:
        return ratio if mine > MOST_OF_IT and ratio.median >= LEAST else None
    return None if measured(profile, "loader") else alone


def how_known(profile: ProfileRecord) -> str:
    return (
        how("loader")
        if certain_gain(profile, "loader")
        else TIMED.replace("these calls", "the wait for data")
    )
