"""The files that a program writes and reads, so that it writes none of them twice, and reads what it read the first time.

Recorded: which files and folders it has made, which it has written to, how the files stood that it read. On its way to a save it does not see what it has made
already, and writes into a folder of ours instead. At the seam its open files are the real ones again: what they were appended after the save is cut off, since
the program will write it again. What it has made after the save goes aside; what it has written anew since may not be read before it is written again.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import sqlite3
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from flatout.capture.bootstrap import AfterImport
from flatout.capture.ledger import Ledger
from flatout.capture.overlay import Overlay
from flatout.capture.shelter import Shelter
from flatout.replay.kept import Kept, end_of, how_it_stands, put_aside
from flatout.replay.listings import Listings
from flatout.replay.tape import Tape

READS = 4096  # files that are remembered


class Files:
    """``folder``: where a list of what was made lies, and the files of a replay. ``refuse`` does not return. ``found`` is told of a file
    that the program has looked for before it trained, and saves to: it knows how to resume."""

    def __init__(self, folder: Path, tape: Tape, refuse: Callable[[str], NoReturn], found: Callable[[str], None]) -> None:
        self.folder, self.tape, self.refuse, self.found = folder, tape, refuse, found
        self.list = Path(f"{folder}.made")
        self.overlay = Overlay(str(folder))
        self.made: list[str] = []
        self.written: dict[str, str] = {}  # path -> how it was opened last
        self.reads: dict[str, list[list[int]]] = {}  # path -> size, time and how often it was read like that
        self.future: set[str] = set()  # what was written after the save, and may not be read before it is written again
        self.looked: set[str] = set()  # files that it looked for before it began to train
        self.states: set[str] = set()  # what it has written by torch.save
        self._looking = Ledger()
        self._awaited: AfterImport | None = None
        self._played: dict[str, int] = {}
        self._open: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # handle -> path of what is written through it
        self.hollow: set[str] = set()  # saved by torch on the way: in the shelter there is an empty file in their place
        self.kept = Kept(Path(f"{folder}.kept"))
        self._why_not: dict[str, None] = {}
        self._ledger = Ledger()

    # -- both ---------------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        ledger = self._ledger
        ledger.set(builtins, "open", self._opened(builtins.open))
        ledger.set(io, "open", builtins.open)
        ledger.set(os, "mkdir", self._folder_made(os.mkdir))
        for name in ("rename", "replace"):
            ledger.set(os, name, self._renamed(getattr(os, name)))
        for owner in (torch, torch.jit):
            ledger.set(owner, "save", self._saved(owner.save))
        ledger.set(torch, "load", self._loaded(torch.load))
        if (writer := sys.modules.get("safetensors.torch")) is not None:
            self._heard_too(writer)
        elif self._awaited is None:
            self._awaited = AfterImport({"safetensors.torch": self._heard_too})
            sys.meta_path.insert(0, self._awaited)
        pickle: Any = sys.modules["pickle"]  # torch has imported it and the next; that it writes is heard, nothing is read with it
        started: Any = sys.modules["subprocess"]
        ledger.set(pickle, "dump", self._dumped(pickle.dump))
        ledger.set(started.Popen, "__init__", self._reaches_out(started.Popen.__init__, "it starts other programs while it trains"))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            ledger.set(numpy.memmap, "__new__", self._mapped(numpy.memmap.__new__))
        ledger.set(os, "system", self._reaches_out(os.system, "it starts other programs while it trains"))
        ledger.set(sqlite3, "connect", self._reaches_out(sqlite3.connect, "it keeps a database", always=True))

    def _heard_too(self, writer: Any) -> None:
        for name in ("save_file", "save_model"):
            self._ledger.set(writer, name, self._saved(getattr(writer, name)))

    def looks(self) -> None:
        """Until the training begins: which files it looks for."""
        self._looking.set(os, "stat", self._looked_for(os.stat))

    def begins(self) -> None:
        self._looking.restore()

    def _looked_for(self, really: Callable) -> Callable:
        @wraps(really)
        def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
            key = None if kwargs or isinstance(path, int) else self._hears(path)
            if key is not None and len(self.looked) < READS:
                self.looked.add(key)
            return really(path, *args, **kwargs)

        return stat

    def _hears(self, path: Any) -> str | None:
        """The one name of a file of the program's; None for what is nobody's business."""
        if not self.tape.hears or self.overlay.busy or self.overlay.is_outside(path) or is_library(path):
            return None
        return self.overlay.key(path)

    def _opened(self, really: Callable) -> Callable:
        @wraps(really)
        def open_heard(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            key = self._hears(file)
            if key is None:
                return really(file, mode, *args, **kwargs)
            if set(str(mode)) & set("wax+"):
                self._writes(key, str(mode))
                if "r" in str(mode):
                    self._why_not["it changes parts of a file"] = None
                handle = really(file, mode, *args, **kwargs)
                self._open[handle] = key
                return handle
            self._read(key)
            return really(file, mode, *args, **kwargs)

        return open_heard

    def _reaches_out(self, really: Callable, why: str, always: bool = False) -> Callable:
        """``always``: also before the training begins."""
        @wraps(really)
        def reach(*args: Any, **kwargs: Any) -> Any:
            if self.tape.hears and (self.tape.steps or always):
                self._why_not[why] = None
            return really(*args, **kwargs)

        return reach

    def _mapped(self, really: Callable) -> Callable:
        @wraps(really)
        def mapped(kind: Any, filename: Any, dtype: Any = "uint8", mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            if self.tape.hears and mode not in ("r", "c", "readonly", "copyonwrite"):
                self._why_not["it changes parts of a file"] = None
            return really(kind, filename, dtype, mode, *args, **kwargs)

        return mapped

    def unsound(self) -> list[str]:
        """Why what the program does outside of itself could not be gone on with."""
        return list(self._why_not)

    def _dumped(self, really: Callable) -> Callable:
        """A file that is written on the way is thrown away."""
        @wraps(really)
        def dump(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            if not (self.tape.going and self.tape.hears and file in self._open):
                really(obj, file, *args, **kwargs)

        return dump

    def _folder_made(self, really: Callable) -> Callable:
        @wraps(really)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            key = self._hears(path) if kwargs.get("dir_fd") is None else None
            really(path, *args, **kwargs)
            if key is not None:
                self._makes(key)

        return mkdir

    def _renamed(self, really: Callable) -> Callable:
        @wraps(really)
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            key = self._hears(dst)
            if key is not None:
                self._writes(key, "w")
                if self.overlay.key(src) in self.states:
                    self._saves(key)
            really(src, dst, **kwargs)

        return rename

    def _saved(self, really: Callable) -> Callable:
        @wraps(really)
        def save(*args: Any, **kwargs: Any) -> Any:
            f = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            key = self._hears(f) if isinstance(f, (str, os.PathLike)) else None
            if key is not None:
                self._writes(key, "w")
                self._saves(key)
            if self.tape.going and self.tape.hears:
                return self._as_if_saved(key)
            return really(*args, **kwargs)

        return save

    def _saves(self, key: str) -> None:
        self.states.add(key)
        if key in self.looked:
            self.found(key)

    def _loaded(self, really: Callable) -> Callable:
        @wraps(really)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._hears(f) if isinstance(f, (str, os.PathLike)) else None
            if key is not None:
                self._read(key)
                if not self.tape.steps and key not in self.written:
                    self.looked.add(key)
            with self.tape.unheard:
                if key in self.hollow:
                    with self.overlay.looking():
                        return really(key, *args, **kwargs)
                return really(f, *args, **kwargs)

        return load

    def _writes(self, key: str, mode: str) -> None:
        if key in self.future and "a" in mode:
            self.refuse(f"the program adds to {os.path.relpath(key)}, which it had written anew after the save that it goes on from")
        self.written[key] = mode
        self.future.discard(key)
        self.hollow.discard(key)
        with self.overlay.looking():
            there = os.path.lexists(key)
            if there and not self.tape.going and "w" in mode and key in self.kept.names and key not in self._open_now():
                os.unlink(key)  # what was in it at the last save has another name
        if not there and not self.tape.going:
            self._makes(key)

    def _open_now(self) -> set[str]:
        return {key for handle, key in list(self._open.items()) if not handle.closed}

    def _makes(self, key: str) -> None:
        if key not in self.made:
            self.made.append(key)
            if not self.tape.going:
                with self.overlay.looking(), open(self.list, "a", encoding="utf-8") as file:
                    file.write(json.dumps(key) + "\n")

    def _read(self, key: str) -> None:
        if self.tape.going and self.overlay.moved.get(key, "") is None:
            return  # it is not there yet
        with self.overlay.looking():
            stands = how_it_stands(key)
        if self.tape.going:
            self._read_again(key, stands)
            return
        if key in self.future:
            self.refuse(f"the program reads {os.path.relpath(key)}, which it had written after the save that it goes on from")
        known = self.reads.get(key)
        if known and known[-1][:2] == stands:
            known[-1][2] += 1
        elif known is not None or len(self.reads) < READS:
            self.reads.setdefault(key, []).append([*stands, 1])

    # -- a save -------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Between two steps. What lies in the program's own buffers is written out, so that the length of a file is its length."""
        for handle in list(self._open):
            if not handle.closed:
                handle.flush()
        open_now = self._open_now()
        with self.overlay.looking():
            self.kept.keep(key for key, mode in self.written.items() if set(mode) & set("wa") and key not in open_now)
            written = {key: [mode, key in open_now, end_of(key), *how_it_stands(key)] for key, mode in self.written.items()}
        return {"made": list(self.made), "looked": sorted(self.looked), "reads": {key: [list(each) for each in reads] for key, reads in self.reads.items()},
                "written": written, "kept": dict(self.kept.names)}

    def ended(self) -> None:
        """Nobody goes on from here."""
        self._ledger.restore()
        self.list.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.kept.ended()

    # -- playing back -------------------------------------------------------------------------------------------------------

    def play(self, state: dict[str, Any]) -> None:
        """Nothing that the program has made is seen, until it makes it again."""
        self.reads = state["reads"]
        shutil.rmtree(self.folder, ignore_errors=True)
        shelter = Shelter(str(self.folder), self._ledger)
        shelter.overlay = self.overlay
        for key in self._all_made():
            self.overlay._note(key, None)
        shelter.install(torch)
        Listings(self.overlay).install(self._ledger)

    def _all_made(self) -> list[str]:
        try:
            return [json.loads(line) for line in self.list.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return []

    def _as_if_saved(self, key: str | None) -> None:
        """What is on the disk is what the program has written, or what it wrote later; on the way it may be moved and removed like any file."""
        if key is not None:
            target = self.overlay.writing(key, "w")
            with self.overlay.looking(), open(target, "wb"):
                self.hollow.add(key)

    def _read_again(self, key: str, stands: list[int]) -> None:
        if self.overlay.moved.get(key) is not None and key not in self.hollow:
            return  # it reads what it has written on this way
        number, reads = self._played.get(key, 0), self.reads.get(key, [])
        self._played[key] = number + 1
        for *stood, times in reads:
            if number < times:
                if stood != stands:
                    self.refuse(f"{os.path.relpath(key)} has changed since the program read it")
                return
            number -= times

    def come_out(self) -> None:
        """Paths lead to the real files again."""
        self._ledger.restore()

    def go_on(self, state: dict[str, Any]) -> None:
        """The real files take the place of those that were written on the way."""
        handles = [handle for handle in self._open if not handle.closed]
        aside = Path(f"{self.folder}.after")
        made, all_made = state["made"], self._all_made()
        for key in reversed([key for key in all_made if key not in set(made)]):
            put_aside(key, aside)
        self.list.write_text("".join(json.dumps(key) + "\n" for key in made), encoding="utf-8")
        self.future |= {key for key, stood in state["written"].items() if not self.kept.stands_again(key, state["kept"].get(key), *stood)}
        self.kept.goes_on(state["kept"])
        for handle in handles:
            self._becomes_real(handle, state["written"])
        self.looked = set(state["looked"])
        self.made, self.written = list(made), {key: told[0] for key, told in state["written"].items()}
        self.overlay = Overlay(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.install()

    def _becomes_real(self, handle: Any, written: dict[str, Any]) -> None:
        target = os.path.realpath(handle.name)
        key = next((key for key, lies in self.overlay.moved.items() if lies is not None and os.path.realpath(lies) == target), None)
        if key is None or key not in written:
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
            self.refuse(f"{os.path.relpath(key)} cannot be opened any more: {error.strerror}")


def is_library(path: Any) -> bool:
    text = os.fsdecode(os.fspath(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return text.startswith((sys.prefix, sys.base_prefix)) or "__pycache__" in text or "/site-packages/" in text or "/.flatout/" in text
