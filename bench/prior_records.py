"""Reads the records behind the prior of effect sizes: benchmark results, published figures (see prior.py)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import provenance  # noqa: F401  puts src on the path

from flatout.job.folder import read_json
from flatout.tune.effects import Factor, Space, TimedBlock, fit_effects
from flatout.tune.prior import (
    COMPUTE_BOUND,
    CONVOLUTIONS,
    CPU,
    CPU_BF16,
    CUDA,
    DATA_BOUND,
    DATA_BOUND_SHARE,
    DENSE,
    RECURRENT,
    TINY_STEP_MS,
    TINY_STEPS,
    TRANSFORMER,
    USUAL_STEPS,
    kinds_of,
    value_key,
)

LEAST_SD = 0.03  # of one comparison
Z95 = 1.96
FLAT_SD, TELLING_SD = 1.0, 0.3  # of the prior for the blocks, and of an effect that they determine
BY_REGRESSION = "design"  # the tuner's name for a ratio that includes its own prior

# Layers of the programs whose records predate the field for layers.
LAYERS = {
    "mnist": CONVOLUTIONS,
    "imagenet": CONVOLUTIONS,
    "pytorch_cifar": CONVOLUTIONS,
    "nanogpt": TRANSFORMER,
    "dcgan": CONVOLUTIONS,
    "word_lm": RECURRENT,
    "time_sequence": RECURRENT,
    "reinforce": DENSE,
    "vae": DENSE,
    "lightning": DENSE,
    "linear": DENSE,
    "mlp": DENSE,
    "lstm": RECURRENT,
    "gpt": TRANSFORMER,
    "cnn": CONVOLUTIONS,
    "resnet18": CONVOLUTIONS,
    "wide_mlp": DENSE,
    "many_small": DENSE,
    "unet": CONVOLUTIONS,
    "data cifar": CONVOLUTIONS,
    "data mnist": CONVOLUTIONS,
    "memory": TRANSFORMER,
}
DATA_LEVERS = {
    "flatout, batched_transforms": ("batched_transforms", "all"),
    "flatout, cached_prefix": ("cached_prefix", "mib"),
    "4 workers": ("loader", "workers"),
}
RECOMPUTED = ("blocks, half", "blocks")


@dataclass(frozen=True)
class Record:
    """The effect of one lever and value in one program.

    ``effect``, its ``variance``, and the program's kinds. It stands for ``count`` programs with standard
    deviation ``spread``.
    """

    program: str
    lever: str
    value: str
    device: str
    kinds: tuple[str, ...]
    effect: float
    variance: float
    count: int = 1
    spread: float = 0.0
    published: bool = False


@dataclass(frozen=True)
class Published:
    """Builds a published record.

    ``ratio`` is the speed-up; ``count`` the records that it is worth, ``spread`` their standard deviation as
    a log ratio.
    """

    lever: str
    value: str
    device: str
    kinds: tuple[str, ...]
    ratio: float
    source: str
    count: int = 1
    spread: float = 0.0


# Published figures, not measured by this project. The spread of the 180 models is not published; 0.3 is an
# assumption, and they count as ten.
PUBLISHED = (
    Published(
        "tf32",
        "on",
        CUDA,
        (TRANSFORMER, USUAL_STEPS),
        2.21,
        "124M GPT, one A100, torch 2.6: LLMs-from-scratch, chapter 5",
    ),
    Published(
        "autocast",
        "bfloat16",
        CUDA,
        (TRANSFORMER, USUAL_STEPS),
        1.60,
        "124M GPT over TF32, one A100, torch 2.6: LLMs-from-scratch, chapter 5",
    ),
    Published(
        "compile",
        "default",
        CUDA,
        (),
        1.41,
        "geometric mean over 180 models, A100: Ansel et al., ASPLOS 2024",
        10,
        0.3,
    ),
    Published(
        "channels_last",
        "on",
        CUDA,
        (CONVOLUTIONS, USUAL_STEPS),
        1.47,
        "ResNet-50 with AMP, RTX 3090, torch 1.12: timm benchmark tables",
    ),
    Published(
        "channels_last",
        "on",
        CUDA,
        (TRANSFORMER, USUAL_STEPS),
        1.005,
        "ViT-B with AMP, RTX 3090, torch 1.12: timm benchmark tables",
    ),
    Published(
        "fused_optimizer",
        "fused",
        CUDA,
        (TRANSFORMER, USUAL_STEPS),
        1.03,
        "124M GPT, one A100, torch 2.6: LLMs-from-scratch, chapter 5",
    ),
    Published(
        "reduced_precision",
        "on",
        CPU_BF16,
        (CONVOLUTIONS,),
        1.30,
        "convolution backward 1.14 to 1.48 on Sapphire Rapids: pytorch pull request 126054",
    ),
)


def all_records(folder: Path) -> list[Record]:
    """Returns the records of every result file in ``folder``, and the published figures."""
    published = [
        Record(
            each.source,
            each.lever,
            each.value,
            each.device,
            each.kinds,
            -math.log(each.ratio),
            0.0,
            each.count,
            each.spread,
            True,
        )
        for each in PUBLISHED
    ]
    measured = [
        *open_set_records(programs_of(folder, "open_set", "scripts")),
        *open_set_records(tuned_trainers(folder)),
        *regret_records(programs_of(folder, "regret", "programs")),
        *data_records(programs_of(folder, "data", "training")),
        *memory_records(folder),
    ]
    return [*one_per_program(measured), *published]


def programs_of(folder: Path, theme: str, field: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns (program, device) -> its record; of several months, the newest that has the program."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(
        folder.glob(f"{theme}_*.json"), key=lambda path: (path.stem.rpartition("_")[2], path.stem)
    ):
        data = read_json(path)
        if isinstance(data, dict) and data.get("theme") == theme:
            for name, entry in data[field].items():
                found[name, device_of(data["made"], entry)] = entry
    return found


def tuned_trainers(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns (program, device) -> the tuning of each program of a trainer framework."""
    parts = programs_of(folder, "trainers", "programs")
    return {
        (name, device_of(entry["tune"]["made"], entry["tune"])): entry["tune"]
        for (name, _), entry in parts.items()
        if "tune" in entry
    }


def device_of(made: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Returns the device kind of a record. Older records name none; their CPUs are without bfloat16."""
    return entry.get("device_kind") or (CPU if made["slug"].startswith("cpu") else CUDA)


def open_set_records(scripts: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Record]:
    for (name, device), entry in scripts.items():
        if "phases" not in entry or entry.get("disturbance"):  # other programs ran beside the search
            continue
        kinds = kinds_of(entry["context"], entry["phases"])
        if "layers" not in entry["context"]:
            kinds = (*((LAYERS[name],) if name in LAYERS else ()), *kinds)
        for comparison in entry.get("comparisons", ()):
            choice = single_difference(comparison["plan"], comparison["against"], cores_of(entry["made"]))
            if choice and comparison["ratio"] and comparison["how"] != BY_REGRESSION:
                yield Record(
                    name,
                    *choice,
                    device,
                    kinds,
                    -math.log(comparison["ratio"]),
                    variance(comparison["low"], comparison["high"]),
                )

        yield from block_records(
            name, device, kinds, entry.get("blocks", {"keys": [], "rows": []}), cores_of(entry["made"])
        )


def block_records(
    name: str, device: str, kinds: tuple[str, ...], blocks: Mapping[str, Any], cores: int
) -> Iterator[Record]:
    """Returns the effects of each lever and value from the blocks of one session, without prior knowledge.

    Leaves out effects that the blocks cannot separate.
    """
    keys = blocks["keys"]
    named = {key: choice for key in keys for choice in choices(key, cores)}
    space = Space(tuple(Factor(key, named[key][0], False, 0.0, FLAT_SD) for key in keys))
    if not keys:
        return
    fitted = fit_effects(
        space,
        [
            TimedBlock(process, frozenset(keys[at] for at in on), at_s, window, ms)
            for process, window, at_s, ms, *on in blocks["rows"]
        ],
    )
    for at, key in enumerate(keys):
        spread = float(fitted.cov[at, at])
        if spread < TELLING_SD**2:
            yield Record(name, *named[key], device, kinds, float(fitted.mean[at]), max(spread, LEAST_SD**2))


def regret_records(programs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Record]:
    for (name, device), entry in programs.items():
        if entry.get("status") != "measured":
            continue
        steps = [ms for final in entry["finals"] for rounds in final["rounds_ms"] for ms, _ in rounds]
        tiny = (TINY_STEPS if median(steps) < TINY_STEP_MS else USUAL_STEPS,) if steps else ()
        kinds = (*((LAYERS[name],) if name in LAYERS else ()), *tiny)
        cores = cores_of(entry["made"])
        tried = {
            frozenset(choices(each["plan"], cores)): each["ratio"]
            for each in entry["screened"]
            if each["ratio"]
        }
        for plan, ratio in tried.items():
            for choice in plan:
                base = tried.get(plan - {choice})
                if base:
                    both = variance(ratio["low"], ratio["high"]) + (
                        variance(base["low"], base["high"]) if base["n"] else 0.0
                    )
                    yield Record(
                        name, *choice, device, kinds, math.log(base["median"] / ratio["median"]), both
                    )


def data_records(programs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Record]:
    for (name, device), ways in programs.items():
        plain = ways["0 workers"]
        share = plain["data_ms"] / plain["step_ms"]
        kinds = (
            LAYERS[f"data {name}"],
            TINY_STEPS if plain["step_ms"] < TINY_STEP_MS else USUAL_STEPS,
            DATA_BOUND if share >= DATA_BOUND_SHARE else COMPUTE_BOUND,
        )
        for way, choice in DATA_LEVERS.items():
            if way in ways and ways[way].get("times_plain"):
                ratio = ways[way]["times_plain"]
                yield Record(
                    f"data {name}",
                    *choice,
                    device,
                    kinds,
                    -math.log(ratio["median"]),
                    variance(ratio["low"], ratio["high"]),
                )


def memory_records(folder: Path) -> Iterator[Record]:
    for path in sorted(folder.glob("memory_*.json"))[::-1]:
        data = read_json(path)
        if not isinstance(data, dict) or data.get("theme") != "memory":
            continue
        for process in data["processes"]:
            for way in RECOMPUTED:
                logs = [
                    math.log(a / b)
                    for a, b in zip(process["ms"].get(way, ()), process["ms"]["plain"], strict=False)
                ]
                if logs:
                    yield Record(
                        "memory",
                        "recompute",
                        "blocks",
                        device_of(data["made"], data),
                        (LAYERS["memory"], USUAL_STEPS),
                        median(logs),
                        LEAST_SD**2,
                    )
        return


def cores_of(made: Mapping[str, Any]) -> int:
    found = re.search(r"(\d+) cores", made["device"])
    return int(found[1]) if found else 1


def single_difference(plan: str, against: str, cores: int) -> tuple[str, str] | None:
    """Returns the lever and value in ``plan`` but not in ``against``; None unless exactly one differs."""
    here = choices(plan, cores)
    if against.startswith("the same without "):
        without = against.removeprefix("the same without ")
        left = [choice for choice in here if choice[0] == without]
    else:
        there = choices(against, cores)
        left = [choice for choice in here if choice not in there] if set(there) <= set(here) else []
    return left[0] if len(left) == 1 else None


def choices(plan: str, cores: int) -> list[tuple[str, str]]:
    """Parses ``malloc=tcmalloc, loader(workers=1)`` into pairs of a lever and a value, as in the table."""
    if plan in ("plain", "A/A", ""):
        return []
    found = []
    for text in re.split(r", (?![^(]*\))", plan):
        name, _, rest = text.partition("(")
        if rest:
            value: Any = {
                key: read_value(item)
                for key, _, item in (part.partition("=") for part in rest.rstrip(")").split(", "))
            }
        else:
            name, equals, item = text.partition("=")
            value = read_value(item) if equals else True
        found.append((name, value_key(name, value, cores)))
    return found


def read_value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def variance(low: float, high: float) -> float:
    """Returns the variance of a log ratio, from its 95 % interval."""
    return max(math.log(high / low) / (2 * Z95), LEAST_SD) ** 2


def one_per_program(records: Iterable[Record]) -> list[Record]:
    """Merges comparisons of one lever and value in one program on one device; keeps published figures."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.program, record.lever, record.value, record.device].append(record)
    found = []
    for group in groups.values():
        if group[0].published:
            found += group
            continue
        weights = [1 / record.variance for record in group]
        effect = sum(w * record.effect for w, record in zip(weights, group, strict=True)) / sum(weights)
        found.append(replace(group[0], effect=effect, variance=max(1 / sum(weights), LEAST_SD**2)))
    return found
