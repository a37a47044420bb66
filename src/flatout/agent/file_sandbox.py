"""File sandbox of a trial: what the script writes goes into the trial's folder.

The functions with which Python writes, moves, removes and inspects files ask an Overlay first. So the script
reads back what it wrote and does not find what it removed. Three cases are not covered: files that a C
library opens itself (except through ``torch.save`` and ``torch.jit.save``); a reference to ``open`` that a
library took before torch was imported; and folder listings, which show the original content.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay, tidy

LOOKING = ("stat", "lstat", "readlink", "listxattr", "getxattr")
CHANGING = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class FileSandbox:
    def __init__(self, folder: str, ledger: Ledger) -> None:
        self.folder = folder
        self.ledger = ledger
        self.overlay = Overlay(folder)

    def install(self, torch: ModuleType) -> None:
        self._install_open()
        self._install_torch(torch)
        for name in LOOKING:
            self._wrap(
                os,
                name,
                lambda really, path, *args, **kwargs: really(self._seen(path, kwargs), *args, **kwargs),
            )
        self._wrap(os, "access", self._access)
        for name in CHANGING:
            self._wrap(os, name, self._change)
        for name in ("rename", "replace"):
            self._wrap(os, name, self._move)
        for name in ("remove", "unlink"):
            self._wrap(os, name, self._remove)
        self._wrap(os, "mkdir", self._mkdir)
        self._wrap(os, "rmdir", self._rmdir)
        self._wrap(os, "symlink", self._symlink)
        self._wrap(
            os,
            "link",
            lambda really, src, dst, **kwargs: really(
                self.overlay.reading(src), self.overlay.writing(dst, "x"), **kwargs
            ),
        )

    def leave(self) -> None:
        """Remove the empty folders that the script made, and its temporary files."""
        tidy(self.folder)

    def _wrap(self, owner: object, name: str, does: Callable[..., Any]) -> None:
        really = getattr(owner, name, None)
        if really is None:
            return

        @wraps(really)
        def sandboxed(*args: object, **kwargs: object) -> Any:
            if self.overlay.busy or not args:
                return really(*args, **kwargs)
            return does(really, *args, **kwargs)

        self.ledger.set(owner, name, sandboxed)
        # Libraries look these functions up to learn which ones accept a folder descriptor.
        for group in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
            members = getattr(os, group)
            if really in members:
                members.add(sandboxed)
                self.ledger.call(f"os.{group}", partial(members.discard, sandboxed))

    # -- opening --------------------------------------------------------------------------------------------

    def _install_open(self) -> None:
        overlay = self.overlay

        def open_(
            really: Callable[..., Any], file: Any, mode: Any = "r", *args: object, **kwargs: object
        ) -> Any:
            return really(
                overlay.writing(file, mode) if set(str(mode)) & set("wax+") else overlay.reading(file),
                mode,
                *args,
                **kwargs,
            )

        def open_low(
            really: Callable[..., Any], path: object, flags: int, *args: object, **kwargs: object
        ) -> Any:
            if kwargs.get("dir_fd") is not None or not flags & WRITES:
                return really(self._seen(path, kwargs), flags, *args, **kwargs)
            # temporary files are made like this, under a fresh name
            if flags & os.O_CREAT and flags & os.O_EXCL:
                handle = really(path, flags, *args, **kwargs)
                if not overlay.is_outside(path):
                    overlay.create(path)
                return handle
            return really(
                overlay.writing(path, "w" if flags & os.O_TRUNC else "a" if flags & os.O_CREAT else "r+"),
                flags,
                *args,
                **kwargs,
            )

        self._wrap(builtins, "open", open_)
        self.ledger.set(io, "open", builtins.open)
        self._wrap(os, "open", open_low)

    def _install_torch(self, torch: ModuleType) -> None:
        overlay = self.overlay
        for owner in (torch, sys.modules.get("torch.jit")):
            if owner is not None:
                self._wrap(
                    owner,
                    "save",
                    lambda really, obj, f, *args, **kwargs: really(
                        obj, overlay.writing(f, "w"), *args, **kwargs
                    ),
                )
                self._wrap(
                    owner,
                    "load",
                    lambda really, f, *args, **kwargs: really(overlay.reading(f), *args, **kwargs),
                )

    # -- inspecting and changing ----------------------------------------------------------------------------

    def _seen(self, path: object, kwargs: dict[str, Any]) -> Any:
        return path if kwargs.get("dir_fd") is not None else self.overlay.reading(path)

    def _access(self, really: Callable[..., Any], path: object, *args: object, **kwargs: object) -> bool:
        try:
            return bool(really(self._seen(path, kwargs), *args, **kwargs))
        except FileNotFoundError:
            return False

    def _change(self, really: Callable[..., Any], path: object, *args: object, **kwargs: object) -> None:
        where = path if kwargs.get("dir_fd") is not None else self.overlay.changing(path)
        if where is not None:
            really(where, *args, **kwargs)

    # -- moving and removing --------------------------------------------------------------------------------

    def _move(self, really: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> None:
        if not self.overlay.move(_at(src, kwargs.get("src_dir_fd")), _at(dst, kwargs.get("dst_dir_fd"))):
            really(src, dst, **kwargs)

    def _remove(self, really: Callable[..., Any], path: object, *, dir_fd: int | None = None) -> None:
        full = _at(path, dir_fd)
        # A listing still shows what the script removed earlier; with a folder descriptor, the script is
        # walking such a listing.
        if self.overlay.is_outside(full) or not self.overlay.remove(full, quiet=dir_fd is not None):
            really(path, dir_fd=dir_fd)

    def _mkdir(self, really: Callable[..., Any], path: Any, *args: object, **kwargs: Any) -> None:
        full = _at(path, kwargs.get("dir_fd"))
        if not self.overlay.shows_again(full):
            really(path, *args, **kwargs)
            self.overlay.make(full)

    def _rmdir(self, really: Callable[..., Any], path: object, *, dir_fd: int | None = None) -> None:
        full = _at(path, dir_fd)
        if self.overlay.is_outside(full) or not self.overlay.hide_folder(full):
            really(path, dir_fd=dir_fd)

    def _symlink(
        self, really: Callable[..., Any], src: Any, dst: Any, *args: object, **kwargs: object
    ) -> None:
        where = self.overlay.writing(dst, "x")
        if where is not dst:  # the link lies elsewhere, so make its target absolute
            src = self.overlay.reading(
                os.path.join(os.path.dirname(os.path.abspath(os.fsdecode(dst))), os.fsdecode(src))
            )
        really(src, where, *args, **kwargs)


def _at(path: Any, folder: int | None) -> Any:
    """Return the full path of a name below an open folder."""
    return path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
