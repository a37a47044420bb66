"""The two sides of a comparison: what each runs, in which folder, environment and plan."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlparse

from flatout.job.folder import FOLDER
from flatout.job.temporary import remove, temporary
from flatout.launch.command import Command, check_measurable, is_python, parse_command
from flatout.schema.errors import UsageError
from flatout.schema.plan import Plan

AS_IS = ""
NOT_LINKED = {FOLDER, "__pycache__", ".git"}


class WorkTrees:
    """Checks out revisions of the user's repository as git work trees in a temporary folder, removed at the end.

    A context manager. Files that git does not track (data, checkpoints) are linked from the user's folder, so that
    the script finds them. What a measured program writes is kept apart from both (`flatout.agent.file_sandbox`)."""

    def __init__(self) -> None:
        """Raises UsageError outside a repository."""
        self.root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        self.subfolder = Path.cwd().resolve().relative_to(self.root.resolve())
        self._folder = temporary("revisions")
        self._trees: dict[str, Path] = {}

    def __enter__(self) -> WorkTrees:
        return self

    def __exit__(self, *_: object) -> None:
        remove(self._folder)

    def commit(self, revision: str) -> str:
        """The full name of a commit. Raises UsageError."""
        return _git(
            self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )

    def check_out(self, revision: str) -> Path:
        """Check out a revision once; return the folder in it that matches the current one. Raises UsageError."""
        commit = self.commit(revision)
        if commit not in self._trees:
            tree = self._folder / commit[:12]
            _git(self.root, "worktree", "add", "--detach", "--force", str(tree), commit)
            self._trees[commit] = tree
            self._link(tree)
        folder = self._trees[commit] / self.subfolder
        if not folder.is_dir():
            raise UsageError(f"the folder {self.subfolder} does not exist at revision {revision}.")
        return folder

    def _link(self, tree: Path) -> None:
        untracked = ("ls-files", "--others", "--exclude-standard", "--directory", "-z")
        ignored = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
        for options in (untracked, ignored):
            for name in filter(None, _git(self.root, *options).split("\0")):
                source, link = self.root / name, tree / name.rstrip("/")
                if NOT_LINKED & set(Path(name).parts) or link.exists() or link.is_symlink():
                    continue
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source.absolute())

    def import_paths(self, folder: Path) -> list[Path]:
        """The folders of a work tree from which its own packages are imported.

        A package that is installed as editable would otherwise come from the user's folder on both sides."""
        tree = next(tree for tree in self._trees.values() if folder.is_relative_to(tree))
        paths = []
        for project in _editable_projects():
            if project.is_relative_to(self.root.resolve()):
                copy = tree / project.relative_to(self.root.resolve())
                paths += [path for path in (copy / "src", copy) if path.is_dir()][:1]
        return paths


def _editable_projects() -> list[Path]:
    projects = []
    for package in importlib.metadata.distributions():
        try:
            origin = json.loads(package.read_text("direct_url.json") or "{}")
        except (OSError, ValueError):
            continue
        if origin.get("dir_info", {}).get("editable"):
            projects.append(Path(unquote(urlparse(origin["url"]).path)).resolve())
    return projects


def _git(folder: Path, *words: str) -> str:
    try:
        process = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    except OSError as error:
        raise UsageError(
            f"git cannot be started: {error.strerror}. Install git, or compare two folders with two commands."
        ) from None
    if process.returncode:
        raise UsageError(_explain(words, process.stderr))
    return process.stdout.strip() if "-z" not in words else process.stdout


def _explain(words: Sequence[str], output: str) -> str:
    if words[0] == "rev-parse" and words[-1].endswith("^{commit}"):
        name = words[-1].removesuffix("^{commit}")
        return f"there is no revision {name!r} in this repository. `git log --oneline` lists them; a shallow clone has few."
    if "not a git repository" in output:
        return (
            "this folder is not in a git repository, so there are no revisions. Compare two commands instead."
        )
    lines = output.strip().splitlines()
    return f"git {words[0]} failed: {lines[-1] if lines else 'no message'}."


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


def python_sides(words: Sequence[str], pythons: Sequence[str]) -> tuple[Side, Side]:
    """The sides of one command under two interpreters. Raises UsageError, ProgramNotFound."""
    if len(pythons) != 2:
        raise UsageError("give --python twice: the interpreter of A, then that of B.")
    rest = words[1:] if is_python(words[0]) else words
    a, b = (Side(python, check_measurable(parse_command((python, *rest)))) for python in pythons)
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
