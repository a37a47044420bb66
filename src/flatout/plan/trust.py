"""Whose files are read, and who else may write to them. A file that anybody could have put there does not decide what is run."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from flatout.plan.errors import StorageError

ROOT = 0


def distrusted(path: Path | str, whose: Path | None = None, group: bool = False) -> str:
    """Why what lies in ``path`` is not to be trusted: another user owns it, or anybody may write to it. "" where all is well, and where nothing is there.

    Whoever owns ``whose``, the script say, is trusted with ``path`` too: that user can have the same done there. ``group``: a group may not write to it
    either, but for the user's own.
    """
    try:
        about = os.stat(path)
    except OSError:
        return ""
    if about.st_uid not in {ROOT, os.geteuid(), *_owner(whose)}:
        return f"it belongs to {_name(about.st_uid)}"
    if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        return "anybody may write to it"
    if group and about.st_mode & stat.S_IWGRP and not _own_group(about.st_gid):
        return "a whole group may write to it"
    return ""


def private_folder(path: Path) -> Path:
    """A folder of this user alone, made where there is none. Raises StorageError where it is somebody else's, or cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        about = os.lstat(path)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            raise StorageError(f"{path} is {_name(about.st_uid)}'s, and what lies there could be anything. Remove it, or name another folder with TMPDIR.")
        if stat.S_IMODE(about.st_mode) != 0o700:
            os.chmod(path, 0o700)
    except OSError as error:
        raise StorageError(f"cannot make the folder {path}: {error.strerror}. Name another folder with TMPDIR.") from error
    return path


def _owner(path: Path | None) -> set[int]:
    try:
        return set() if path is None else {os.stat(path).st_uid}
    except OSError:
        return set()


def _name(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"the user {user}"


def _own_group(group: int) -> bool:
    """Many systems give each user a group of the same name, and let it write to all that the user makes."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
