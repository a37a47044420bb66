"""Tests whether `flatout trial --plan none` changes a script: losses bit by bit, output, exit code.

The reference is ``recorder.py``, which shares no line with flatout. Each side runs in a fresh copy of the
script's folder at the same path, so neither sees files of the other.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import HERE, read_json

LARGEST_COPY_BYTES = 200 << 20
RECORDER = HERE / "recorder.py"
NUMBER = re.compile(r"[0-9][0-9.e+-]*")


@dataclass
class Run:
    """One run of a script: ``losses`` are hexadecimal floats, one for each backward pass.

    ``ended`` is true if it ran to its own end.
    """

    losses: list[str]
    stdout: str
    stderr_tail: str
    exit_code: int | None
    ended: bool

    def to_json(self) -> dict[str, Any]:
        """Returns the published part, without the program's output, which contains folders of the machine."""
        return {"losses": self.losses, "exit_code": self.exit_code, "ended": self.ended}


@contextmanager
def fresh_copy(folder: Path) -> Iterator[Path]:
    """Yields a copy next to the folder (so that ``../data`` stays valid), always under the same name.

    Yields the folder itself if it is large.
    """
    size = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if size > LARGEST_COPY_BYTES:
        yield folder
        return
    copy = folder.parent / f".{folder.name}.measured"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, symlinks=True)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def run_quietly(
    argv: Sequence[str], folder: Path, environment: dict[str, str], limit_s: float
) -> tuple[int | None, str, str]:
    """Returns exit code (None: stopped at the limit), output, error output. Its input is at its end."""
    outside, inside = pty.openpty()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(argv),
            cwd=folder,
            env=environment,
            stdin=inside,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        os.close(inside)
        os.write(outside, b"\x04")
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # loader workers of a script that exited abruptly
        except ProcessLookupError:
            pass
        process.wait()
        os.close(outside)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, texts[0], texts[1]


def under_flatout(
    argv: Sequence[str], folder: Path, environment: dict[str, str], steps: int, limit_s: float
) -> Run:
    with tempfile.TemporaryDirectory() as place:
        record_path = Path(place) / "record.json"
        command = [
            sys.executable,
            "-m",
            "flatout",
            "trial",
            "--plan",
            "none",
            "--seed",
            "0",
            "--steps",
            str(steps),
            "--out",
            str(record_path),
            "--timeout",
            f"{limit_s:.0f}s",
            *argv,
        ]
        code, out, err = run_quietly(command, folder, environment, limit_s + 60)
        record = read_json(record_path) or {}
    ended = record.get("status") in ("ended", "failed")  # a non-zero exit code of the script counts as failed
    if not ended and record.get("steps", 0) < steps:  # a trial that crashed, hung or timed out shows nothing
        return Run([], out, err[-2000:], code, ended)
    return Run(record["losses"], out, err[-2000:], code, ended)


def plainly(
    argv: Sequence[str], folder: Path, environment: dict[str, str], count: int, limit_s: float
) -> Run:
    """Runs the script with seeds and nothing else. With ``count`` 0 it runs to its own end."""
    if not Path(argv[0]).name.startswith("python") or (
        len(argv) > 1 and argv[1].startswith("-") and argv[1] != "-m"
    ):
        raise ValueError("cannot record this command; use `python script.py ...` or `python -m module ...`")
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "losses"
        command = [argv[0], str(RECORDER), str(log), str(count), *argv[1:]]
        code, out, err = run_quietly(command, folder, {**environment, "PYTHONHASHSEED": "0"}, limit_s)
        losses = log.read_text(encoding="utf-8").split() if log.is_file() else []
    return Run(losses, out, err[-2000:], code, code is not None and (not count or len(losses) < count))


def compare(
    argv: Sequence[str], folder: Path, extra: dict[str, str], steps: int, limit_s: float
) -> dict[str, Any]:
    """Runs one script both ways.

    ``verdict`` is ``same``, ``differs``, ``not repeatable`` or ``failed``; ``why`` gives the reason.
    """
    environment = {**os.environ, **extra}
    with fresh_copy(folder) as copy:
        ours = under_flatout(argv, copy, environment, steps, limit_s)
    if not ours.losses:
        return {
            "verdict": "failed",
            "why": f"no loss was recorded: {_last(ours.stderr_tail)}",
            "flatout": ours.to_json(),
        }
    count = 0 if ours.ended else len(ours.losses)
    with fresh_copy(folder) as copy:
        plain = plainly(argv, copy, environment, count, limit_s)
    found = {
        "flatout": ours.to_json(),
        "plain": plain.to_json(),
        "losses": len(ours.losses),
        "ended": ours.ended,
        "output": output_difference(plain.stdout, ours.stdout),
    }
    if not plain.losses:
        return {
            **found,
            "verdict": "failed",
            "why": f"the plain script recorded no loss: {_last(plain.stderr_tail)}",
        }
    different = losses_difference(plain.losses, ours.losses)
    if different:
        with fresh_copy(folder) as copy:
            again = plainly(argv, copy, environment, len(plain.losses), limit_s)
        if again.losses != plain.losses:
            return {
                **found,
                "verdict": "not repeatable",
                "why": f"the plain script differs from itself: {losses_difference(plain.losses, again.losses)}",
            }
        return {**found, "verdict": "differs", "why": different}
    if ours.ended and plain.exit_code != ours.exit_code:
        return {
            **found,
            "verdict": "differs",
            "why": f"exit code {ours.exit_code} instead of {plain.exit_code}",
        }
    return {**found, "verdict": "same", "why": f"{len(ours.losses)} losses, bit for bit"}


def losses_difference(plain: Sequence[str], ours: Sequence[str]) -> str:
    """Returns where two traces first differ; empty if they do not."""
    for at, (a, b) in enumerate(zip(plain, ours, strict=False)):
        if a != b:
            return f"backward pass {at + 1} of {len(plain)}: {float.fromhex(b)!r} instead of {float.fromhex(a)!r}"
    return "" if len(plain) == len(ours) else f"{len(ours)} backward passes instead of {len(plain)}"


def output_difference(plain: str, ours: str) -> str:
    """Returns a sentence on the standard output: the same, or the first different line.

    The output of a stopped run may be cut off anywhere.
    """
    a, b = plain.splitlines(), ours.splitlines()
    shared = min(len(a), len(b))
    parted = next((at for at in range(shared) if a[at] != b[at]), None)
    if parted is None:
        return (
            "the same"
            if len(a) == len(b)
            else f"the same for {shared} lines; then only one of them continues"
        )
    if all(NUMBER.sub("", a[at]) == NUMBER.sub("", b[at]) for at in range(parted, shared)) and len(a) == len(
        b
    ):
        return f"the same except for numbers, first in line {parted + 1}: {b[parted].strip()[:60]!r} instead of {a[parted].strip()[:60]!r}"
    return f"differs from line {parted + 1} of {shared}: {b[parted].strip()[:80]!r} instead of {a[parted].strip()[:80]!r}"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
