"""Finds what a trial has changed in the user's folder all the same: through C code, or through another program."""

import os

from flatout.agent.overlay import Overlay
from flatout.job.folder import FOLDER

MAX_ENTRIES = 50_000  # entries that are compared, below half a second
NOT_COMPARED = (FOLDER, "__pycache__")
MAX_SHOWN = 3
_compared: set[str] = set()  # folders; one trial of a program shows what all do


def describe_changes(root: str, since_ns: int, view: Overlay) -> str:
    """A sentence about what changed below ``root`` since then, once per folder and process; or "".

    What ``view`` excludes is not compared."""
    if root in _compared:
        return ""
    _compared.add(root)
    changed = _changed(root, since_ns, view)
    # a folder changes with what is in it
    paths = [path for path in changed if not any(_is_below(other, path) for other in changed)]
    if not paths:
        return ""
    others = f" and {len(paths) - MAX_SHOWN} more" if len(paths) > MAX_SHOWN else ""
    return (
        f"while the program was measured, {', '.join(sorted(paths)[:MAX_SHOWN])}{others} changed in {root}: by C code or another program that "
        "it uses, or by somebody else. flatout keeps apart what Python changes, and cannot keep that apart. If it matters, tune in a copy of the folder"
    )


def _is_below(path: str, folder: str) -> bool:
    return path != folder and (folder == "." or path.startswith(f"{folder}/"))


def _changed(root: str, since_ns: int, view: Overlay) -> list[str]:
    changed, folders, entry_count = [], [root], 0
    if os.stat(root).st_ctime_ns >= since_ns:
        changed.append(".")
    while folders and entry_count < MAX_ENTRIES:
        folder = folders.pop()
        try:
            entries = [
                entry
                for entry in os.scandir(folder)
                if entry.name not in NOT_COMPARED and not view.excludes(entry.path)
            ]
            entry_count += len(entries)
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            new = [
                entry.path for entry in entries if entry.stat(follow_symlinks=False).st_ctime_ns >= since_ns
            ]
        except OSError:  # removed meanwhile, or not readable for this user
            continue
        changed += [os.path.relpath(path, root) for path in new]
    return changed
