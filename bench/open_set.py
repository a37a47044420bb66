"""Measures the speed-up from tuning public scripts, or (--transparent) whether attaching changes anything.

DIR holds ``set.json``: a list of {"name", "cwd", "argv", "env"}; a relative ``cwd`` is relative to DIR. The
scripts are not edited.

Tuning (the default). For each script, `flatout tune --no-write COMMAND` runs as a user would run it, with its
records in a temporary folder; without --budget it chooses its own budget. An independent measurement then
tests the claim of its session. Three fresh sets of processes run the plain script and the script under the
plan, interleaved block by block, with seeds that the tuner has not used. A ratio is the plain script's mean
step time over the plan's: the median over sets, with a 95 % interval (bootstrap over sets and rounds). If the
tuner keeps the plain program, the script counts as 1.

Experts (--experts). The same sets also run the script under the plan that an expert chose by hand,
interleaved with the others: the plan file of bench/experts with the script's name. A lever that is `true`
there takes its first value that this machine supports.

Transparency (--transparent). `flatout trial --plan none --seed 0` is compared with a recorder of 60 lines
that shares no code with flatout. The loss of every backward pass must agree bit for bit. A script that ends
by itself must have the same output and exit code.

Both modes write their results after every script. Restarted in the same month, they skip the finished scripts
and repeat the failed ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import transparency
from open_set_page import again_of, transparent_page, tuned_page
from pairs import FIRST_SEED, ROUNDS, ComparisonSide, comparison, ratio_of, rounds_of, spell, standing_in
from provenance import HERE, RESULTS, read_result, stamp, write_result

from flatout.cli.options.arguments import Duration
from flatout.job.folder import JobFolder
from flatout.job.plan_file import read_plan
from flatout.launch.command import parse_command
from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.enums import Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Options
from flatout.schema.plan import Plan
from flatout.schema.session import SessionRecord
from flatout.tune.prior import device_kind
from flatout.tune.session import load_session, plan_of

PAIRS = 3
SET_S = 120.0  # duration of a set of processes; at least one round
OVERTIME = 2.0  # times the budget, plus two minutes: then the tuner is ended and counts as failed
LONGEST_OWN_S = 1800.0  # the same limit for a tuner that chooses its own budget
EXPERTS = HERE / "experts"


def tune(
    argv: list[str],
    budget_s: float | None,
    job: Path,
    longest_s: float | None = None,
    horizon_s: float | None = None,
) -> tuple[SessionRecord | None, str]:
    """Runs `flatout tune` in a separate process, in the current folder. Returns the session and the failure.

    It chooses budget and horizon unless they are given.
    """
    longest_s = longest_s or (LONGEST_OWN_S if budget_s is None else OVERTIME * budget_s + 120)
    times = [
        word
        for option, time_s in (("--budget", budget_s), ("--horizon", horizon_s))
        if time_s is not None
        for word in (option, f"{time_s:g}s")
    ]
    command = [sys.executable, "-m", "flatout", "tune", *times, "--job", str(job), "--no-write", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=longest_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        return None, f"the tuner did not end within {longest_s:.0f} s"
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        raise
    session = load_session(JobFolder(job))
    if session is None or session.status != "done":
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return session, (
            session.message
            if session and session.message
            else lines[-1]
            if lines
            else f"exit code {process.returncode}"
        )[:600]
    return session, ""


def measure_script(
    script: dict[str, Any],
    home: Path,
    budget_s: float | None,
    facts: Facts,
    pairs: int,
    keep: Path | None,
    expert: tuple[Plan, list[str]] | None = None,
) -> dict[str, Any]:
    """Tunes one script and measures the claim again, compared with the expert's plan where one exists."""
    place = Path(tempfile.mkdtemp(prefix="open-set-"))
    found: dict[str, Any] = {"made": stamp(facts), "budget_s": budget_s}
    try:
        with standing_in(home / script["cwd"], script.get("env")):
            session, failure = tune(script["argv"], budget_s, place / "tune")
            if session is not None:
                found |= summary(session)
                found["device_kind"] = device_kind(facts, session.context.get("device"))
            if failure or session is None:
                return {**found, "status": "failed", "why": failure}
            found["status"] = "tuned"
            plan = plan_of(session)
            plans = {
                "plain": Plan(),
                **({"flatout": plan} if len(plan) else {}),
                **({"expert": expert[0]} if expert is not None else {}),
            }
            if len(plans) > 1:
                found |= measured_again(
                    script["argv"], plans, JobFolder(place / "again").make(), facts, pairs
                )
            if expert is not None:
                found["expert"]["not_applied"] = sorted({*found["expert"]["not_applied"], *expert[1]})
        return found
    finally:
        if keep is not None:
            shutil.copytree(
                place, keep / script["name"], dirs_exist_ok=True, ignore=shutil.ignore_patterns("saved")
            )
        shutil.rmtree(place, ignore_errors=True)


def measured_again(
    argv: list[str], plans: dict[str, Plan], job: JobFolder, facts: Facts, sets: int
) -> dict[str, Any]:
    """Runs fresh sets of processes, one for each plan.

    If the tuner keeps the plain program, the plain side is compared with the expert.
    """
    command = parse_command(argv)
    sides = {name: ComparisonSide(name, command, plan) for name, plan in plans.items()}
    plain = sides["plain"]

    def observe(done: int) -> None:
        print(
            f"    set {done}: {', '.join(f'{name} {spell(ratio_of(plain, side))}' for name, side in sides.items() if side is not plain)}",
            flush=True,
        )

    comparison(list(sides.values()), job, facts, sets, ROUNDS, math.inf, observe, FIRST_SEED, SET_S)
    found: dict[str, Any] = {}
    if flatout := sides.get("flatout"):
        found["measured_again"], found["not_applied"] = as_json(plain, flatout), skipped_by(flatout)
    if expert := sides.get("expert"):
        found["expert"] = {
            "plan": expert.plan.describe(),
            "choices": [{"name": c.name, "value": c.value} for c in expert.plan],
            "not_applied": skipped_by(expert),
            "measured": as_json(plain, expert),
            "flatout_over_expert": as_json(expert, flatout or plain),
        }
    return found


def as_json(a: ComparisonSide, b: ComparisonSide) -> dict[str, Any]:
    """Returns the speed-up of ``b`` over ``a``, with every round."""
    ratio = ratio_of(a, b)
    failure = "; ".join(f"{side.name}: {side.failure}" for side in (a, b) if side.failure)
    return {
        "ratio": ratio.to_json() if ratio else None,
        "failure": failure,
        "rounds_ms": [[(r.a_ms, r.b_ms) for r in pair] for pair in rounds_of(a, b)],
    }


def skipped_by(side: ComparisonSide) -> list[str]:
    """Returns the levers of its plan that the program skipped."""
    return sorted({choice["name"] for record in side.records for choice in record.skipped})


def expert_plan(name: str, facts: Facts) -> tuple[Plan, list[str]] | None:
    """Returns the script's plan file for this machine, and the unavailable levers; None without a file.

    Raises PlanError where it cannot be read.
    """
    path = EXPERTS / f"{name}.toml"
    if not path.is_file():
        return None
    plan, levers, absent = read_plan(path), {lever.name: lever for lever in TABLE}, []
    for choice in plan:
        lever = levers.get(choice.name)
        if (
            lever is not None and lever.moment is Moment.PROCESS and choice.value is True
        ):  # the program itself cannot choose the value
            answer = lever.applies(facts, None)
            if isinstance(answer, Options):
                plan = plan.with_choice(replace(choice, value=answer.value_for(True)))
            else:
                plan, absent = plan.without(choice.name), [*absent, choice.name]
    return plan, absent


def summary(session: SessionRecord) -> dict[str, Any]:
    """Returns the published part of a session: no paths, no curves."""
    plan = plan_of(session)
    return {
        "plan": plan.describe(),
        "choices": [{"name": c.name, "value": c.value} for c in plan],
        "message": session.message,
        "spent_s": round(session.spent_s, 1),
        "session_ratio": session.speedup.to_json() if session.speedup else None,
        "noise_floor": session.noise_floor.to_json() if session.noise_floor else None,
        "guard": {"verdict": session.guard.verdict, "why": session.guard.why},
        "payback_steps": session.payback_steps,
        "context": session.context,
        "baseline_step_ms": session.baseline.step_ms,
        "phases": session.baseline.phases,
        "unit": session.baseline.unit,
        "levers": [lever.to_json() for lever in session.levers],
        "comparisons": [comparison.to_json() for comparison in session.comparisons],
        "blocks": compact(session.blocks),
        "disturbance": session.disturbance,
    }


def compact(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the measured blocks of one machine as rows of numbers.

    Each row: process, window, wall time in s, ms a step, and the indices in ``keys`` of the active choices.
    """
    keys = sorted({key for block in blocks for key in block["on"]})
    at = {key: place for place, key in enumerate(keys)}
    return {
        "keys": keys,
        "rows": [
            [b["process"], b["window"], b["at_s"], round(b["ms"], 4), *sorted(at[key] for key in b["on"])]
            for b in blocks
        ],
    }


def finished(entry: dict[str, Any] | None, beside_expert: bool) -> bool:
    """Returns whether an earlier run has measured this script, with the expert's plan if that is required."""
    if entry is None or "failed" in (entry.get("status"), entry.get("verdict")):
        return False
    return "expert" in entry or not beside_expert


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that holds set.json")
    parser.add_argument("--budget", help="time to tune each script (default: what `flatout tune` chooses)")
    parser.add_argument(
        "--experts", action="store_true", help="also measure the expert's plan (bench/experts)"
    )
    parser.add_argument("--only", default="", help="only these scripts, separated by commas")
    parser.add_argument(
        "--transparent", action="store_true", help="compare losses, output and exit code instead of tuning"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="with --transparent: steps after the warm-up (default 30)"
    )
    parser.add_argument(
        "--limit",
        default="10m",
        help="with --transparent: the longest that one run of a script may take (default 10m)",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=PAIRS,
        help="fresh sets of processes of the second measurement (default 3)",
    )
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument(
        "--keep", type=Path, help="keep each script's records (session, report, trials) in this folder"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    budget_s, limit_s = (
        None if text is None else Duration().convert(text, None, None) for text in (args.budget, args.limit)
    )
    home = args.dir.resolve()
    scripts = json.loads((home / "set.json").read_text(encoding="utf-8"))
    only = [word for word in args.only.split(",") if word]
    if unknown := set(only) - {s["name"] for s in scripts}:
        parser.error(
            f"{home.name}/set.json has no {', '.join(sorted(unknown))}; choose from {', '.join(s['name'] for s in scripts)}"
        )
    theme = "transparent" if args.transparent else "open_set"
    facts = look()
    experts = (
        {s["name"]: expert for s in scripts if (expert := expert_plan(s["name"], facts))}
        if args.experts
        else {}
    )
    made = stamp(facts)
    hidden = {str(home): "SET"}
    done = read_result(theme, made, args.out).get("scripts", {})
    order = [s["name"] for s in scripts]
    for script in scripts:
        name = script["name"]
        if (only and name not in only) or (not args.again and finished(done.get(name), name in experts)):
            continue
        print(f"{name} ...", flush=True)
        if args.transparent:
            extra = script.get("env", {})
            found = {
                "made": stamp(facts),
                "env": extra,
                **transparency.compare(script["argv"], home / script["cwd"], extra, args.steps, limit_s),
            }
            print(
                f"{name}: {found['verdict']}: {found['why']}; output: {found.get('output', '-')}", flush=True
            )
        else:
            found = measure_script(
                script,
                home,
                budget_s,
                facts,
                args.pairs,
                args.keep.resolve() if args.keep else None,
                experts.get(name),
            )
            claim, again = spell(found.get("session_ratio")), spell(again_of(found))
            beside = (
                f", relative to the expert {spell(found['expert']['flatout_over_expert']['ratio'])}"
                if "expert" in found
                else ""
            )
            print(
                f"{name}: {found.get('plan', '-')}: session {claim}, measured again {again}{beside} {found.get('why', '')}",
                flush=True,
            )
        done[name] = found
        done = {
            known: done[known] for known in [*order, *(n for n in done if n not in order)] if known in done
        }
        write_result(
            theme,
            made,
            (transparent_page if args.transparent else tuned_page)(done),
            {"scripts": done},
            hidden,
            args.out,
        )
    if not done:
        print("no script was selected, and there are no earlier results")
        return
    page = (transparent_page if args.transparent else tuned_page)(done)
    paths = write_result(theme, made, page, {"scripts": done}, hidden, args.out)
    print(f"\n{page}\n\nwritten: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
