"""Check ownership and write permissions of files.

A file that anyone could have written must not decide what runs.
"""

import grp
import hashlib
import math
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from flatout.schema.errors import StorageError

ROOT = 0


def distrusted(path: Path | str, owner_of: Path | None = None, group: bool = False) -> str:
    """Return why ``path`` is not trusted: another user owns it, or anyone can write to it.

    The result is "" if it is trusted or missing. The owner of the path ``owner_of``
    (for example, the script) is trusted too, because that user already controls what runs. With ``group``, write permission of a
    group is not trusted either, except for the user's own group."""
    try:
        stats = os.stat(path)
    except OSError:
        return ""
    if stats.st_uid not in {ROOT, os.geteuid(), *_owners(owner_of)}:
        return f"it belongs to {_user_name(stats.st_uid)}"
    if stats.st_mode & stat.S_IWOTH and not stats.st_mode & stat.S_ISVTX:
        return "anyone can write to it"
    if group and stats.st_mode & stat.S_IWGRP and not _own_group(stats.st_gid):
        return "a group can write to it"
    return ""


def file_digest(path: Path | str, max_bytes: float = math.inf) -> str:
    """A digest of 16 characters; "" if this is no readable file, or a larger one."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > max_bytes:
            return ""
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except (OSError, ValueError):
        return ""


def private_folder(path: Path) -> Path:
    """Return a folder that only this user owns, created if missing.

    Raises StorageError if it belongs to somebody else or cannot be created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        stats = os.lstat(path)
        if not stat.S_ISDIR(stats.st_mode) or stats.st_uid != os.geteuid():
            raise StorageError(
                f"{path} belongs to {_user_name(stats.st_uid)}, so its content is not trusted. Remove it, or name another folder with TMPDIR."
            )
        if stat.S_IMODE(stats.st_mode) != 0o700:
            os.chmod(path, 0o700)
    except OSError as error:
        raise StorageError(
            f"cannot create the folder {path}: {error.strerror}. Name another folder with TMPDIR."
        ) from error
    return path


def user_cache(name: str, environment: Mapping[str, str]) -> Path:
    """Return flatout's folder ``name`` in the user's cache; without a writable home, below TMPDIR.

    Raises StorageError."""
    try:
        return private_folder(
            Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "flatout", name)
        )
    except StorageError:
        root = environment.get("TMPDIR") or "/tmp"  # tempfile would take the current folder at last
        return private_folder(private_folder(Path(root, f"flatout-{os.geteuid()}")) / name)


def _owners(path: Path | None) -> set[int]:
    try:
        return set() if path is None else {os.stat(path).st_uid}
    except OSError:
        return set()


def _user_name(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"the user {user}"


def _own_group(group: int) -> bool:
    """Return whether this is the user's own group.

    Many systems give each user a private group of the same name."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
