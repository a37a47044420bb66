"""Measures tools that make a training faster, each as its own documentation says, and flatout on the same scripts.

DIR holds ``set.json`` as open_set.py reads it. For six of its scripts, each rival has an edit file in
``bench/rivals`` (rivals_edits.py applies it): what its quick start tells a user to change. No line of the
scripts is stored here. flatout runs the scripts unedited. The rivals must be importable: PYTHONPATH.

Search. A rival with a search of its own first runs until it has its answer, in a process of its own;
`flatout tune --no-write` does the same. The table shows this wall time, and the time from the start of the
program to its steady steps, compilation included.

Speed and losses. `flatout compare` runs the plain script and the edited one in pairs of fresh processes with
the same seed, whose steps alternate. A rival that changes the batch size is compared in samples a second.

Walls. TraceML and `flatout profile` look at the programs of ``bench/rivals/walls`` (rivals_walls.py).

The results are written after each row. Restarted in the same month, finished rows are skipped and failed ones
repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from open_set import tune
from pairs import standing_in
from provenance import HERE, RESULTS, read_result, stamp, write_result
from rivals_edits import edited, lines_edited, read_edits
from rivals_page import page
from rivals_walls import WALLS, look_at

from flatout.tune.session import plan_of

THEME = "rivals"
HOME = HERE / "rivals"
SCRIPTS = ("mnist", "vae", "word_lm", "nanogpt", "dcgan", "reinforce")
SEARCH_LIMIT_S = 3600.0
COMPARE_LIMIT_S = 3600.0
NO_LOADER = "its tuner sets the batch size of a DataLoader and a learning rate; the script has no DataLoader"


@dataclass(frozen=True)
class Rival:
    """One rival. ``answer`` matches the line of its output with which its search is over."""

    package: str  # its name on the package index
    answer: str = ""
    changes_batch: bool = False


RIVALS = {
    "flatout": Rival("flatout"),
    "one_liners": Rival("torch"),
    "autotune": Rival("pytorch-autotune", answer=r"autotune picked \[(.*?)\]"),
    "autotrainer": Rival("autotrainer"),
    "accelerate": Rival("accelerate"),
    "lightning": Rival("lightning", answer=r"FOUND (\S+ \S+)", changes_batch=True),
}
ABSENT = {
    ("lightning", "word_lm"): NO_LOADER,
    ("lightning", "nanogpt"): NO_LOADER,
    ("lightning", "reinforce"): NO_LOADER,
    (
        "lightning",
        "dcgan",
    ): "its learning-rate finder accepts one optimizer, and two need manual optimization: a rewrite",
}


class RowFailed(Exception):
    """A row that cannot be measured; the message says why."""


def versions() -> dict[str, str]:
    found = {}
    for package in [*(rival.package for rival in RIVALS.values()), "traceml-ai"]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment_of(script: dict[str, Any]) -> dict[str, str]:
    """Returns the script's variables; its PYTHONPATH goes before ours."""
    both = [script.get("env", {}).get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    return {**script.get("env", {}), "PYTHONPATH": os.pathsep.join(filter(None, both))}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def search(rival: Rival, argv: list[str]) -> tuple[str, float]:
    """Runs the edited script until its search is over; returns the answer and the wall time. Raises RowFailed."""
    began_s, said = time.monotonic(), []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(rival.answer, line):
                spent_s = time.monotonic() - began_s
                time.sleep(2.0)  # it stores the answer after printing it
                return found[1], spent_s
            if time.monotonic() - began_s > SEARCH_LIMIT_S:
                raise RowFailed(f"its search did not end within {SEARCH_LIMIT_S:.0f} s")
    finally:
        process.kill()
        process.wait()
    raise RowFailed(f"its search ended without an answer: {last_line(''.join(said))}")


def compare(words: list[str], job: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the published part of `flatout compare`. Raises RowFailed."""
    limits = ["--pairs", str(options.pairs), "--budget", options.budget, "--job", str(job)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flatout", "compare", "--json", *limits, *words],
            capture_output=True,
            text=True,
            timeout=COMPARE_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise RowFailed(f"the comparison did not end within {COMPARE_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise RowFailed(last_line(done.stderr))
    record = json.loads(done.stdout)
    of_side = ("step_ms", "samples_per_s", "start_s", "steps", "unit", "versions", "peak_memory_bytes")
    sides = {name: {key: record[name][key] for key in of_side} for name in ("a", "b")}
    of_both = ("step_time", "start", "memory", "pairs", "losses", "seconds", "notes")
    return {**{key: record[key] for key in of_both}, **sides}


@contextmanager
def edited_script(script: dict[str, Any], name: str) -> Any:
    """Yields the edited script's command and how many lines were edited; removes the script afterwards."""
    original = Path(script["argv"][1])
    before = original.read_text(encoding="utf-8")
    after = edited(before, read_edits(HOME / name / f"{script['name']}.toml"))
    copy = original.with_name(f"{original.stem}_{name}.py")
    copy.write_text(after, encoding="utf-8")
    try:
        yield [script["argv"][0], copy.name, *script["argv"][2:]], lines_edited(before, after)
    finally:
        copy.unlink()


def measure_flatout(script: dict[str, Any], place: Path, options: argparse.Namespace) -> dict[str, Any]:
    began_s = time.monotonic()
    session, failure = tune(script["argv"], None, place / "tune")
    if session is None or failure:
        raise RowFailed(failure)
    plan, spent_s = plan_of(session), time.monotonic() - began_s
    found = {"lines": 0, "search_s": spent_s, "chose": plan.describe(), "guard": session.guard.verdict}
    if not len(plan):
        return {**found, "status": "plain"}
    file = place / "plan.toml"
    file.write_text(plan.to_toml(), encoding="utf-8")
    words = ["--plan", f"none,{file}", *script["argv"]]
    return {**found, "status": "measured", "compared": compare(words, place / "job", options)}


def measure_rival(
    name: str, script: dict[str, Any], place: Path, options: argparse.Namespace
) -> dict[str, Any]:
    rival = RIVALS[name]
    os.environ["PYTORCH_AUTOTUNE_CACHE"] = str(place / "autotune.json")
    with edited_script(script, name) as (argv, lines):
        found: dict[str, Any] = {"lines": lines}
        if rival.answer:
            found["chose"], found["search_s"] = search(rival, argv)
            os.environ["FOUND"] = found["chose"]
        words = [shlex.join(script["argv"]), shlex.join(argv)]
        return {**found, "status": "measured", "compared": compare(words, place / "job", options)}


def measure(name: str, script: dict[str, Any], home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one rival on one script; a failure is part of the row."""
    row: dict[str, Any] = {"made": stamp()}
    if why := ABSENT.get((name, script["name"])):
        return {**row, "status": "does not apply", "why": why}
    with (
        tempfile.TemporaryDirectory(prefix="rivals-") as text,
        standing_in(home / script["cwd"], environment_of(script)),
    ):
        try:
            if name == "flatout":
                return {**row, **measure_flatout(script, Path(text), options)}
            return {**row, **measure_rival(name, script, Path(text), options)}
        except RowFailed as failed:
            return {**row, "status": "failed", "why": str(failed)}


def change(seen: dict[str, float] | None) -> str:
    if seen is None:
        return "-"
    return f"{seen['value']:+.1%} ({seen['low']:+.1%} to {seen['high']:+.1%}, n={seen['n']})"


def brief(row: dict[str, Any]) -> str:
    if "compared" not in row:
        return f"{row['status']} {row.get('why', '')}"
    return f"step time {change(row['compared']['step_time'])}, {row['compared']['losses']['verdict']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that holds set.json")
    parser.add_argument("--only", default="", help="only these scripts, rivals or walls, separated by commas")
    parser.add_argument("--pairs", type=int, default=6, help="fewest pairs of processes (default 6)")
    parser.add_argument("--budget", default="4m", help="time for the pairs of a comparison (default 4m)")
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    home, only = args.dir.resolve(), set(filter(None, args.only.split(",")))
    if unknown := only - {*SCRIPTS, *RIVALS, *WALLS, "walls"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    scripts = {s["name"]: s for s in json.loads((home / "set.json").read_text(encoding="utf-8"))}
    if missing := [name for name in SCRIPTS if name not in scripts]:
        parser.error(f"set.json has no {', '.join(missing)}")
    made = stamp()
    done = read_result(THEME, made, args.out)
    data = {"versions": versions(), "rows": done.get("rows", {}), "walls": done.get("walls", {})}

    def write() -> None:
        write_result(THEME, made, page(data), data, {str(home): "SET"}, args.out)

    def wanted(entry: dict[str, Any] | None) -> bool:
        return args.again or entry is None or entry["status"] == "failed"

    # Without names of one kind, all of that kind; walls run if they are named, or if nothing is.
    chosen = {
        "scripts": [s for s in SCRIPTS if s in only or not only & set(SCRIPTS)],
        "rivals": [r for r in RIVALS if r in only or not only & set(RIVALS)],
        "walls": [w for w in WALLS if w in only or "walls" in only or not only],
    }
    for name in chosen["scripts"] if not only or only & {*SCRIPTS, *RIVALS} else ():
        rows = data["rows"].setdefault(name, {})
        for rival in chosen["rivals"]:
            if wanted(rows.get(rival)):
                print(f"{name}, {rival} ...", flush=True)
                rows[rival] = measure(rival, scripts[name], home, args)
                print(f"{name}, {rival}: {brief(rows[rival])}", flush=True)
                write()
    for wall in chosen["walls"]:
        if wanted(data["walls"].get(wall)):
            print(f"{wall} ...", flush=True)
            data["walls"][wall] = {"made": stamp(), **look_at(wall)}
            print(f"{wall}: {data['walls'][wall]}", flush=True)
            write()
    print(f"\n{page(data)}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
