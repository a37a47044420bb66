"""Measures the detection and the cost of `flatout run --supervise`: real faults in small programs, by seed.

    faults     a program or one of its loader workers is killed, stopped, blocked in C, or loops, at a random
               step. Is it identified, after how long, and does the run end with the weights of the
               undisturbed one?
    alarms     jittered steps, evaluations, gaps between epochs and recompilation, for a given time: none of
               them may be reported as a hang
    kills      SIGKILL hits the supervisor; three seconds later, the bench counts the remaining processes
    sigterm    SIGTERM at a random moment: a checkpoint, exit code 143, and after how long
    goodput    a training with `flatout.Loop` that is killed once a minute: the time of the steps that counted
               in the end, as a share of the total time
    overhead   a short step and one of some 5 ms, without and with the heartbeat's hooks, interleaved in one
               process that is really monitored. The cost of the hooks does not grow with the step: the short
               step, with less noise, gives the cost, and the long one confirms it

The bench finds the processes of a run by a mark in their environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from launcher import MARK as LAUNCH_MARK
from launcher import end, left
from overhead import interval, spell
from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result

PROGRAM = HERE / "programs" / "supervised.py"
KINDS = [
    ("SIGKILL", "main"),
    ("SIGSEGV", "main"),
    ("exit", "main"),
    ("loop", "main"),
    ("wait", "main"),
    ("lock", "main"),
    ("SIGSTOP", "main"),
    ("SIGKILL", "worker"),
    ("exit", "worker"),
    ("loop", "worker"),
    ("lock", "worker"),
    ("SIGSTOP", "worker"),
]
DIES = {"SIGKILL", "SIGSEGV", "exit"}
LIMIT_S, WORKER_LIMIT_S = 10.0, 15.0
LAYERS, STEP_US = (1, 24), 5000.0
TIMEOUT_S = 240.0


def start(mark: str, folder: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "flatout",
        "run",
        "--supervise",
        *options,
        sys.executable,
        str(PROGRAM),
        *words,
    ]
    environment = {**os.environ, LAUNCH_MARK: mark, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def undisturbed() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, str(PROGRAM), "--fault", "none", "main", "-1"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def faulted(seed: int, plain: str) -> dict[str, Any]:
    """Runs one fault. ``found_s``: from the fault to flatout's message."""
    draw, mark = random.Random(seed), uuid.uuid4().hex
    kind, where = KINDS[seed % len(KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        words = ("--fault", kind, where, str(draw.randrange(20, 180)))
        process = start(mark, folder, *words, options=("--hang-after", "10s"))
        assert process.stderr is not None
        said, found_at = [], None
        for line in process.stderr:
            said.append(line)
            if (
                found_at is None
                and re.search(
                    r"has finished no step|has returned no batch|was stopped|was killed by|ended with exit code|"
                    r"failed after step",
                    line,
                )
                and line.startswith("flatout:")
            ):
                found_at = time.monotonic()
        out = process.communicate(timeout=TIMEOUT_S)[0]
        struck = float(Path(folder, "struck").read_text())
        records = [
            json.loads(line)
            for path in Path(folder).glob(".flatout/*/incidents.jsonl")
            for line in path.read_text().splitlines()
        ]
        orphans = left(mark)
        end(mark)
    text = "".join(said)
    named = (
        bool(re.search(r"loader worker \(process \d+\)|DataLoader worker \(pid\S* \d+\)", text))
        if where == "worker"
        else found_at is not None
    )
    place = (
        kind in DIES
        or kind == "SIGSTOP"
        or re.search(r"supervised\.py, line \d+, in strike", text) is not None
    )
    return {
        "seed": seed,
        "kind": kind,
        "where": where,
        "found_s": None if found_at is None else round(found_at - struck, 2),
        "named": named and place,
        "code": process.returncode,
        "same": where == "worker" or out == plain,
        "orphans": orphans,
        "incidents": [record["kind"] for record in records],
        "said": "" if named and place and process.returncode == 0 else text[-3000:],
    }


def alarmed(seed: int, minutes: float) -> dict[str, Any]:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        process = start(mark, folder, "--jitter", str(seed), str(int(60 * minutes)), str(int(seed % 4 == 0)))
        out, said = process.communicate()
        end(mark)
    alarms = [
        line
        for line in said.splitlines()
        if re.search(r"has finished no step|has returned no batch|was stopped|restarted", line)
    ]
    return {
        "seed": seed,
        "minutes": minutes,
        "compiles": seed % 4 == 0,
        "code": process.returncode,
        "alarms": alarms,
        **(json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"said": said[-3000:]}),
    }


def killed(seed: int) -> dict[str, Any]:
    draw, mark = random.Random(seed), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        process = start(mark, folder, "--fault", "sigterm", draw.choice(("main", "worker")), "-1")
        training = draw.random() < 0.7
        until = time.monotonic() + 60
        while training and not Path(folder, "trains").exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 1.0 if training else 3.0))
        there = len(left(mark))
        process.kill()
        process.communicate()
        time.sleep(3)
        orphans = left(mark)
        end(mark)
    return {"seed": seed, "training": training, "processes": there, "orphans": orphans}


def sigterm(seed: int) -> dict[str, Any]:
    draw, mark = random.Random(seed), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        process = start(mark, folder, "--fault", "sigterm", "main", "-1")
        until = time.monotonic() + 60
        while not Path(folder, "trains").exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 1))
        before = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        took = time.monotonic() - before
        saved = Path(folder, "last.pt").exists()
        orphans = left(mark)
        end(mark)
    return {
        "seed": seed,
        "code": process.returncode,
        "saved": saved,
        "took_s": round(took, 3),
        "orphans": orphans,
    }


def goodput(seed: int, minutes: float) -> dict[str, Any]:
    """Runs one training of the given minutes of steps, and kills it at a random moment of each minute."""
    draw, mark = random.Random(seed), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        process = start(mark, folder, "--goodput", str(60 * minutes), options=("--restarts", "1000"))
        trains, kills = Path(folder, "trains"), []
        said: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
        reader.start()
        moments = (60 * (minute + draw.random()) for minute in itertools.count())
        coming = next(moments)
        while process.poll() is None:
            if time.monotonic() - began >= coming and trains.exists():
                coming = next(moments)
                pid, _ = int(trains.read_text()), trains.unlink()  # not killed again before its first step
                os.kill(pid, signal.SIGKILL)
                kills.append(round(time.monotonic() - began, 1))
            time.sleep(0.01)
        took_s = (
            time.monotonic() - began - float(Path(folder, "goal").read_text().split()[1])
        )  # without the calibration of the step count
        reader.join()
        counted = dict(
            line.split() for line in Path(folder, "steps").read_text().splitlines() if len(line.split()) == 2
        )
        lost = sum(len(line.split()) == 2 for line in Path(folder, "steps").read_text().splitlines()) - len(
            counted
        )
        end(mark)
    return {
        "seed": seed,
        "code": process.returncode,
        "took_s": took_s,
        "kills": kills,
        "steps": len(counted),
        "again": lost,
        "goodput": sum(map(float, counted.values())) / took_s,
    }


def overhead(seconds: float, processes: int) -> list[dict[str, Any]]:
    ran: dict[int, list[Any]] = {layers: [] for layers in LAYERS}
    memory = []
    for _ in range(processes):
        for layers, found in ran.items():
            with tempfile.TemporaryDirectory() as folder:
                process = start(uuid.uuid4().hex, folder, "--on-and-off", str(seconds), str(layers))
                time.sleep(min(seconds, 8))
                memory.append(supervisors_memory(process.pid))
                out, said = process.communicate()
                if process.returncode:
                    raise SystemExit(said[-2000:])
                found.append(json.loads(out.splitlines()[-1]))
    return [
        {
            "layers": layers,
            "processes": found,
            "memory_kib": memory,
            "plain_us": median((a + d) / 2 for one in found for a, _, _, d in one["rounds"]),
            "cost_us": interval([[(b + c - a - d) / 2 for a, b, c, d in one["rounds"]] for one in found]),
            "aa_us": interval([[d - a for a, _, _, d in one["rounds"]] for one in found]),
        }
        for layers, found in ran.items()
    ]


def supervisors_memory(pid: int) -> int:
    """Returns the memory of the supervisor and its reaper in KiB (PSS counts shared pages once)."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if (
                folder.name.isdigit()
                and b"flatout.launch.supervisor" in (folder / "cmdline").read_bytes()
                and (
                    folder.name == str(pid)
                    or (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid)
                )
            ):
                total += int(
                    re.search(r"^Pss: +(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)[1]
                )  # type: ignore[index]
        except OSError:
            continue
    return total


def page(raw: dict[str, Any]) -> str:
    parts = [f"# Supervised programs\n\n{(__doc__ or '').strip()}"]
    parts += [part(raw[name]) for name, part in PARTS.items() if raw[name]]
    return "\n\n".join(parts) + "\n"


def faults_part(found: list[Any]) -> str:
    rows = []
    for kind, where in KINDS:
        of = [each for each in found if (each["kind"], each["where"]) == (kind, where)]
        times = sorted(each["found_s"] for each in of if each["found_s"] is not None)
        if of:
            well = sum(each["code"] == 0 and each["same"] for each in of)
            rows.append(
                (
                    kind,
                    where,
                    len(of),
                    sum(each["named"] for each in of),
                    figure(times, median),
                    figure(times, max),
                    well,
                    sum(bool(each["orphans"]) for each in of),
                )
            )
    header = (
        "fault",
        "in",
        "n",
        "identified",
        "found after s (median)",
        "maximum",
        "ended well (in main: same weights)",
        "with orphans",
    )
    return "## Faults\n\n" + markdown_table(header, rows)


def figure(times: list[float], of: Any) -> str:
    return f"{of(times):.2f}" if times else ""


def alarms_part(found: list[Any]) -> str:
    total = {
        name: sum(each.get(name, 0) for each in found)
        for name in ("minutes", "pauses", "evaluations", "between", "compiled")
    }
    return (
        f"## False alarms\n\n**{sum(bool(each['alarms']) for each in found)}** in {total['minutes']:.0f} minutes of {len(found)} jittered runs: "
        f"{total['pauses']} pauses of 2 to 7 s, {total['evaluations']} evaluations of 12 to 45 s, {total['between']} gaps between epochs of 12 to 30 s, "
        f"{total['compiled']} recompilations."
    )


def kills_part(found: list[Any]) -> str:
    return (
        f"## Killed supervisors\n\n{len(found)} kills, {sum(each['processes'] for each in found)} processes at those moments: "
        f"**{sum(len(each['orphans']) for each in found)} left** three seconds later."
    )


def goodput_part(found: list[Any]) -> str:
    rows = [
        (
            each["seed"],
            f"{each['took_s'] / 60:.1f}",
            len(each["kills"]),
            each["steps"],
            each["again"],
            f"{each['goodput']:.1%}",
        )
        for each in found
    ]
    header = (
        "seed",
        "minutes",
        "kills",
        "steps",
        "repeated",
        "goodput (goal: 90 %)",
    )
    return "## Goodput\n\n" + markdown_table(header, rows)


def sigterm_part(found: list[Any]) -> str:
    times = [each["took_s"] for each in found]
    right = sum(
        each["code"] in (143, -signal.SIGTERM) and each["saved"] and not each["orphans"] for each in found
    )
    return (
        f"## SIGTERM\n\n{len(found)} signals: **{right}** with a checkpoint, exit code 143 as in a shell, and no remaining processes. "
        f"It took {median(times):.2f} s (median), {max(times):.2f} s (maximum)."
    )


def overhead_part(found: list[Any]) -> str:
    rows = [
        (
            f"{it['plain_us'] / 1000:.2f} ms",
            f"{spell(it['cost_us'], 1)} us",
            f"{it['cost_us']['median'] / STEP_US:+.3%}",
            f"{spell(it['aa_us'], 1)} us",
            len(it["processes"]),
            sum(len(one["rounds"]) for one in it["processes"]),
        )
        for it in found
    ]
    return (
        "## Cost\n\n"
        + markdown_table(
            (
                "step",
                "cost of monitoring",
                "share of a step of 5 ms (goal: 0.1 %)",
                "A/A",
                "processes",
                "rounds",
            ),
            rows,
        )
        + f"\n\nThe supervisor and its reaper together use {median(found[0]['memory_kib']) / 1024:.1f} MiB (goal: 20)."
    )


PARTS = {
    "faults": faults_part,
    "alarms": alarms_part,
    "kills": kills_part,
    "sigterm": sigterm_part,
    "goodput": goodput_part,
    "overhead": overhead_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=0, help="number of faults")
    parser.add_argument("--alarms", type=int, default=0, metavar="RUNS", help="number of jittered runs")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="duration of each jittered run, and of each training that is killed once a minute",
    )
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--sigterm", type=int, default=0, metavar="RUNS")
    parser.add_argument(
        "--goodput", type=int, default=0, metavar="RUNS", help="number of trainings of --minutes each"
    )
    parser.add_argument(
        "--overhead",
        type=float,
        default=0,
        metavar="SECONDS",
        help="duration of each of --processes processes",
    )
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made = stamp()
    before = read_result("supervise", made, args.out)
    raw: dict[str, Any] = {name: before.get(name, []) for name in PARTS}
    seeds = lambda count: range(args.first_seed, args.first_seed + count)  # noqa: E731

    def keep(name: str, ran: Any) -> None:
        """Writes each record at once, so that an interrupted campaign keeps its results."""
        for one in ran:
            raw[name] = [each for each in raw[name] if each["seed"] != one["seed"]] + [one]
            write_result("supervise", made, page(raw), raw, folder=args.out)

    with ThreadPoolExecutor(args.at_once) as pool:
        if args.overhead:
            raw["overhead"] = overhead(args.overhead, args.processes)
        if args.faults:
            plain = undisturbed()
            keep("faults", pool.map(lambda seed: faulted(seed, plain), seeds(args.faults)))
        if args.kills:
            keep("kills", pool.map(killed, seeds(args.kills)))
        if args.sigterm:
            keep("sigterm", pool.map(sigterm, seeds(args.sigterm)))
        if args.goodput:
            keep(
                "goodput", (goodput(seed, args.minutes) for seed in seeds(args.goodput))
            )  # one at a time: each needs the whole machine
        if args.alarms:
            keep("alarms", pool.map(lambda seed: alarmed(seed, args.minutes), seeds(args.alarms)))
    text = page(raw)
    write_result("supervise", made, text, raw, folder=args.out)
    print(text)


if __name__ == "__main__":
    main()
