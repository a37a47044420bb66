"""Writes the page of rivals.py: first where a rival is better, then every row."""

from __future__ import annotations

import math
from typing import Any

from provenance import markdown_table

TITLES = {
    "flatout": "flatout",
    "one_liners": "PyTorch's one-liners",
    "autotune": "pytorch-autotune",
    "autotrainer": "autotrainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning's tuner",
}
ABOUT = """One row for each script and rival. *Lines edited*: added, changed or removed, by the edit files in
[bench/rivals](../rivals). *Search*: wall time of the rival's own search, `flatout tune` included. *Start*: from the
start of the process to its steady steps, plain and edited. *Speed-up*: the plain script's step time over the edited
one's, in interleaved pairs of fresh processes with the same seed; parentheses hold a 95 % interval. *Losses*: compared
with the plain script under the same seeds. *Pays after*: steps until search and longer start are earned back.

* PyTorch's one-liners: `torch.compile`, bfloat16 autocast, `channels_last`, fused optimizers, loading ahead and
  `set_float32_matmul_precision`, where the script has what they need.
* pytorch-autotune: `autotune(..., device="cpu")`. Its README asks for a CUDA GPU, where its gains lie.
* autotrainer: `prepare()`. Its documentation says that this changes nothing on a CPU, so the row is a control.
* Accelerate: `prepare()` and `backward()` with an `Accelerator` of default settings, which are those of plain PyTorch.
* Lightning's tuner: batch size, then learning rate. **It changes what is learned**; the speed-up is in samples a second.
"""
ABOUT_WALLS = """Small programs with one planted wall each, from TraceML's own list of what it diagnoses, without those
that need a GPU or several ranks. *Named*: the first verdict is the one that the program's docstring expects. *Line*:
whether that verdict has one of the planted lines. *False alarm*: a warning on the same program without the wall.
TraceML needs its two calls in the script and says its verdict at the end of the run, here 300 steps.
"""
BEYOND = """* TraceML follows every step of a whole job, live, and compares ranks. It also diagnoses transfers to a GPU and
  growing GPU memory. These were not measured here.
* pytorch-autotune, autotrainer, Accelerate and Lightning also work on GPUs, several of them on many. flatout has run
  on one GPU, for 13 minutes, and not beside them."""


def speed(row: dict[str, Any]) -> dict[str, float] | None:
    """Returns the speed-up with its interval, in samples where the batch size changed; None if not measured."""
    if "compared" not in row:
        return None
    compared = row["compared"]
    step, scale = compared["step_time"], batch_ratio(compared)
    return {
        "median": scale / (1 + step["value"]),
        "low": scale / (1 + step["high"]),
        "high": scale / (1 + step["low"]),
        "n": step["n"],
    }


def batch_ratio(compared: dict[str, Any]) -> float:
    """Returns how many times as many samples a step of the edited script has."""
    a, b = compared["a"], compared["b"]
    if not a["samples_per_s"] or not b["samples_per_s"]:
        return 1.0
    ratio = float((b["samples_per_s"] * b["step_ms"]) / (a["samples_per_s"] * a["step_ms"]))
    return 1.0 if abs(ratio - 1) < 0.05 else ratio


def spell(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.2f}x ({found['low']:.2f}-{found['high']:.2f}, n={found['n']})"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def before_first_s(row: dict[str, Any]) -> float | None:
    """Returns the seconds of search and start-up before the first faster step; None unless it is faster."""
    found = speed(row)
    if found is None or found["low"] <= 1:
        return None
    return float((row.get("search_s") or 0.0) + row["compared"]["b"]["start_s"])


def pays_after(row: dict[str, Any]) -> str:
    """Returns after how many steps of the plain script the edited one is ahead."""
    found = speed(row)
    if found is None:
        return "-"
    if found["low"] <= 1:
        return "no certain gain"
    a, b = row["compared"]["a"], row["compared"]["b"]
    lost_ms = 1000 * ((row.get("search_s") or 0.0) + b["start_s"] - a["start_s"])
    saved_ms = a["step_ms"] * (1 - 1 / found["median"])
    return f"{max(0, math.ceil(lost_ms / saved_ms)):,} steps"


def row_cells(script: str, name: str, row: dict[str, Any]) -> tuple[str, ...]:
    lines = str(row.get("lines", "-"))
    chose = row.get("chose", "")
    if "compared" not in row:
        why = "keeps the plain program" if row["status"] == "plain" else f"{row['status']}: {row['why']}"
        return script, TITLES[name], lines, duration(row.get("search_s")), "-", "-", why, "-", "-", chose
    compared = row["compared"]
    a, b = compared["a"], compared["b"]
    notes = [chose, *compared["notes"]]
    if batch_ratio(compared) != 1:
        notes.append(f"{batch_ratio(compared):.3g} times the batch size: another training")
    return (
        script,
        TITLES[name],
        lines,
        duration(row.get("search_s")),
        f"{a['start_s']:.1f} s / {b['start_s']:.1f} s",
        f"{a['step_ms']:.3g} / {b['step_ms']:.3g} ms",
        spell(speed(row)),
        compared["losses"]["verdict"],
        pays_after(row),
        "; ".join(filter(None, notes)),
    )


def better(rows: dict[str, dict[str, dict[str, Any]]], walls: dict[str, dict[str, Any]]) -> list[str]:
    """Returns where a rival is ahead of flatout: a certain speed-up, time before the first faster step, and walls."""
    said = []
    for script, row in rows.items():
        ours = row.get("flatout")
        if ours is None:
            continue
        mine = speed(ours) or {"median": 1.0, "low": 1.0, "high": 1.0, "n": 0}
        for name, other in row.items():
            found = speed(other)
            if name == "flatout" or found is None:
                continue
            if found["median"] > mine["median"] and found["low"] > 1.0:
                clear = "" if found["low"] > mine["high"] else "; the intervals overlap"
                batch = " in samples a second" if batch_ratio(other["compared"]) != 1 else ""
                said.append(
                    f"`{script}`: {TITLES[name]} is faster{batch}, {spell(found)}; flatout {spell(mine)}{clear}."
                )
            first, ours_first = before_first_s(other), before_first_s(ours)
            if first is not None and (ours_first is None or first < ours_first):
                than = (
                    f"flatout after {duration(ours_first)}" if ours_first else "flatout has no certain gain"
                )
                said.append(
                    f"`{script}`: {TITLES[name]} has its first faster step after {duration(first)}; {than}."
                )
    for name, wall in walls.items():
        if wall["status"] == "measured" and wall["traceml"]["named"] and not wall["flatout"]["named"]:
            said.append(f"Wall `{name}`: TraceML names it first, `flatout profile` does not.")
        if wall["status"] == "measured" and wall["traceml"]["seconds"] < wall["flatout"]["seconds"]:
            said.append(
                f"Wall `{name}`: TraceML answers after {duration(wall['traceml']['seconds'])}, "
                f"`flatout profile` after {duration(wall['flatout']['seconds'])}."
            )
    return said


def wall_cells(name: str, wall: dict[str, Any]) -> tuple[str, ...]:
    if wall["status"] != "measured":
        return f"[{name}](../rivals/walls/{name}.py)", wall.get("wall", ""), f"failed: {wall['why']}", *"----"
    traceml, flatout = wall["traceml"], wall["flatout"]
    first = (flatout["findings"] or [{"rule": "", "name": "no finding", "said": ""}])[0]
    return (
        f"[{name}](../rivals/walls/{name}.py)",
        wall["wall"],
        f"{'**yes**' if traceml['named'] else 'no'}: {traceml['kind']}: {traceml['summary']} ({duration(traceml['seconds'])})",
        f"{'**yes**' if flatout['named'] else 'no'}: {first['rule']} {first['name']}: {first['said']} ({duration(flatout['seconds'])})",
        "yes" if flatout["line_named"] else "no",
        ", ".join(wall["fixed"]["false_alarms"]) or "none",
        f"{traceml['lines_edited']} / 0",
    )


def page(data: dict[str, Any]) -> str:
    rows, walls = data["rows"], data["walls"]
    ahead = better(rows, walls)
    table = [
        row_cells(script, name, row[name]) for script, row in rows.items() for name in TITLES if name in row
    ]
    header = (
        "script",
        "rival",
        "lines edited",
        "search",
        "start, plain / edited",
        "step, plain / edited",
        "speed-up",
        "losses",
        "pays after",
        "chosen; notes",
    )
    wall_header = (
        "program",
        "wall",
        "TraceML names it",
        "flatout names it",
        "line",
        "false alarm",
        "lines edited",
    )
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    parts = [
        "# Rivals side by side",
        "## What the rivals do better",
        "\n".join(f"* {line}" for line in ahead) or "Nothing in the rows measured so far.",
        BEYOND,
        "## Speed",
        ABOUT.strip(),
        markdown_table(header, table),
    ]
    if walls:
        measured = [wall for wall in walls.values() if wall["status"] == "measured"]
        counts = {tool: sum(wall[tool]["named"] for wall in measured) for tool in ("traceml", "flatout")}
        parts += [
            "## Walls: TraceML and `flatout profile`",
            ABOUT_WALLS.strip(),
            f"Named first: TraceML {counts['traceml']} of {len(measured)}, flatout {counts['flatout']} of {len(measured)}.",
            markdown_table(wall_header, [wall_cells(name, wall) for name, wall in walls.items()]),
        ]
    parts.append(f"Versions of the rivals: {versions}.")
    return "\n\n".join(parts)
