"""Redirects file writes of a script that runs as several ranks.

Rank 0 writes the real files. Other ranks write to private copies and read them back from there. So every rank
saves, moves, removes and loads as the script says, and the user finds the files that one process would have
left. Folders are shared: the first rank creates them. Other ranks, which just found them missing, get a
success, too.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

from flatout.agent.file_sandbox import FileSandbox
from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay
from flatout.job.rank_environment import RankEnvironment
from flatout.job.temporary import owner
from flatout.job.trust import private_folder

FOLDER_TIMEOUT_S = 0.5  # wait for the rank that made a folder to note it


class SharedFolders:
    """Records which rank made which folder, with one file per folder in the launch folder."""

    def __init__(self, launch: str, rank: int) -> None:
        self.records, self.rank = os.path.join(launch, "folders"), rank

    def make(self, original: Callable[..., Any], path: Any, *args: object, **kwargs: object) -> None:
        """Call ``os.mkdir``, which succeeds if another rank has just made this folder."""
        if kwargs.get("dir_fd") is not None:
            original(path, *args, **kwargs)
            return
        name = hashlib.sha256(os.path.realpath(os.fsencode(path))).hexdigest()
        try:
            original(path, *args, **kwargs)
        except FileExistsError:
            if not os.path.isdir(path) or not self._made_by_another(original, name):
                raise
        self._record(original, name)

    def _record(self, original: Callable[..., Any], name: str) -> None:
        try:
            original(self.records)
        except FileExistsError:
            pass
        os.close(os.open(os.path.join(self.records, f"{name}.{self.rank}"), os.O_CREAT | os.O_WRONLY, 0o600))

    def _made_by_another(self, original: Callable[..., Any], name: str) -> bool:
        event, own_record = threading.Event(), f"{name}.{self.rank}"
        for _ in range(50):
            try:
                records = [record for record in os.listdir(self.records) if record.startswith(name)]
            except FileNotFoundError:
                records = []
            if own_record in records:
                return False
            if records:
                return True
            event.wait(FOLDER_TIMEOUT_S / 50)
        return False


class RankFileSandbox(FileSandbox):
    """File sandbox for every rank except 0: its changes are invisible to others, except for folders."""

    def __init__(self, launch: str, rank: int, ledger: Ledger) -> None:
        super().__init__(Overlay(os.path.join(launch, f"rank{rank}.files"), (launch,)), ledger)
        self.folders = SharedFolders(launch, rank)

    def _create(self, original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        key, real = self.overlay.find(path, False, dir_fd)
        if original.__name__ != "mkdir" or self.overlay.excludes(key) or self.overlay.hides(key):
            super()._create(original, path, *args, dir_fd=dir_fd, **kwargs)
        else:
            self.folders.make(original, real, *args, **kwargs)
            self.overlay.record()


def launch_folder(rank_env: RankEnvironment) -> str:
    """Return the private folder that the ranks of a launch share on this machine.

    The launcher has created it, or has only named the rendezvous.
    """
    folder = os.environ.get("FLATOUT_LAUNCH")
    if folder:
        return folder
    # Anyone can guess the name, so a folder that belongs to another user is rejected.
    name = f"flatout-ranks-{hashlib.sha256(rank_env.rendezvous.encode()).hexdigest()[:16]}"
    folder = str(private_folder(Path(tempfile.gettempdir()) / name))
    private_folder(Path(folder, f"flatout-rank-{owner()}-{rank_env.rank}"))  # shows who uses it
    atexit.register(shutil.rmtree, os.path.join(folder, f"rank{rank_env.rank}.files"), ignore_errors=True)
    return folder


RealFiles = Callable[[], AbstractContextManager[None]]  # inside, files are the user's, in every rank


def redirect_files(launch: str, rank: int, ledger: Ledger) -> RealFiles:
    """Redirect the files of a rank from here on; ``launch`` is the launch folder."""
    if rank:
        temporary = os.path.join(launch, f"rank{rank}.files", "tmp")
        os.makedirs(temporary, exist_ok=True)
        ledger.set_item(os.environ, "TMPDIR", temporary)
        ledger.set(tempfile, "tempdir", temporary)
        sandbox = RankFileSandbox(launch, rank, ledger)
        sandbox.install()
        return sandbox.overlay.bypass
    folders, original = SharedFolders(launch, rank), os.mkdir

    @wraps(original)
    def make(path: object, *args: object, **kwargs: object) -> None:
        folders.make(original, path, *args, **kwargs)

    ledger.set(os, "mkdir", make)
    return nullcontext
