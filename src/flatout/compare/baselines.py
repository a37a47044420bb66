"""Stores runs of a program as a named baseline, with which later runs are compared.

.flatout/baselines/NAME.json

Runs of different days cannot alternate. The interval then covers the difference between processes, but not
what has changed on the machine since: its load, temperature and clock.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.compare.pairs import Run
from flatout.compare.sides import Side
from flatout.job.folder import flatout_folder, read_json, write_json
from flatout.measure.clock import utc_now
from flatout.schema.errors import NoBaseline, UsageError
from flatout.schema.plan import Plan
from flatout.schema.records import Record

FOLDER_NAME = "baselines"
SCHEMA = 1


@dataclass
class Baseline(Record):
    """Runs of one program, with what they are valid for (`flatout.tune.plan_files.plan_key`)."""

    name: str
    command: list[str]
    key: dict[str, str]
    plan: dict[str, Any]
    revision: str = ""
    created: str = ""
    schema: int = SCHEMA
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def parsed_runs(self) -> list[Run]:
        return [Run.from_json(run) for run in self.runs]

    def side(self, current: Side) -> Side:
        """The side of these runs, beside that of today."""
        label = f"baseline {self.name} of {self.created[:10]}"
        return Side(label, current.command, Plan.from_json(self.plan), self.revision)


def baseline_file(name: str) -> Path:
    """The file of a baseline. Raises UsageError for a name that is none."""
    if not re.fullmatch(r"\w[\w.-]{0,79}", name):
        raise UsageError(f"{name!r} is not a name for a baseline; use letters, digits, dots and hyphens.")
    return flatout_folder(FOLDER_NAME) / f"{name}.json"


def save(name: str, side: Side, key: dict[str, str], runs: Sequence[Run]) -> Path:
    """Write a baseline. Raises StorageError."""
    stored = Baseline(
        name,
        list(side.command.shown),
        key,
        side.plan.to_json(),
        side.revision,
        utc_now(),
        runs=[replace(r, operations=None).to_json() for r in runs],
    )
    write_json(baseline_file(name), stored.to_json())
    ignored = flatout_folder() / ".gitignore"
    if not ignored.exists():
        ignored.write_text("*\n", encoding="utf-8")
    return baseline_file(name)


def load(name: str, key: dict[str, str], any_machine: bool) -> tuple[Baseline, list[str]]:
    """A baseline and what differs from today.

    Raises NoBaseline if it is missing, or of another machine without ``any_machine``; UsageError if it is
    unreadable."""
    path = baseline_file(name)
    data = read_json(path)
    if data is None and not path.is_file():
        names = sorted(path.stem for path in path.parent.glob("*.json"))
        existing = f"There are: {', '.join(names)}." if names else "None is stored yet."
        raise NoBaseline(
            f"there is no baseline {name!r} in {path.parent}. {existing} `flatout compare --save {name} COMMAND` stores one."
        )
    try:
        stored = Baseline.from_json(data)
        if not stored.parsed_runs:
            raise TypeError("it has no runs")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{path} is damaged, or not a baseline. Store it again: `flatout compare --save {name} COMMAND`."
        ) from None
    differing = {part for part in key if stored.key.get(part) != key[part]}
    if "machine" in differing and not any_machine:
        raise NoBaseline(
            f"baseline {name!r} was measured on another machine ({stored.key.get('machine')}; this is {key['machine']}). "
            "Store one here with --save, or add --any-machine to compare across machines."
        )
    return stored, [
        f"{part}: {stored.key.get(part, 'unknown')} in the baseline, {key[part]} now"
        for part in ("machine", "versions", "python", "command")
        if part in differing
    ] + (["the script has changed since the baseline"] if "script" in differing else [])
