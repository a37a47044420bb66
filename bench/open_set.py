"""Public training scripts as they are: what tuning brings, measured again; or (--transparent) whether attaching changes anything.

DIR holds ``set.json``: a list of {"name", "cwd", "argv", "env"}; a relative ``cwd`` is taken from DIR. The scripts are not edited.

Tuning (the default). For each script `flatout tune --budget B --no-write COMMAND` runs as a person would run it, with its records
in a temporary folder. What its session claims is then measured again without its help: three fresh pairs of processes, the
plain script against the script under the plan, taking turns block by block, with seeds the tuner has not used. A ratio is the
plain script's mean step time over the plan's: the median over pairs, with a 95 % interval (bootstrap over pairs and rounds). A
script for which the tuner keeps the plain program counts as 1.

Transparency (--transparent). `flatout trial --plan none --seed 0` against a recorder of 60 lines that shares no code with flatout: the
loss of every backward pass must agree bit for bit; a script that ends by itself must have the same output and exit code.

Both write what they have after every script and skip, when started again in the same month, the scripts they have done; what failed is
tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transparency
from pairs import fresh_pairs, spell, standing_in
from provenance import RESULTS, markdown_table, read_result, stamp, write_result

from flatout.cli.arguments import Duration
from flatout.launch.command import understand
from flatout.measure.statistics import geometric_mean
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Plan
from flatout.plan.plan import spell as spell_choice
from flatout.plan.records import SessionRecord
from flatout.probe.machine import look
from flatout.tune.session import load_session, plan_of

PAIRS = 3
OVERTIME = 2.0  # a tuner that takes this many times its budget, and two minutes, is ended and counted as failed


def tune(argv: list[str], budget_s: float, job: Path, longest_s: float | None = None) -> tuple[SessionRecord | None, str]:
    """`flatout tune` in a process of its own, in the present folder. The session, and what went wrong."""
    longest_s = longest_s or OVERTIME * budget_s + 120
    command = [sys.executable, "-m", "flatout", "tune", "--budget", f"{budget_s:g}s", "--job", str(job), "--no-write", *argv]
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
        return session, (session.message if session and session.message else lines[-1] if lines else f"exit code {process.returncode}")[:600]
    return session, ""


def measure_script(script: dict[str, Any], home: Path, budget_s: float, facts: Facts, pairs: int, keep: Path | None) -> dict[str, Any]:
    """Tune one script and measure the claim again."""
    place = Path(tempfile.mkdtemp(prefix="open-set-"))
    found: dict[str, Any] = {"made": stamp(facts), "budget_s": budget_s}
    try:
        with standing_in(home / script["cwd"], script.get("env")):
            session, failure = tune(script["argv"], budget_s, place / "tune")
            if session is not None:
                found |= summary(session)
            if failure or session is None:
                return {**found, "status": "failed", "why": failure}
            found["status"] = "tuned"
            plan = plan_of(session)
            if len(plan):
                again = fresh_pairs(understand(script["argv"]), Plan(), plan, JobFolder(place / "again").make(), facts, pairs,
                                    heard=lambda at, found: print(f"    pair {at + 1}: {spell(found.ratio)}", flush=True))
                found["measured_again"] = again.to_json()
                found["not_applied"] = sorted({c["name"] for _, tuned in again.records for c in tuned.skipped})
        return found
    finally:
        if keep is not None:
            shutil.copytree(place, keep / script["name"], dirs_exist_ok=True, ignore=shutil.ignore_patterns("saved"))
        shutil.rmtree(place, ignore_errors=True)


def summary(session: SessionRecord) -> dict[str, Any]:
    """What of a session is published: no paths, no curves."""
    plan = plan_of(session)
    return {
        "plan": plan.describe(), "choices": [{"name": c.name, "value": c.value} for c in plan], "message": session.message,
        "spent_s": round(session.spent_s, 1),
        "session_ratio": session.speedup.to_json() if session.speedup else None, "noise_floor": session.noise_floor.to_json() if session.noise_floor else None,
        "guard": {"verdict": session.guard.verdict, "why": session.guard.why}, "payback_steps": session.payback_steps, "scene": session.scene,
        "baseline_step_ms": session.baseline.step_ms, "phases": session.baseline.phases, "unit": session.baseline.unit,
        "levers": [lever.to_json() for lever in session.levers], "contests": [contest.to_json() for contest in session.contests],
    }


def again_of(entry: dict[str, Any]) -> dict[str, Any] | None:
    """The ratio that was measured again; 1 where the plain program stays; None where nothing came of it."""
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
            rows.append((name, "failed: " + entry["why"].splitlines()[0][:160], "-", "-", "-", "-", "-", entry["made"]["versions"]["flatout"]))
            continue
        again = spell(again_of(entry)) if entry["choices"] else "plain stays (1)"
        if entry.get("measured_again", {}).get("failure"):
            again += f" (then: {entry['measured_again']['failure'][:80]})"
        if entry.get("not_applied"):
            again += f" (not applied: {', '.join(entry['not_applied'])})"
        guard = entry["guard"]
        rows.append((name, entry["plan"], f"{entry['baseline_step_ms']:.3g} ms", spell(entry["session_ratio"]), again, spell(entry["noise_floor"]),
                     f"{guard['verdict']}: {guard['why']}" if entry["choices"] or guard["verdict"] == "failed" else guard["why"],
                     entry["made"]["versions"]["flatout"]))
        for lever in entry["levers"]:
            ratio = None if lever["ratio"] is None else {"median": lever["ratio"], "low": lever["low"], "high": lever["high"]}
            lever_rows.append((name, lever["name"] if lever["value"] is None else spell_choice(lever["name"], lever["value"]), lever["status"],
                               f"{spell(ratio)} ({lever['how']}, n={lever['n']})" if ratio else "-", lever["reason"]))
    ratios = {name: again for name, entry in scripts.items() if (again := again_of(entry))}
    parts = ["# Public training scripts, tuned\n",
             "Baseline: the plain script, fresh processes, interleaved. Session: what `flatout tune` says; measured again: three fresh pairs after it.\n",
             markdown_table(("script", "plan", "plain step", "session", "measured again", "A/A in the session", "guard", "flatout"), rows), ""]
    if ratios:
        worst = min(ratios, key=lambda name: ratios[name]["low"])
        parts.append(f"Geometric mean of {len(ratios)} scripts, measured again: {geometric_mean([r['median'] for r in ratios.values()]):.3f}x. "
                     f"Worst lower end: {ratios[worst]['low']:.2f}x ({worst}). Scripts of the set without a figure: {len(scripts) - len(ratios)}.")
    settings = ", ".join(sorted({f"budget {entry['budget_s']:g} s" for entry in scripts.values()}))
    parts.append(f"\nSettings: {settings}.\n\n## Every lever\n")
    parts.append(markdown_table(("script", "lever", "ended as", "alone, against plain", "because"), lever_rows))
    return "\n".join(parts)


def transparent_page(scripts: dict[str, dict[str, Any]]) -> str:
    rows = [(name, entry["verdict"], entry["why"].splitlines()[0][:200], "by itself" if entry.get("ended") else "stopped", entry.get("output", "-"),
             f"{entry['plain']['exit_code']} / {entry['flatout']['exit_code']}" if entry.get("ended") and "plain" in entry else "-")
            for name, entry in scripts.items()]
    same = sum(entry["verdict"] == "same" for entry in scripts.values())
    given = "; ".join(f"{name}: {' '.join(f'{key}={value}' for key, value in entry['env'].items())}" for name, entry in scripts.items() if entry["env"])
    return "\n".join([
        "# Public training scripts, attached and plain\n",
        "Baseline: the same script with seed 0 under a recorder that shares no code with flatout. The losses are compared bit for bit. Output is judged\n"
        "where a script ends by itself; scripts that print times differ from themselves there.\n",
        markdown_table(("script", "verdict", "losses", "ended", "standard output", "exit code plain / flatout"), rows),
        f"\nThe same: {same} of {len(scripts)}.", *([f"Environment on both sides: {given}."] if given else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that holds set.json")
    parser.add_argument("--budget", default="5m", help="time to tune each script (default 5m)")
    parser.add_argument("--only", default="", help="only these scripts, separated by commas")
    parser.add_argument("--transparent", action="store_true", help="compare losses, output and exit code instead of tuning")
    parser.add_argument("--steps", type=int, default=30, help="with --transparent: steps after the warm-up (default 30)")
    parser.add_argument("--limit", default="10m", help="with --transparent: the longest that one run of a script may take (default 10m)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="fresh pairs of the second measurement (default 3)")
    parser.add_argument("--again", action="store_true", help="do again what is done already")
    parser.add_argument("--keep", type=Path, help="keep each script's records (session, report, trials) in this folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results")
    args = parser.parse_args()
    budget_s, limit_s = (Duration().convert(text, None, None) for text in (args.budget, args.limit))
    home = args.dir.resolve()
    scripts = json.loads((home / "set.json").read_text(encoding="utf-8"))
    only = [word for word in args.only.split(",") if word]
    if unknown := set(only) - {s["name"] for s in scripts}:
        parser.error(f"{home.name}/set.json has no {', '.join(sorted(unknown))}; it has {', '.join(s['name'] for s in scripts)}")
    theme = "transparent" if args.transparent else "open_set"
    facts = look()
    made = stamp(facts)
    hidden = {str(home): "SET"}
    done = read_result(theme, made, args.out).get("scripts", {})
    order = [s["name"] for s in scripts]
    for script in scripts:
        name = script["name"]
        if (only and name not in only) or (name in done and not args.again and "failed" not in (done[name].get("status"), done[name].get("verdict"))):
            continue
        print(f"{name} ...", flush=True)
        if args.transparent:
            extra = script.get("env", {})
            found = {"made": stamp(facts), "env": extra, **transparency.compare(script["argv"], home / script["cwd"], extra, args.steps, limit_s)}
            print(f"{name}: {found['verdict']}: {found['why']}; output: {found.get('output', '-')}", flush=True)
        else:
            found = measure_script(script, home, budget_s, facts, args.pairs, args.keep.resolve() if args.keep else None)
            claim, again = spell(found.get("session_ratio")), spell(again_of(found))
            print(f"{name}: {found.get('plan', '-')}: session {claim}, measured again {again} {found.get('why', '')}", flush=True)
        done[name] = found
        done = {known: done[known] for known in [*order, *(n for n in done if n not in order)] if known in done}
        write_result(theme, made, (transparent_page if args.transparent else tuned_page)(done), {"scripts": done}, hidden, args.out)
    if not done:
        print("nothing was asked for, and nothing is there")
        return
    page = (transparent_page if args.transparent else tuned_page)(done)
    paths = write_result(theme, made, page, {"scripts": done}, hidden, args.out)
    print(f"\n{page}\n\nwritten: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
