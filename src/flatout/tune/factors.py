"""Defines what a search explores: a factor for each value of each applicable lever, with its prior."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatout.schema.enums import Moment
from flatout.schema.plan import Choice, format_choice
from flatout.tune.effects import Factor, Space, TimedBlock
from flatout.tune.prior import priors
from flatout.tune.tuning import Tuning

VALUES_PER_LEVER = 3
MAX_DATA_GAIN = 0.7  # of the wait for data, in log time: what a good lever on the data path saves
DATA_MISFIT = {True: 0.065, False: 0.12}  # with data levers: without workers, and with
MIN_DATA_SD = 0.05  # of a data lever, which can also take cores away from the step
CLOSURE_REASON = "a step of this program is a closure that lasts seconds; levers cannot be switched inside it"
EARLIER_HOST = "an earlier part of this search"
KNOWN_PAIRS = frozenset(
    frozenset(pair)
    for pair in (
        ("channels_last", "autocast"),
        ("autocast", "compile"),
        ("channels_last", "compile"),
        ("fused_ops", "compile"),
        ("threads", "loader"),
        ("attention", "autocast"),
        ("attention", "compile"),
        ("cached_prefix", "batched_transforms"),
        ("loader", "batched_transforms"),
        ("loader", "cached_prefix"),
        ("malloc", "fused_optimizer"),
        ("malloc", "autocast"),
    )
)


def make_space(tuning: Tuning) -> None:
    """Create a factor for each value of each applicable lever, with its prior.

    If the program makes its batches in its own process, a data lever can save at most the wait for data,
    which is known.
    """
    ready, context = tuning.plain_trial.ready if tuning.plain_trial else {}, tuning.session.context
    prior = priors(tuning.facts, context, _phases(ready) if ready else {})
    closure, factors = tuning.interleaver.unit != "step", []
    in_process_loading = bool(ready) and all(loader["num_workers"] == 0 for loader in context["loaders"])
    max_gain = (
        -MAX_DATA_GAIN * math.log(1 - min(0.95, _phases(ready)["data"]["share"]))
        if in_process_loading
        else 0.0
    )
    for candidate in tuning.candidates.values():
        lever = candidate.lever
        if not candidate.selectable:
            continue
        if closure and lever.moment not in (Moment.PROCESS, Moment.IMPORT, Moment.LOADER):
            candidate.reason = CLOSURE_REASON
            continue
        for value in candidate.values[:VALUES_PER_LEVER]:
            key = format_choice(lever.name, value)
            mean, sd, _ = prior(lever.name, value)
            if lever.moment is Moment.LOADER and in_process_loading:
                mean, sd = max(mean, -max_gain), min(sd, max(MIN_DATA_SD, max_gain))
            tuning.choices[key] = Choice(lever.name, value)
            factors.append(Factor(key, lever.name, lever.live and not closure, mean, sd, lever.warms_up))
    levers = {factor.lever for factor in factors}
    base = {choice.name for choice in tuning.base or ()}
    excludes = {
        frozenset((name, other))
        for name in levers
        for other in tuning.candidates[name].lever.excludes
        if other in levers
    }
    needs = {name: tuple(n for n in tuning.candidates[name].lever.needs if n not in base) for name in levers}
    tuning.space = Space(
        tuple(factors), frozenset(excludes), {name: n for name, n in needs.items() if n}, KNOWN_PAIRS
    )
    if any(tuning.candidates[name].lever.moment is Moment.LOADER for name in levers):
        tuning.space = replace(tuning.space, misfit=DATA_MISFIT[in_process_loading])


def _phases(ready: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The phases of a step known from the warm-up: the wait for data, and the rest."""
    step_ms = max(ready["tick_ms"], 1e-6)
    data_ms = min(ready["data_ms"], step_ms)
    return {
        "data": {"median_ms": data_ms, "share": data_ms / step_ms},
        "other": {"median_ms": step_ms - data_ms, "share": 1 - data_ms / step_ms},
    }


def reuse_blocks(tuning: Tuning) -> None:
    """Reuse the blocks of an interrupted session as if from another machine; this one may have changed."""
    for block in tuning.session.blocks:
        active = frozenset(block["active"])
        if active <= tuning.choices.keys() and tuning.space.allowed(active):
            tuning.blocks.append(
                TimedBlock(
                    -1 - block["process"],
                    active,
                    block["at_s"],
                    -1 - block["window"],
                    block["ms"],
                    EARLIER_HOST,
                    block.get("busy", 0.0),
                )
            )
