"""What several commands take: the program, the plan, the folder."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flatout.plan.errors import PlanError, StorageError, UsageError
from flatout.plan.folder import JobFolder
from flatout.plan.plan import MAX_PLAN_BYTES, Plan

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


class Duration(click.ParamType):
    """``90``, ``90s``, ``5m``, ``1h``: seconds as a float."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip().lower()
        try:
            number = float(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a time; write 90s, 5m or 1h", param, ctx)
        if not 0 <= number < 1e9:
            self.fail(f"{value!r} is not a time that can pass", param, ctx)
        return number


def program(function: Callable) -> Callable:
    return click.argument("words", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)(function)


def read_plan(path: str) -> Plan:
    """A Plan from a file; ``none`` is the empty one. Raises PlanError where it cannot be read."""
    if path == "none":
        return Plan()
    file = Path(path)
    try:
        if file.exists() and not file.is_file():  # a device or a pipe may have no end
            raise PlanError(f"{path} is not a file. `flatout tune COMMAND...` makes a plan.")
        if file.stat().st_size > MAX_PLAN_BYTES:
            raise PlanError(f"{path} has {file.stat().st_size:,} bytes; a plan is never that large. Is it the right file?")
        return Plan.from_toml(file.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise PlanError(f"there is no plan {path!r}. `flatout tune COMMAND...` makes one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}.") from None


def words_or_usage(words: tuple[str, ...], command: str) -> tuple[str, ...]:
    if not words:
        raise UsageError(f"no program was given. Try `flatout {command} python train.py`.")
    return words


def writable(folder: JobFolder, asked: bool) -> JobFolder:
    """The job's folder; where this one cannot be written and nobody asked for it, a temporary one, and a line that says so."""
    try:
        return folder.make()
    except StorageError:
        if asked:
            raise
        other = JobFolder(Path(tempfile.mkdtemp(prefix=f"flatout-{folder.path.name}-"))).make()
        sys.stderr.write(f"flatout: {os.getcwd()} cannot be written; the records go to {other.path}\n")
        return other
