"""The usual effect of each lever, before anything of this program is measured.

``python bench/prior.py`` generates the table ``prior.json`` beside this file from recorded benchmarks. An
effect is the natural logarithm of the time with the lever over the time without it: -0.1 is about 10 %
faster, 0 no change. Each entry holds the mean and the standard deviation of the effect on an unmeasured
program, and the number of records. With few records the standard deviation is wide.

A program is described by its device and by its kind on three axes: its layers, its step time, and whether it
waits for data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flatout.job.folder import read_json
from flatout.schema.facts import Facts
from flatout.schema.lever import Value

TABLE_FILE = Path(__file__).with_name("prior.json")
ANY = "any"  # every kind of program
ANY_VALUE = "*"  # every value of the lever
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
TINY_STEP_MS = 5.0
DATA_BOUND_SHARE = 0.25  # of the step
OTHER_PROCESSOR_SD_FACTOR = (
    1.5  # factor on the standard deviation of measurements from another kind of processor
)

CONVOLUTIONS, RECURRENT, TRANSFORMER, DENSE = "convolutions", "recurrent", "transformer", "dense"
TINY_STEPS, USUAL_STEPS = "tiny steps", "usual steps"
DATA_BOUND, COMPUTE_BOUND = "data-bound", "compute-bound"
CPU, CPU_BF16, CUDA = "cpu", "cpu with bf16", "cuda"


class Prior(NamedTuple):
    """The prior of an effect: ``mean`` and ``sd`` of the natural log of the time ratio, and ``n`` records."""

    mean: float
    sd: float
    n: int


NEUTRAL = Prior(0.0, 0.25, 0)
Entries = dict[tuple[str, str, str], dict[str, Prior]]  # (lever, value, device) -> kind of program -> effect


def device_kind(facts: Facts, device: str | None = None) -> str:
    """The kind of device that the program trains on.

    ``device`` is "cpu" or "cuda"; without it, the machine's GPU decides if there is one.
    """
    if device == CUDA or (device is None and facts.cuda):
        return CUDA
    return CPU_BF16 if BF16_FLAGS & set(facts.cpu_flags) else CPU


def layer_kinds(layers: Iterable[str]) -> tuple[str, ...]:
    """The kinds implied by the class names of modules; empty if no name is known."""
    names = set(layers)
    convolutions = any(name.startswith(("Conv", "LazyConv")) and name[-1:] == "d" for name in names)
    kinds = [CONVOLUTIONS] if convolutions else []
    if any(name.startswith(("RNN", "LSTM", "GRU")) for name in names):
        kinds.append(RECURRENT)
    normalised = any(name.endswith(("LayerNorm", "RMSNorm")) for name in names)
    if any("attention" in name.lower() or name.startswith("Transformer") for name in names) or (
        normalised and "Embedding" in names and not kinds
    ):
        kinds.append(TRANSFORMER)
    return tuple(kinds) or ((DENSE,) if names else ())


def kinds_of(context: Mapping[str, Any], phases: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """The kinds of a program.

    ``context`` is the ``describe`` of the training context, with class names in ``layers``. ``phases`` holds
    ``median_ms`` and ``share`` for each phase of a step. Missing information omits its axis.
    """
    kinds = list(layer_kinds(context.get("layers", ())))
    step_ms = sum(phase["median_ms"] for phase in phases.values())
    if step_ms > 0:
        kinds.append(TINY_STEPS if step_ms < TINY_STEP_MS else USUAL_STEPS)
    if "data" in phases:
        kinds.append(DATA_BOUND if phases["data"]["share"] >= DATA_BOUND_SHARE else COMPUTE_BOUND)
    return tuple(kinds)


def value_key(lever: str, value: Value, cores: int) -> str:
    """A value as in the table: words and flags unchanged, no sizes, threads as a share of cores."""
    if isinstance(value, dict):
        parts = (
            f"{key}={item}" if isinstance(item, (bool, str)) or item == 0 else key
            for key, item in sorted(value.items())
        )
        return ", ".join(parts)
    if lever == "threads" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return "half of the cores or more" if 2 * value >= cores else "less than half of the cores"
    return "on" if value is True else str(value)


def entries_of(table: Mapping[str, Any]) -> Entries:
    """Raises KeyError if a row lacks a field."""
    entries: Entries = {}
    for row in table["entries"]:
        entries.setdefault((row["lever"], row["value"], row["device"]), {})[row["kind"]] = Prior(
            row["mean"], row["sd"], row["n"]
        )
    return entries


@cache
def committed_entries() -> Entries:
    """The packaged table; empty if it is missing or damaged, so every lever has the neutral prior."""
    table = read_json(TABLE_FILE)
    try:
        return entries_of(table) if isinstance(table, dict) else {}
    except (KeyError, TypeError):
        return {}


def priors(
    facts: Facts,
    context_description: Mapping[str, Any],
    phases: Mapping[str, Mapping[str, float]],
    entries: Entries | None = None,
) -> Callable[[str, Value], Prior]:
    """A function from lever and value to the prior in this program; NEUTRAL without an entry.

    A value without an entry gets the entry of all values of its lever. Records of CPUs with bfloat16 apply to
    CPUs without it, and vice versa, with a wider standard deviation. The narrower of the two priors counts.
    """
    table = committed_entries() if entries is None else entries
    kinds = kinds_of(context_description, phases)
    device = device_kind(facts, context_description.get("device"))

    devices = {
        CPU: ((CPU, 1.0), (CPU_BF16, OTHER_PROCESSOR_SD_FACTOR)),
        CPU_BF16: ((CPU_BF16, 1.0), (CPU, OTHER_PROCESSOR_SD_FACTOR)),
    }.get(device, ((device, 1.0),))

    def prior(lever: str, value: Value) -> Prior:
        for key in (value_key(lever, value, facts.cores), ANY_VALUE):
            candidates = [
                (clearest(by_kind, kinds), sd_factor)
                for device_name, sd_factor in devices
                if (by_kind := table.get((lever, key, device_name)))
            ]
            if candidates:
                return min(
                    (Prior(entry.mean, entry.sd * sd_factor, entry.n) for entry, sd_factor in candidates),
                    key=lambda entry: entry.sd,
                )
        return NEUTRAL

    return prior


def clearest(by_kind: Mapping[str, Prior], kinds: Iterable[str]) -> Prior:
    """The entry of the program's kinds that differs most clearly from that of all programs.

    If none differs, return the entry of all programs. "Clearly" is the difference of the means in standard
    errors of the kind's mean.
    """
    overall = by_kind[ANY]

    def clearness(entry: Prior) -> float:
        return abs(entry.mean - overall.mean) * math.sqrt(entry.n) / entry.sd

    return max([overall, *(by_kind[kind] for kind in kinds if kind in by_kind)], key=clearness)
