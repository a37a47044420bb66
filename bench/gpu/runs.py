"""Tests basic operation on a GPU: small programs plain, attached, under levers, interrupted, profiled, tuned.

    python bench/gpu/runs.py

Each program runs plain twice: the GPU itself causes any differences between the two outputs (atomics). It
then runs attached, and gan.py runs under each lever that affects a GPU. A lever that claims to change no bit
must give the same lines. Then gan.py is interrupted and resumed, profiled, and tuned for 40 s. The row of a
failure shows its last output. ``--smoke``: two programs, a few levers, no search.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from provenance import RESULTS, markdown_table, stamp, write_result  # noqa: E402

FLATOUT = (sys.executable, "-m", "flatout")
REHEARSAL, PROGRAMS = HERE / "rehearsal", HERE / "programs"
TITLE = "Basic operation on a GPU"
LIMIT_S = 60
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
}
PACKAGES = {"lightning": "lightning", "hf_trainer": "transformers"}
IN_SMALL = ("gan", "default_device")
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


def every(folder: Path, smoke: bool) -> Any:
    plain = {}
    for name, program in RUNS.items():
        if smoke and name not in IN_SMALL:
            continue
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            yield Result("plain", name, 0.0, "not run", f"{PACKAGES[name]} is not installed")
            continue
        first, lines = run("plain", name, folder, (sys.executable, *program), None)
        yield first
        if first.outcome == "failed":
            continue
        again, others = run("plain, repeated", name, folder, (sys.executable, *program), lines)
        plain[name] = lines if others == lines else None  # None: the program is not deterministic
        yield again
        yield run(
            "attached", name, folder, (*FLATOUT, "run", "--plan", "none", "python", *program), plain[name]
        )[0]
    if "gan" not in plain:
        return
    for lever in (*EXACT, *ROUNDING) if not smoke else (EXACT[0], ROUNDING[0]):
        yield run(
            f"lever {lever}",
            "gan",
            folder,
            (*FLATOUT, "run", "--with", lever, "python", *GAN),
            plain["gan"] if lever in EXACT else None,
        )[0]
    for lever in (
        ("channels_last", "cudnn_benchmark", "autocast", "compile", "batched_transforms", "resident_data")
        if not smoke
        else ()
    ):
        yield run(
            f"lever {lever}",
            "tutorial",
            folder,
            (*FLATOUT, "run", "--with", lever, "python", *RUNS["tutorial"]),
            None,
        )[0]
    if "reads" in plain:
        yield run(
            "lever early_values",
            "reads",
            folder,
            (*FLATOUT, "run", "--with", "early_values", "python", *RUNS["reads"]),
            plain["reads"],
        )[0]
    yield interrupted(folder, plain["gan"])
    yield run(
        "profile",
        "gan",
        folder,
        (*FLATOUT, "profile", "--steps", "20", "--budget", "15s", "python", GAN[0]),
        None,
    )[0]
    if not smoke:
        yield run(
            "tune",
            "gan",
            folder,
            (*FLATOUT, "tune", "--no-write", "--budget", "40s", "python", GAN[0]),
            None,
            90,
        )[0]


def run(
    what: str,
    name: str,
    folder: Path,
    command: tuple[str, ...],
    expected: list[str] | None,
    limit_s: float = LIMIT_S,
) -> tuple[Result, list[str]]:
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
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


def interrupted(folder: Path, expected: list[str] | None) -> Result:
    """Sends SIGTERM after three lines, then runs the same command again."""
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
    again, lines = run("interrupted", "gan", folder, command, None)
    again.seconds = time.monotonic() - start
    if again.outcome == "ran" and expected is not None:
        again.outcome = "same lines" if progress("\n".join(said)) + lines == expected else "other lines"
    return again


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
