"""Keeps a trial from leaving anything behind: what the script writes lands in the trial's folder instead.

A file opened for writing is redirected, and read back from there by the same process and its forked children. Folders
that the script makes are noted, and removed again when they stayed empty. Not reached: files that a C library opens by
itself, except through ``torch.save``.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from flatout.capture.ledger import Ledger

SYSTEM = ("/dev/", "/proc/", "/sys/")


class Shelter:
    def __init__(self, folder: str, ledger: Ledger) -> None:
        self.folder = folder
        self.ledger = ledger
        self.moved: dict[str, str] = {}
        self.made: list[str] = []
        self._outside = (*SYSTEM, os.path.join(os.path.realpath(tempfile.gettempdir()), ""), os.path.join(os.path.realpath(folder), ""))

    def install(self, torch: Any) -> None:
        ledger, moved = self.ledger, self.moved
        really_open, really_save, really_load = builtins.open, torch.save, torch.load

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return really_open(self._writing(file, mode) if set(mode) & set("wax+") else self._reading(file), mode, *args, **kwargs)

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            return really_save(obj, self._writing(f, "w"), *args, **kwargs)

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            return really_load(self._reading(f), *args, **kwargs)

        ledger.set(builtins, "open", open_)
        ledger.set(io, "open", open_)
        ledger.set(torch, "save", save)
        ledger.set(torch, "load", load)
        for name in ("exists", "isfile", "getsize"):
            really = getattr(os.path, name)
            ledger.set(os.path, name, lambda path, really=really: really(self._reading(path)))
        self._install_moves()
        self._install_mkdir()
        # Forked children see what was moved before the fork, and move their own files into the same folder.
        self._moved_is_shared = moved

    def _install_moves(self) -> None:
        for name in ("rename", "replace"):
            really = getattr(os, name)

            def move(src: Any, dst: Any, *args: Any, really: Any = really, **kwargs: Any) -> Any:
                if self._reading(src) is src:
                    return really(src, dst, *args, **kwargs)
                target = self._writing(dst, "w")
                result = really(self._reading(src), target, *args, **kwargs)
                self.moved.pop(_key(src), None)
                return result

            self.ledger.set(os, name, move)
        for name in ("remove", "unlink"):
            really = getattr(os, name)

            def remove(path: Any, *args: Any, really: Any = really, **kwargs: Any) -> Any:
                if self._reading(path) is path:
                    return really(path, *args, **kwargs) if self._is_outside(path) else None
                result = really(self._reading(path), *args, **kwargs)
                self.moved.pop(_key(path), None)
                return result

            self.ledger.set(os, name, remove)

    def _install_mkdir(self) -> None:
        really = os.mkdir

        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            really(path, *args, **kwargs)
            if not self._is_outside(path):
                self.made.append(_key(path))

        self.ledger.set(os, "mkdir", mkdir)

    def leave(self) -> None:
        """Remove the folders that the script made and that stayed empty, innermost first."""
        for path in reversed(self.made):
            try:
                os.rmdir(path)
            except OSError:
                pass

    def _is_outside(self, path: Any) -> bool:
        return not isinstance(path, (str, os.PathLike)) or (_key(path) + os.sep).startswith(self._outside)

    def _reading(self, path: Any) -> Any:
        if not self.moved or not isinstance(path, (str, os.PathLike)):
            return path
        return self.moved.get(_key(path), path)

    def _writing(self, path: Any, mode: str) -> Any:
        if self._is_outside(path):
            return path
        key = _key(path)
        if key not in self.moved:
            if not os.path.isdir(os.path.dirname(key)) or os.path.isdir(key):
                return path  # the script's own error is the right one
            if not os.access(os.path.dirname(key), os.W_OK) or ("x" in mode and os.path.exists(key)):
                return path
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            target = os.path.join(self.folder, f"{len(self.moved):04d}-{os.path.basename(key)}")
            if ("a" in mode or "+" in mode) and "w" not in mode and os.path.exists(key):
                shutil.copyfile(key, target)
            elif "r" in mode:
                return path
            self.moved[key] = target
        return self.moved[key]


def _key(path: Any) -> str:
    return os.path.realpath(os.fsdecode(os.fspath(path)))
