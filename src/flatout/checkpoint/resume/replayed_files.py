"""Files during a replay: written ones exist again, read ones are compared."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from flatout.agent.bootstrap import AfterImport
from flatout.agent.file_sandbox import FileSandbox
from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay
from flatout.checkpoint.resume.hard_links import HardLinks
from flatout.checkpoint.resume.value_log import ValueLog


class ReplayedFiles:
    """Replays what a script did with files."""

    def __init__(
        self,
        folder: Path,
        value_log: ValueLog,
        refuse: Callable[[str], NoReturn],
        found: Callable[[str], None],
    ) -> None:
        self.folder, self.value_log, self.refuse, self.found = folder, value_log, refuse, found
        self.list = Path(f"{folder}.made")
        self.overlay = Overlay(str(folder))
        self.made: list[str] = []
        self.written: dict[str, str] = {}  # path -> mode of the last open
        self.reads: dict[str, list[list[int]]] = {}  # path -> size, time and number of reads in this state
        # written after the checkpoint: not to be read before it is written again
        self.future: set[str] = set()
        self.looked: set[str] = set()  # files that the script looked for before training
        self.states: set[str] = set()  # files written by torch.save
        self._looking = Ledger()
        self._awaited: AfterImport | None = None
        self._played: dict[str, int] = {}
        # handle -> path of the written file
        self._open: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # saved by torch during the replay: the sandbox has an empty file instead
        self.hollow: set[str] = set()
        self.kept = HardLinks(Path(f"{folder}.kept"))
        self._why_not: dict[str, None] = {}
        self._ledger = Ledger()

    def play(self, state: dict[str, Any]) -> None:
        """Hide everything that the script has created, until it creates it again."""
        self.reads = state["reads"]
        shutil.rmtree(self.folder, ignore_errors=True)
        for key in self._all_made():
            self.overlay.hide(key)
        FileSandbox(self.overlay, self._ledger).install()

    def _all_made(self) -> list[str]:
        try:
            return [json.loads(line) for line in self.list.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return []

    def _as_if_saved(self, key: str | None) -> None:
        """Put an empty file into the sandbox: the real content is on the disk already.

        During a replay it can be moved and removed like any other file.
        """
        if key is not None:
            target = self.overlay.writing(key, os.O_CREAT | os.O_TRUNC)
            with self.overlay.looking(), open(target, "wb"):
                self.hollow.add(key)

    def _read_again(self, key: str, stands: list[int]) -> None:
        if self.overlay.holds(key) and key not in self.hollow:
            return  # written by this replay itself
        number, reads = self._played.get(key, 0), self.reads.get(key, [])
        self._played[key] = number + 1
        for *stood, times in reads:
            if number < times:
                if stood != stands:
                    self.refuse(f"{os.path.relpath(key)} has changed since the script read it")
                return
            number -= times

    def come_out(self) -> None:
        """Resolve paths to the real files again."""
        self._ledger.restore()

    def _becomes_real(self, handle: Any, written: dict[str, Any]) -> None:
        key = self.overlay.path_of(handle.fileno())
        if not self.overlay.holds(key) or key not in written:
            return
        self._open[handle] = key
        handle.flush()
        flags = os.O_RDWR if "+" in handle.mode else os.O_WRONLY
        try:
            real = os.open(key, flags | os.O_CREAT | (os.O_APPEND if "a" in handle.mode else 0), 0o666)
            os.lseek(real, 0, os.SEEK_END)
            os.dup2(real, handle.fileno())
            os.close(real)
        except OSError as error:
            self.refuse(f"{os.path.relpath(key)} cannot be reopened: {error.strerror}")
