"""The two sides of a comparison: what each runs, in which folder, environment and plan."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flatout.compare.work_trees import AS_IS, WorkTrees
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


def split_pair(text: str, option: str) -> tuple[str, str]:
    """Split ``A,B``. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise UsageError(f"{option} takes two values with a comma between them, not {text!r}.")
    return parts[0], parts[1]


def are_two_commands(words: Sequence[str]) -> bool:
    """Whether these are two quoted command lines, not the two words of one (``python train.py``)."""
    return len(words) == 2 and not (is_python(words[0]) and " " not in words[0])


def command_sides(words: Sequence[str]) -> tuple[Side, Side]:
    """The sides of two quoted command lines. Raises UsageError, ProgramNotFound."""
    if not are_two_commands(words):
        raise UsageError(
            "give two command lines in quotes: `flatout compare 'python a.py' 'python b.py'`; "
            "or one command and what differs: --rev main.., --plan or --baseline."
        )
    try:
        typed = [shlex.split(word) for word in words]
    except ValueError as error:
        raise UsageError(f"a command line cannot be split into words: {error}.") from None
    a, b = (
        Side(shlex.join(command.shown), check_measurable(command)) for command in map(parse_command, typed)
    )
    return a, b


def plan_sides(words: Sequence[str], plans: Sequence[tuple[str, Plan]]) -> tuple[Side, Side]:
    """The sides of one command under two plans, each with its name."""
    a, b = (Side(f"plan {name}", check_measurable(parse_command(words)), plan) for name, plan in plans)
    return a, b


def revisions(text: str) -> tuple[str, str]:
    """Split ``A..B``; without B, it is `AS_IS`, the folder as it is. Raises UsageError."""
    first, separator, second = text.partition("..")
    if not separator or not first or second.startswith("."):
        raise UsageError(
            f"--rev takes two revisions, such as main..HEAD, or main.. for main and the folder as it is, not {text!r}."
        )
    return first, second or AS_IS


def revision_side(words: Sequence[str], revision: str, work_trees: WorkTrees) -> Side:
    """The side of a command at a revision; `AS_IS` is the folder as it is. Raises UsageError."""
    if revision == AS_IS:
        return Side(
            "the folder as it is", check_measurable(parse_command(words)), revision=work_trees.commit("HEAD")
        )
    folder, commit = work_trees.check_out(revision), work_trees.commit(revision)
    command = check_measurable(parse_command(words, folder))
    paths = work_trees.import_paths(folder)
    python_path = os.environ.get("PYTHONPATH", "")
    if paths:
        joined = os.pathsep.join([*map(str, paths), *([python_path] if python_path else [])])
        command = replace(command, environment=(("PYTHONPATH", joined),))
    label = revision if commit.startswith(revision) else f"{revision} ({commit[:8]})"
    return Side(label, command, revision=commit)
