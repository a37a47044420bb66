"""Checks out revisions of the user's repository as git work trees in a temporary folder.

Files that git does not track (data, checkpoints) are linked from the user's folder, so that the script finds
them. What a measured program writes is kept apart from both folders (`flatout.agent.file_sandbox`).
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from flatout.job.folder import FOLDER
from flatout.job.temporary import remove, temporary
from flatout.schema.errors import UsageError

AS_IS = ""
NOT_LINKED = {FOLDER, "__pycache__", ".git"}


class WorkTrees:
    """Use it as a context manager: the work trees are removed at its end."""

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
