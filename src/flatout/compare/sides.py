"""The two sides of a comparison: what each runs, in which folder, environment and plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flatout.compare.work_trees import HERE, WorkTrees
from flatout.launch.command import Command, check_measurable, is_python, parse_command
from flatout.schema.errors import UsageError
from flatout.schema.plan import Plan


@dataclass(frozen=True)
class Side:
    """One program of a comparison. ``revision`` is the commit of a work tree, "" elsewhere."""

    label: str
    command: Command
    plan: Plan = field(default_factory=Plan)
    revision: str = ""


def two(text: str, option: str) -> tuple[str, str]:
    """Split ``A,B``. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise UsageError(f"{option} takes two values with a comma between them, not {text!r}.")
    return parts[0], parts[1]


def are_two_commands(words: Sequence[str]) -> bool:
    """Whether these are two quoted command lines, not the two words of one (``python train.py``)."""
    return len(words) == 2 and not (is_python(words[0]) and " " not in words[0])


def of_commands(words: Sequence[str]) -> tuple[Side, Side]:
    """Return the sides of two quoted command lines. Raises UsageError, ProgramNotFound."""
    if not are_two_commands(words):
        raise UsageError(
            "give two command lines in quotes: `flatout compare 'python a.py' 'python b.py'`; "
            "or one command and what differs: --rev main.., --plan or --baseline."
        )
    try:
        typed = [shlex.split(word) for word in words]
    except ValueError as error:
        raise UsageError(f"a command line cannot be split into words: {error}.") from None
    a, b = (Side(shlex.join(one.shown), check_measurable(one)) for one in map(parse_command, typed))
    return a, b


def of_plans(words: Sequence[str], plans: Sequence[tuple[str, Plan]]) -> tuple[Side, Side]:
    """Return the sides of one command under two plans, each with its name."""
    a, b = (Side(f"plan {name}", check_measurable(parse_command(words)), plan) for name, plan in plans)
    return a, b


def revisions(text: str) -> tuple[str, str]:
    """Split ``A..B``; without B, it is `HERE`, the folder as it is. Raises UsageError."""
    first, dots, second = text.partition("..")
    if not dots or not first or second.startswith("."):
        raise UsageError(
            f"--rev takes two revisions, such as main..HEAD, or main.. for main and the folder as it is, not {text!r}."
        )
    return first, second or HERE


def at_revision(words: Sequence[str], revision: str, trees: WorkTrees) -> Side:
    """Return the side of a command at a revision; `HERE` is the folder as it is. Raises UsageError."""
    if revision == HERE:
        return Side(
            "the folder as it is", check_measurable(parse_command(words)), revision=trees.commit("HEAD")
        )
    folder, commit = trees.at(revision), trees.commit(revision)
    command = check_measurable(parse_command(words, folder))
    paths = trees.import_paths(folder)
    before = os.environ.get("PYTHONPATH", "")
    if paths:
        joined = os.pathsep.join([*map(str, paths), *([before] if before else [])])
        command = replace(command, environment=(("PYTHONPATH", joined),))
    label = revision if commit.startswith(revision) else f"{revision} ({commit[:8]})"
    return Side(label, command, revision=commit)
