"""Tests basic operation on a GPU: small programs plain, attached, under levers, interrupted, profiled, tuned.

    python bench/gpu/runs.py

Each program runs plain twice: the GPU itself causes any differences between the two outputs (atomics). It
then runs attached, and gan.py runs under each lever that affects a GPU. A lever that claims to change no bit
must give the same lines; the tutorial gives them with deterministic kernels, down to the bits of its weights.
Closures, trainers and a loss of NaN run under levers. gan.py is interrupted and resumed to its end, profiled, and
tuned for 40 s. Programs run side by side, one for two cores: nothing is timed. The row of a failure shows its last
output. ``--smoke``: few programs and levers, no search.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from provenance import RESULTS, markdown_table, stamp, write_result  # noqa: E402

FLATOUT = (sys.executable, "-m", "flatout")
REHEARSAL, PROGRAMS = HERE / "rehearsal", HERE / "programs"
TITLE = "Basic operation on a GPU"
LIMIT_S = 60
slower = 1  # factor of the limits; a rehearsal shares its machine
NO_GPU = 2
GAN = (str(REHEARSAL / "gan.py"), "--epochs", "12")
RUNS = {
    "tutorial": (str(PROGRAMS / "tutorial.py"), "--images", "256", "--batch-size", "64", "--epochs", "2"),
    "gpt": (
        str(PROGRAMS / "gpt.py"),
        *[
            "--context",
            "64",
            "--vocabulary",
            "512",
            "--width",
            "64",
            "--heads",
            "2",
            "--layers",
            "2",
            "--tokens",
            "8000",
            "--epochs",
            "1",
        ],
    ),
    "gan": GAN,
    "reads": (str(REHEARSAL / "reads.py"), "--epochs", "6"),
    "closure": (str(REHEARSAL / "closure.py"), "--epochs", "3"),
    "default_device": (str(REHEARSAL / "default_device.py"), "--epochs", "3"),
    "loop": (str(REHEARSAL / "loop.py"), "--steps", "100"),
    "lightning": (str(REHEARSAL / "lightning_trainer.py"), "--epochs", "2"),
    "hf_trainer": (str(REHEARSAL / "hf_trainer.py"), "--epochs", "1"),
    "not_finite": (str(REHEARSAL / "not_finite.py"), "--steps", "60"),
    "deterministic": (
        str(PROGRAMS / "deterministic.py"),
        str(PROGRAMS / "tutorial.py"),
        *("--images", "256", "--batch-size", "64", "--epochs", "2"),
    ),
}
PACKAGES = {"lightning": "lightning", "hf_trainer": "transformers"}
IN_SMALL = ("gan", "not_finite")
CORES_EACH = 2
EXACT = (
    "resident_data",
    "resident_data={mib=64,host=true}",
    "cached_prefix",
    "loader={workers=1,pin=true}",
    "loader={workers=0,pin=true}",
    "device_prefetch=0",
    "early_values",
    "allocator",
    "gc_pause",
    "recompute",
)
ROUNDING = (
    "tf32",
    "cudnn_benchmark",
    "channels_last",
    "autocast",
    "attention",
    "fused_optimizer",
    "fused_ops",
    "compile",
    "graphs",
)

DATA_PATH = (
    "cached_prefix",
    "batched_transforms",
    "resident_data",
    "loader={workers=0,pin=true}",
    "device_prefetch=0",
    "early_values",
)
# Levers under which a program runs besides gan.py, together.
TOGETHER = {
    "deterministic": DATA_PATH,
    "closure": ("gc_pause", "allocator", "early_values"),
    "lightning": ("gc_pause", "allocator", "early_values"),
    "hf_trainer": ("gc_pause", "allocator", "early_values"),
    "reads": ("early_values",),
}
ROUNDED = {
    "closure": ("graphs", "tf32"),
    "lightning": ("autocast", "graphs", "fused_optimizer"),
    "hf_trainer": ("autocast", "graphs", "fused_optimizer"),
    "not_finite": ("graphs",),
    "tutorial": (
        "channels_last",
        "cudnn_benchmark",
        "autocast",
        "compile",
        "batched_transforms",
        "resident_data",
    ),
}


@dataclass
class Result:
    what: str
    program: str
    seconds: float
    outcome: str  # "same lines", "other lines", "ran", "not run", or "failed"
    words: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run only two programs and a few levers, without a search"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was run or written.\n"
            "Run it on a stand-in with `python bench/gpu/all.py --rehearse --only runs`.\n"
        )
        return NO_GPU
    global slower
    slower = 3 if args.smoke else 1
    begun, results = stamp(), []
    with tempfile.TemporaryDirectory() as name:
        for result in every(Path(name), args.smoke):
            results.append(result)
            print(
                f"{result.what}, {result.program}: {result.outcome} ({result.seconds:.0f} s) {result.words}",
                flush=True,
            )
            write_result(
                "runs_gpu",
                begun,
                page(results),
                {"results": [asdict(each) for each in results]},
                folder=args.out or RESULTS,
            )
    return int(any(result.outcome in ("failed", "other lines") for result in results))


Job = Callable[[], tuple[Result, list[str]]]


def every(folder: Path, smoke: bool) -> Iterator[Result]:
    """Runs all programs plain, then everything that is compared with them."""
    programs = {name: program for name, program in RUNS.items() if not smoke or name in IN_SMALL}
    for name, package in PACKAGES.items():
        if name in programs and find_spec(package) is None:
            del programs[name]
            yield Result("plain", name, 0.0, "not run", f"{package} is not installed")
    plain: dict[str, list[str] | None] = {}
    first = at_once(
        partial(run, "plain", name, folder, (sys.executable, *programs[name]), None)
        for name in programs
        for _ in range(2)
    )
    for (one, lines), (again, others) in zip(first, first, strict=True):
        yield one
        if one.outcome != "failed":
            plain[one.program] = (
                lines if others == lines else None
            )  # None: the program does not repeat itself
            again.what, again.outcome = "plain, repeated", "same lines" if others == lines else "ran"
            yield again
    for result, _ in at_once(compared(folder, smoke, plain)):
        yield result


def compared(folder: Path, smoke: bool, plain: Mapping[str, list[str] | None]) -> Iterator[Job]:
    def under(name: str, levers: Sequence[str], exact: bool) -> Job:
        options = [word for lever in levers for word in ("--with", lever)]
        command = (*FLATOUT, "run", *options, "python", *RUNS[name])
        what = f"lever{'s' * (len(levers) > 1)} {', '.join(levers)}"
        return partial(run, what, name, folder, command, plain[name] if exact else None)

    for name in plain:
        command = (*FLATOUT, "run", "--plan", "none", "python", *RUNS[name])
        yield partial(run, "attached", name, folder, command, plain[name])
    for levers, exact in ((EXACT, True), (ROUNDING, False)):
        for lever in levers[:1] if smoke else levers:
            if "gan" in plain:
                yield under("gan", (lever,), exact)
    for table, exact in ((TOGETHER, True), (ROUNDED, False)):
        for name, levers in table.items():
            if name in plain and name == "tutorial":
                for lever in levers:
                    yield under(name, (lever,), exact)
            elif name in plain:
                yield under(name, levers, exact or name == "not_finite")
    if "gan" not in plain:
        return
    yield partial(interrupted, folder, plain["gan"])
    command = (*FLATOUT, "profile", "--steps", "20", "--budget", "15s", "python", GAN[0])
    yield partial(run, "profile", "gan", folder, command, None, 90)
    if not smoke:
        command = (*FLATOUT, "tune", "--no-write", "--budget", "40s", "python", GAN[0])
        yield partial(run, "tune", "gan", folder, command, None, 120)


def at_once(jobs: Iterable[Job]) -> Iterator[tuple[Result, list[str]]]:
    """Runs the jobs side by side, each in a folder of its own, and yields their results in order."""
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // CORES_EACH)) as pool:
        yield from pool.map(lambda job: job(), jobs)


def run(
    what: str,
    name: str,
    folder: Path,
    command: tuple[str, ...],
    expected: list[str] | None,
    limit_s: float = LIMIT_S,
    in_place: bool = False,
) -> tuple[Result, list[str]]:
    start = time.monotonic()
    limit_s *= slower
    try:
        done = subprocess.run(
            command,
            cwd=folder if in_place else tempfile.mkdtemp(dir=folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(what, name, limit_s, "failed", f"not finished after {limit_s:.0f} s"), []
    spent, lines = time.monotonic() - start, progress(done.stdout)
    if done.returncode:
        return Result(what, name, spent, "failed", last(done.stderr)), lines
    refused = next((line for line in done.stderr.splitlines() if "not applied" in line), "")
    outcome = "ran" if expected is None else "same lines" if lines == expected else "other lines"
    return Result(what, name, spent, outcome, refused[:200]), lines


def interrupted(folder: Path, expected: list[str] | None) -> tuple[Result, list[str]]:
    """Sends SIGTERM after three lines, then runs the same command again, to its end."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    start, command = time.monotonic(), (*FLATOUT, "run", "--plan", "none", "--resume", "python", *GAN)
    first = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert first.stdout is not None
    said = []
    for line in first.stdout:
        said.append(line.rstrip("\n"))
        if len(said) == 3:
            first.send_signal(signal.SIGTERM)
    first.wait()
    again, lines = run("interrupted", "gan", folder, command, None, in_place=True)
    again.seconds = time.monotonic() - start
    if again.outcome == "ran" and expected is not None:
        again.outcome = "same lines" if progress("\n".join(said)) + lines == expected else "other lines"
    return again, lines


def progress(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"(epoch|step) \d", line)]


def last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("flatout:")]
    return lines[-1][:200] if lines else ""


def page(results: list[Result]) -> str:
    rows = [
        (
            each.what,
            each.program,
            f"{each.seconds:.0f}",
            f"**{each.outcome}**" if each.outcome in ("failed", "other lines") else each.outcome,
            each.words,
        )
        for each in results
    ]
    return (
        f"# {TITLE}\n\n{(__doc__ or '').split(chr(10), 4)[4].strip()}\n\n"
        + markdown_table(("test", "program", "seconds", "outcome", "notes"), rows)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
