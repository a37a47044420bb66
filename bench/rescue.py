"""Kills public scripts under `flatout run --rescue` and checks that the rescued weights are correct.

DIR holds ``set.json`` as for ``open_set.py``. The scripts run unedited, from a copy of DIR's folders. Each
ends three times, some seconds after its first checkpoint: by SIGTERM, by an exception at an arbitrary
instruction (raised by a handler of SIGUSR2), and by SIGKILL. Then `flatout rescue --to` writes the newest
checkpoint, and a fresh process executes the lines that it prints among the variables of the script.

The reference is independent of flatout (``programs/rescue_site``): the same script, undisturbed and without
flatout, writes the SHA-256 of each weight after each step. All weights of the checkpoint's step must be among
the loaded ones; those of the adjacent steps must not.

--cost measures the cost instead: in one process, blocks of steps without flatout, with, with, without; median
over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from provenance import HERE, RESULTS, markdown_table, read_json, read_result, stamp, write_result

SITE = HERE / "programs" / "rescue_site"
COST = HERE / "programs" / "rescue_cost.py"
HOW = {"SIGTERM": signal.SIGTERM, "exception": signal.SIGUSR2, "SIGKILL": signal.SIGKILL}
FIRST_SAVE_S, END_S, TRACE_S = 180.0, 60.0, 420.0
TERMINAL = pty.openpty()[1]  # some scripts query its size during import
SIZES = {"0.3 ms": (32, 1), "2 ms": (256, 8), "20 ms": (1024, 12)}  # name -> width, layers


def environment(script: dict[str, Any], **more: str) -> dict[str, str]:
    given = {**os.environ, **script.get("env", {})}
    before = script.get("env", {}).get("PYTHONPATH", "")
    return {
        **given,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), os.environ["PYTHONPATH"], before])),
        "RESCUE_SEED": "1",
        "PYTHONHASHSEED": "0",
        **more,
    }


def end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def wait_for(condition: Any, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def ended(script: dict[str, Any], folder: Path, place: Path, how: str, rng: random.Random) -> dict[str, Any]:
    """Runs and ends the script once; ``place`` holds its checkpoint."""
    shutil.rmtree(folder / ".flatout", ignore_errors=True)
    command = [sys.executable, "-m", "flatout", "run", "--plan", "none", "--rescue", *script["argv"]]
    with open(place / f"{how}.out", "wb") as out, open(place / f"{how}.err", "wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(script, RESCUE_FAILS="1"),
            stdin=TERMINAL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            if (
                not wait_for(
                    lambda: list(folder.glob(".flatout/*/rescue/step-*")) or process.poll() is not None,
                    FIRST_SAVE_S,
                )
                or process.poll() is not None
            ):
                limit = (
                    f"no step with a checkpoint within {FIRST_SAVE_S:.0f} s"
                    if process.poll() is None
                    else f"it ended: {last_line(place / f'{how}.err')}"
                )
                return {"how": how, "why": limit}
            time.sleep(rng.uniform(2.0, 6.0))
            began = time.monotonic()
            process.send_signal(HOW[how])
            went = wait_for(lambda: process.poll() is not None, END_S)
            took_s = time.monotonic() - began
        finally:
            end(process)
    found: dict[str, Any] = {
        "how": how,
        "exit_code": process.returncode if went else None,
        "took_s": round(took_s, 2),
    }
    written = subprocess.run(
        [sys.executable, "-m", "flatout", "rescue", "--to", str(place / how)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if written.returncode:
        return {**found, "why": written.stderr.strip()[-300:]}
    (place / f"{how}.py").write_text(written.stdout)
    manifest = max(
        folder.glob(".flatout/*/rescue/step-*/manifest.json"),
        key=lambda path: (read_json(path)["step"], str(path)),
    )
    content = read_json(manifest)
    size = sum(file["bytes"] for file in content["files"].values())
    return {
        **found,
        "step": content["step"],
        "inside": content["metadata"]["inside"],
        "updated": content["metadata"]["updated"],
        "at": content["metadata"]["why"],
        "bytes": size,
        "holds": [held["name"] for held in content["metadata"]["holds"]],
        "optimizers": sum(held["kind"] == "optimizers" for held in content["metadata"]["holds"]),
        "left_out": content["left_out"],
        "lines": written.stdout.splitlines(),
    }


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def undisturbed(
    script: dict[str, Any], folder: Path, place: Path, count: int, by_hand: bool
) -> list[set[str]]:
    """Returns the weights after each step of the undisturbed script."""
    trace = place / "trace"
    more = {
        "RESCUE_TRACE": str(trace),
        "RESCUE_COUNT": str(count),
        **({"RESCUE_BY_HAND": "1"} if by_hand else {}),
    }
    with open(place / "trace.out", "wb") as out, open(place / "trace.err", "wb") as err:
        process = subprocess.Popen(
            script["argv"],
            cwd=folder,
            env=environment(script, **more),
            stdin=TERMINAL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        wait_for(lambda: process.poll() is not None, TRACE_S)
        end(process)
    return [set(line.split()) for line in trace.read_text().splitlines()] if trace.is_file() else []


def loaded(script: dict[str, Any], folder: Path, place: Path, how: str) -> set[str] | None:
    """Returns the weights of the script in a fresh process that executed the printed lines."""
    lines = place / f"{how}.py"
    with open(place / f"{how}.loading", "wb") as out:
        process = subprocess.Popen(
            script["argv"],
            cwd=folder,
            env=environment(script, RESCUE_LOAD=str(lines)),
            stdin=TERMINAL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        wait_for(lambda: process.poll() is not None, FIRST_SAVE_S)
        end(process)
    found = read_json(Path(f"{lines}.loaded"))
    return set(found) if found else None


def judged(
    run: dict[str, Any], trace: list[set[str]], weights: set[str] | None, optimizers: int
) -> dict[str, Any]:
    """Returns the verdict: same, differs, or failed with the reason."""
    if weights is None:
        return {**run, "verdict": "failed", "why": "the printed lines could not be executed"}
    events = max(optimizers, 1)
    place = run["step"] * events - 1
    if run["updated"]:
        near = [at for at in range(place, min(place + events, len(trace))) if trace[at] <= weights]
        return {**run, "verdict": "same" if near else "differs", "why": "inside a step, as reported"}
    if place >= len(trace) or not trace[place]:
        return {
            **run,
            "verdict": "failed",
            "why": f"the undisturbed run reached {len(trace)} of {place + 1} steps",
        }
    if not trace[place] <= weights:
        return {
            **run,
            "verdict": "differs",
            "why": f"weights of another step: {[at for at, each in enumerate(trace) if each <= weights]} instead of {place}",
        }
    beside = [at for at in (place - events, place + events) if 0 <= at < len(trace) and trace[at] <= weights]
    return {
        **run,
        "verdict": "differs" if beside else "same",
        "why": f"also of step {beside}" if beside else f"{len(trace[place])} weights, bit for bit",
    }


def measure(script: dict[str, Any], home: Path, rng: random.Random) -> dict[str, Any]:
    folder = home / script["cwd"]
    with tempfile.TemporaryDirectory(prefix="rescue-") as text:
        place = Path(text)
        runs = [ended(script, folder, place, how, rng) for how in HOW]
        kept = [run for run in runs if "step" in run]
        optimizers = max((run["optimizers"] for run in kept), default=0)
        count = (max((run["step"] for run in kept), default=0) + 2) * max(optimizers, 1)
        trace = undisturbed(script, folder, place, count, by_hand=not optimizers) if kept else []
        found = [
            judged(run, trace, loaded(script, folder, place, run["how"]), optimizers)
            if "step" in run
            else {**run, "verdict": "failed"}
            for run in runs
        ]
        for run in found:
            run["lines"] = [re.sub(re.escape(str(place)), "OUT", line) for line in run.get("lines", ())]
            run["said"] = [
                line
                for line in (place / f"{run['how']}.err").read_text(errors="replace").splitlines()
                if line.startswith("flatout: ")
            ]
    return {"made": stamp(), "runs": found}


def page(scripts: dict[str, Any], cost: list[dict[str, Any]]) -> str:
    rows = []
    for name, script in scripts.items():
        for run in script["runs"]:
            at = f"{run['step']}{', inside the next' if run.get('inside') else ''}" if "step" in run else "-"
            rows.append(
                (
                    name,
                    run["how"],
                    run.get("exit_code", "-"),
                    f"{run['took_s']:.1f}" if "took_s" in run else "-",
                    at,
                    ", ".join(run.get("holds", ())),
                    f"{run['bytes'] / 2**20:.2f}" if "bytes" in run else "-",
                    run["verdict"],
                    run.get("why", ""),
                )
            )
    same = sum(run["verdict"] == "same" for script in scripts.values() for run in script["runs"])
    parts = [
        "# Rescue of public scripts\n",
        f"{same} of {len(rows)} checkpoints hold the weights of their step, bit for bit.\n",
        markdown_table(
            (
                "script",
                "ended by",
                "exit code",
                "s until it ended",
                "step",
                "contents",
                "MiB",
                "weights",
                "why",
            ),
            rows,
        ),
    ]
    if cost:
        parts.append(
            "\n## Cost\n\nOne process; blocks without, with, with, without; processor time of a step. Checkpoints: the waiting time of the training "
            "plus the working time of the writing thread, as a share of the time, at the chosen intervals (goal: at most 1 %).\n"
        )
        parts.append(
            markdown_table(
                (
                    "step",
                    "plain, us",
                    "hooks, us a step",
                    "share of a step",
                    "A/A, us",
                    "rounds",
                    "checkpoints",
                    "share of the time",
                ),
                [
                    (
                        each["size"],
                        f"{each['plain_us']:,.0f}",
                        f"{each['cost_us']:+.1f}",
                        f"{each['cost_us'] / each['plain_us']:+.2%}",
                        f"{each['aa_us']:+.1f}",
                        len(each["rounds"]),
                        each["saves"],
                        f"{each['share']:.2%}",
                    )
                    for each in cost
                ],
            )
        )
    return "\n".join(parts)


def measure_cost(seconds: float) -> list[dict[str, Any]]:
    found = []
    for size, (width, layers) in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="rescue-") as place:
            words = [
                sys.executable,
                "-m",
                "flatout",
                "run",
                "--plan",
                "none",
                "--rescue",
                sys.executable,
                str(COST),
                "--width",
                str(width),
                "--layers",
                str(layers),
                "--seconds",
                str(seconds),
            ]
            done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise SystemExit(f"rescue: the measuring program failed:\n{done.stderr[-2000:]}")
        metadata = json.loads(done.stdout.splitlines()[-1])
        rounds = metadata["rounds"]
        found.append(
            {
                "size": size,
                "plain_us": median((a + d) / 2 for a, _, _, d in rounds),
                "cost_us": median((b + c - a - d) / 2 for a, b, c, d in rounds),
                "aa_us": median(d - a for a, _, _, d in rounds),
                **metadata,
            }
        )
        print(
            f"  {size}: {found[-1]['cost_us']:+.1f} us a step, checkpoints {found[-1]['share']:.2%}",
            file=sys.stderr,
            flush=True,
        )
    return found


def main() -> None:
    global FIRST_SAVE_S, TRACE_S
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="folder that holds set.json")
    parser.add_argument("--only", default="", help="run only these scripts, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random end times (default 0)")
    parser.add_argument("--cost", action="store_true", help="measure the cost; keep the rows of the scripts")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="measuring time for each size (default 20)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=FIRST_SAVE_S,
        metavar="SECONDS",
        help="timeout for a script's first step (default 180)",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    FIRST_SAVE_S, TRACE_S = args.patience, max(TRACE_S, 2.5 * args.patience)
    if args.folder is None and not args.cost:
        parser.error("give the folder that holds set.json, or --cost")
    made = stamp()
    known = read_result("rescue", made, args.out)
    scripts, cost = dict(known.get("scripts", {})), list(known.get("cost", ()))

    def write() -> None:
        write_result("rescue", made, page(scripts, cost), {"scripts": scripts, "cost": cost}, folder=args.out)

    if args.cost:
        cost = measure_cost(args.seconds)
        write()
        return
    wanted = set(filter(None, args.only.split(",")))
    with tempfile.TemporaryDirectory(prefix="rescue-set-") as text:
        home = Path(text)
        for script in json.loads((args.folder / "set.json").read_text()):
            if wanted and script["name"] not in wanted:
                continue
            top = Path(script["cwd"]).parts[0]
            if not (home / top).exists():
                shutil.copytree(args.folder / top, home / top, symlinks=True)
            scripts[script["name"]] = measure(script, home, random.Random(f"{args.seed} {script['name']}"))
            for run in scripts[script["name"]]["runs"]:
                print(
                    f"  {script['name']}, {run['how']}: {run['verdict']} ({run.get('why', '')}) step {run.get('step')}",
                    flush=True,
                )
            write()


if __name__ == "__main__":
    main()
