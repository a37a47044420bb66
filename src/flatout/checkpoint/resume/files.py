"""Tracks the files of a script, so that it writes nothing twice and reads the same content again.

While recording, it notes three things: the files and folders that the script creates, the files that it
writes, and the size and time of the files that it reads. During a replay the script does not see its own
earlier files, and its writes go into a folder of flatout. At the resume point its open files become the real
ones. What they got after the checkpoint is cut off, since the script writes it again. Files created after the
checkpoint are moved away. A file that was rewritten after the checkpoint must not be read before the script
writes it again.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from flatout.agent.bootstrap import AfterImport
from flatout.agent.overlay import Overlay
from flatout.checkpoint.resume.hard_links import end_of, how_it_stands, put_aside
from flatout.checkpoint.resume.replayed_files import ReplayedFiles

READS = 4096  # maximum number of tracked files


class Files(ReplayedFiles):
    """Tracks files while recording and redirects them during a replay.

    ``folder``: holds the list of created files, and the files of a replay. ``refuse`` does not return.
    ``found`` is called with a file that the script looks for before training and saves to: such a script
    resumes by itself.
    """

    # -- recording and replaying ----------------------------------------------------------------------------

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
            self._observed_too(writer)
        elif self._awaited is None:
            self._awaited = AfterImport({"safetensors.torch": self._observed_too})
            sys.meta_path.insert(0, self._awaited)
        # already imported by torch, like the next; only writes are hooked
        pickle = sys.modules["pickle"]
        started = sys.modules["subprocess"]
        ledger.set(pickle, "dump", self._dumped(pickle.dump))
        ledger.set(
            started.Popen,
            "__init__",
            self._reaches_out(started.Popen.__init__, "it starts other programs during training"),
        )
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            ledger.set(numpy.memmap, "__new__", self._mapped(numpy.memmap.__new__))
        ledger.set(os, "system", self._reaches_out(os.system, "it starts other programs during training"))
        ledger.set(
            sqlite3, "connect", self._reaches_out(sqlite3.connect, "it uses an SQLite database", always=True)
        )

    def _observed_too(self, writer: object) -> None:
        for name in ("save_file", "save_model"):
            self._ledger.set(writer, name, self._saved(getattr(writer, name)))

    def looks(self) -> None:
        """Observe which files the script looks for until training starts."""
        self._looking.set(os, "stat", self._looked_for(os.stat))

    def begins(self) -> None:
        self._looking.restore()

    def _looked_for(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def stat(path: object, *args: object, **kwargs: object) -> Any:
            key = None if kwargs or isinstance(path, int) else self._observes(path)
            if key is not None and len(self.looked) < READS:
                self.looked.add(key)
            return really(path, *args, **kwargs)

        return stat

    def _observes(self, path: object) -> str | None:
        """Return the canonical name of a file of the script; None for a file that is not tracked."""
        if (
            not self.value_log.observes
            or self.overlay.busy
            or self.overlay.is_outside(path)
            or is_library(path)
        ):
            return None
        return self.overlay.key(path)

    def _opened(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def hooked_open(file: object, mode: object = "r", *args: object, **kwargs: object) -> Any:
            key = self._observes(file)
            if key is None:
                return really(file, mode, *args, **kwargs)
            if set(str(mode)) & set("wax+"):
                self._writes(key, str(mode))
                if "r" in str(mode):
                    self._why_not["it modifies part of a file in place"] = None
                handle = really(file, mode, *args, **kwargs)
                self._open[handle] = key
                return handle
            self._read(key)
            return really(file, mode, *args, **kwargs)

        return hooked_open

    def _reaches_out(self, really: Callable[..., Any], why: str, always: bool = False) -> Callable[..., Any]:
        """Wrap a function with effects outside the process. ``always``: also before training."""

        @wraps(really)
        def reach(*args: object, **kwargs: object) -> Any:
            if self.value_log.observes and (self.value_log.steps or always):
                self._why_not[why] = None
            return really(*args, **kwargs)

        return reach

    def _mapped(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def mapped(
            kind: object,
            filename: object,
            dtype: object = "uint8",
            mode: str = "r+",
            *args: object,
            **kwargs: object,
        ) -> Any:
            if self.value_log.observes and mode not in ("r", "c", "readonly", "copyonwrite"):
                self._why_not["it modifies part of a file in place"] = None
            return really(kind, filename, dtype, mode, *args, **kwargs)

        return mapped

    def unsound(self) -> list[str]:
        """Return why the script's effects outside the process prevent an exact resume."""
        return list(self._why_not)

    def _dumped(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Discard files that are written during a replay."""

        @wraps(really)
        def dump(obj: object, file: object, *args: object, **kwargs: object) -> None:
            if not (self.value_log.going and self.value_log.observes and file in self._open):
                really(obj, file, *args, **kwargs)

        return dump

    def _folder_made(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def mkdir(path: object, *args: object, **kwargs: object) -> None:
            key = self._observes(path) if kwargs.get("dir_fd") is None else None
            really(path, *args, **kwargs)
            if key is not None:
                self._makes(key)

        return mkdir

    def _renamed(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def rename(src: object, dst: object, **kwargs: object) -> None:
            key = self._observes(dst)
            if key is not None:
                self._writes(key, "w")
                if self.overlay.key(src) in self.states:
                    self._saves(key)
            really(src, dst, **kwargs)

        return rename

    def _saved(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def save(*args: object, **kwargs: object) -> Any:
            f = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            key = self._observes(f) if isinstance(f, (str, os.PathLike)) else None
            if key is not None:
                self._writes(key, "w")
                self._saves(key)
            if self.value_log.going and self.value_log.observes:
                return self._as_if_saved(key)
            return really(*args, **kwargs)

        return save

    def _saves(self, key: str) -> None:
        self.states.add(key)
        if key in self.looked:
            self.found(key)

    def _loaded(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def load(f: object, *args: object, **kwargs: object) -> Any:
            key = self._observes(f) if isinstance(f, (str, os.PathLike)) else None
            if key is not None:
                self._read(key)
                if not self.value_log.steps and key not in self.written:
                    self.looked.add(key)
            with self.value_log.unheard:
                if key in self.hollow:
                    with self.overlay.looking():
                        return really(key, *args, **kwargs)
                return really(f, *args, **kwargs)

        return load

    def _writes(self, key: str, mode: str) -> None:
        if key in self.future and "a" in mode:
            self.refuse(
                f"the script appends to {os.path.relpath(key)}, which it rewrote after the checkpoint"
            )
        self.written[key] = mode
        self.future.discard(key)
        self.hollow.discard(key)
        with self.overlay.looking():
            there = os.path.lexists(key)
            if (
                there
                and not self.value_log.going
                and "w" in mode
                and key in self.kept.names
                and key not in self._open_now()
            ):
                os.unlink(key)  # a hard link keeps its content of the last checkpoint
        if not there and not self.value_log.going:
            self._makes(key)

    def _open_now(self) -> set[str]:
        return {key for handle, key in list(self._open.items()) if not handle.closed}

    def _makes(self, key: str) -> None:
        if key not in self.made:
            self.made.append(key)
            if not self.value_log.going:
                with self.overlay.looking(), open(self.list, "a", encoding="utf-8") as file:
                    file.write(json.dumps(key) + "\n")

    def _read(self, key: str) -> None:
        if self.value_log.going and self.overlay.hides(key):
            return  # does not exist yet
        with self.overlay.looking():
            stands = how_it_stands(key)
        if self.value_log.going:
            self._read_again(key, stands)
            return
        if key in self.future:
            self.refuse(f"the script reads {os.path.relpath(key)}, which it wrote after the checkpoint")
        known = self.reads.get(key)
        if known and known[-1][:2] == stands:
            known[-1][2] += 1
        elif known is not None or len(self.reads) < READS:
            self.reads.setdefault(key, []).append([*stands, 1])

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the file state between two steps.

        Buffers are flushed first, so that each file has its full size.
        """
        for handle in list(self._open):
            if not handle.closed:
                handle.flush()
        open_now = self._open_now()
        with self.overlay.looking():
            self.kept.keep(
                key for key, mode in self.written.items() if set(mode) & set("wa") and key not in open_now
            )
            written = {
                key: [mode, key in open_now, end_of(key), *how_it_stands(key)]
                for key, mode in self.written.items()
            }
        return {
            "made": list(self.made),
            "looked": sorted(self.looked),
            "reads": {key: [list(each) for each in reads] for key, reads in self.reads.items()},
            "written": written,
            "kept": dict(self.kept.names),
        }

    def ended(self) -> None:
        """Delete everything: the script has finished and nothing resumes from here."""
        self._ledger.restore()
        self.list.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.kept.ended()

    # -- replaying ------------------------------------------------------------------------------------------

    def go_on(self, state: dict[str, Any]) -> None:
        """Replace the files of the replay by the real ones."""
        handles = [handle for handle in self._open if not handle.closed]
        aside = Path(f"{self.folder}.after")
        made, all_made = state["made"], self._all_made()
        for key in reversed([key for key in all_made if key not in set(made)]):
            put_aside(key, aside)
        self.list.write_text("".join(json.dumps(key) + "\n" for key in made), encoding="utf-8")
        self.future |= {
            key
            for key, stood in state["written"].items()
            if not self.kept.stands_again(key, state["kept"].get(key), *stood)
        }
        self.kept.goes_on(state["kept"])
        for handle in handles:
            self._becomes_real(handle, state["written"])
        self.looked = set(state["looked"])
        self.made, self.written = list(made), {key: metadata[0] for key, metadata in state["written"].items()}
        self.overlay = Overlay(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.install()


def is_library(path: object) -> bool:
    text = os.fsdecode(os.fspath(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return (
        text.startswith((sys.prefix, sys.base_prefix))
        or "__pycache__" in text
        or "/site-packages/" in text
        or "/.flatout/" in text
    )
