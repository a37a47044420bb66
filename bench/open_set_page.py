"""Writes the pages of open_set.py from its records alone."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import Any

from pairs import spell
from provenance import markdown_table

from flatout.schema.plan import format_choice

OF_THE_EXPERT, MEAN_OF_THE_EXPERT, MEAN_OF_PLAIN, LOWER_END = 0.98, 1.10, 1.60, 0.98  # goals
Z95 = 1.96


def again_of(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the ratio of the second measurement; 1 if the plain program stays; None if it failed."""
    if entry.get("status") != "tuned":
        return None
    if not entry["choices"]:
        return {"median": 1.0, "low": 1.0, "high": 1.0, "n": 0}
    ratio: dict[str, Any] | None = entry.get("measured_again", {}).get("ratio")
    return ratio


def tuned_page(scripts: dict[str, dict[str, Any]]) -> str:
    rows, lever_rows = [], []
    for name, entry in scripts.items():
        if entry["status"] == "failed":
            rows.append(
                (
                    name,
                    "failed: " + entry["why"].splitlines()[0][:160],
                    "-",
                    "-",
                    "-",
                    "-",
                    "-",
                    entry["made"]["versions"]["flatout"],
                )
            )
            continue
        again = spell(again_of(entry)) if entry["choices"] else "plain stays (1)"
        if entry.get("measured_again", {}).get("failure"):
            again += f" (then: {entry['measured_again']['failure'][:80]})"
        if entry.get("not_applied"):
            again += f" (not applied: {', '.join(entry['not_applied'])})"
        guard = entry["guard"]
        rows.append(
            (
                name,
                entry["plan"],
                f"{entry['baseline_step_ms']:.3g} ms",
                spell(entry["session_ratio"]),
                again,
                spell(entry["noise_floor"]),
                f"{guard['verdict']}: {guard['why']}"
                if entry["choices"] or guard["verdict"] == "failed"
                else guard["why"],
                entry["made"]["versions"]["flatout"],
            )
        )
        for lever in entry["levers"]:
            ratio = (
                None
                if lever["ratio"] is None
                else {"median": lever["ratio"], "low": lever["low"], "high": lever["high"]}
            )
            lever_rows.append(
                (
                    name,
                    lever["name"] if lever["value"] is None else format_choice(lever["name"], lever["value"]),
                    lever["status"],
                    f"{spell(ratio)} ({lever['how']}, n={lever['n']})" if ratio else "-",
                    lever["reason"],
                )
            )
    ratios = {name: again for name, entry in scripts.items() if (again := again_of(entry))}
    parts = [
        "# Public training scripts, tuned\n",
        "Baseline: the plain script, fresh processes, interleaved. Session: the claim of `flatout tune`; measured again: in later, fresh processes.\n",
        markdown_table(
            (
                "script",
                "plan",
                "plain step",
                "session",
                "measured again",
                "A/A in the session",
                "guard",
                "flatout",
            ),
            rows,
        ),
        "",
    ]
    if ratios:
        worst = min(ratios, key=lambda name: ratios[name]["low"])
        parts.append(
            f"Geometric mean of {len(ratios)} scripts, measured again: {geometric_mean([r['median'] for r in ratios.values()]):.3f}x. "
            f"Worst lower end: {ratios[worst]['low']:.2f}x ({worst}). Scripts without a figure: {len(scripts) - len(ratios)}."
        )
    parts += experts_part(scripts)
    settings = ", ".join(
        sorted(
            {
                "the tuner's own budget" if entry["budget_s"] is None else f"budget {entry['budget_s']:g} s"
                for entry in scripts.values()
            }
        )
    )
    parts.append(f"\nSettings: {settings}.\n\n## Every lever\n")
    parts.append(
        markdown_table(("script", "lever", "outcome", "by itself, relative to plain", "reason"), lever_rows)
    )
    return "\n".join(parts)


def experts_part(scripts: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the section that compares with the experts, with its goals; empty without an expert's plan."""
    rows, over, plain = [], {}, {}
    for name, entry in scripts.items():
        if "expert" not in entry:
            continue
        expert, again = entry["expert"], again_of(entry)
        against = expert["flatout_over_expert"]["ratio"]
        left = f" (not applied: {', '.join(expert['not_applied'])})" if expert["not_applied"] else ""
        failure = f" ({expert['measured']['failure'][:80]})" if expert["measured"]["failure"] else ""
        rows.append(
            (
                name,
                expert["plan"] + left,
                spell(again) if entry["choices"] else "plain stays (1)",
                spell(expert["measured"]["ratio"]) + failure,
                spell(against),
            )
        )
        if against and again:
            over[name], plain[name] = against, again
    if not rows:
        return []
    parts = [
        "\n## Comparison with the expert's plans\n",
        "The same sets of fresh processes run plain, flatout's plan and the expert's plan, interleaved. Every ratio of the table comes from these sets.\n",
        markdown_table(
            ("script", "expert's plan", "flatout over plain", "expert over plain", "flatout over expert"),
            rows,
        ),
    ]
    return [*parts, *goals(over, plain)] if over else parts


def goals(over: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> list[str]:
    below = [
        f"{name} {ratio['median']:.2f}" for name, ratio in over.items() if ratio["median"] < OF_THE_EXPERT
    ]
    slower = [f"{name} {ratio['low']:.2f}" for name, ratio in plain.items() if ratio["low"] < LOWER_END]
    means = (
        (mean_ratio(list(over.values())), MEAN_OF_THE_EXPERT, "the expert's"),
        (mean_ratio(list(plain.values())), MEAN_OF_PLAIN, "plain"),
    )
    return [
        f"\n* At least {OF_THE_EXPERT} of the expert's speed on every script: {_word(not below)}{': ' + ', '.join(below) if below else ''}.",
        *(
            f"* Geometric mean over {base} at least {goal:.2f}: {_word(mean['median'] >= goal)}, {spell(mean)} (n={len(over)})."
            for mean, goal, base in means
        ),
        f"* Lower ends over plain at least {LOWER_END}: {_word(not slower)}{': ' + ', '.join(slower) if slower else ''}.",
    ]


def _word(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def mean_ratio(ratios: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the geometric mean, with a 95 % interval from those of the independent ratios."""
    centre = geometric_mean([ratio["median"] for ratio in ratios])
    sd = math.sqrt(sum((math.log(ratio["high"] / ratio["low"]) / (2 * Z95)) ** 2 for ratio in ratios)) / len(
        ratios
    )
    return {"median": centre, "low": centre * math.exp(-Z95 * sd), "high": centre * math.exp(Z95 * sd)}


def transparent_page(scripts: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            name,
            entry["verdict"],
            entry["why"].splitlines()[0][:200],
            "by itself" if entry.get("ended") else "stopped",
            entry.get("output", "-"),
            f"{entry['plain']['exit_code']} / {entry['flatout']['exit_code']}"
            if entry.get("ended") and "plain" in entry
            else "-",
        )
        for name, entry in scripts.items()
    ]
    same = sum(entry["verdict"] == "same" for entry in scripts.values())
    given = "; ".join(
        f"{name}: {' '.join(f'{key}={value}' for key, value in entry['env'].items())}"
        for name, entry in scripts.items()
        if entry["env"]
    )
    return "\n".join(
        [
            "# Public training scripts, attached and plain\n",
            "Baseline: the same script with seed 0 under a recorder that shares no code with flatout. The losses are compared bit for bit. The output is\n"
            "compared where a script ends by itself; scripts that print times differ from themselves there.\n",
            markdown_table(
                ("script", "verdict", "losses", "ended", "standard output", "exit code plain / flatout"), rows
            ),
            f"\nThe same: {same} of {len(scripts)}.",
            *([f"Environment on both sides: {given}."] if given else []),
        ]
    )
