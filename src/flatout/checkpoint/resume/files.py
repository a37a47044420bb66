"""Tracks the files of a script, so that it writes nothing twice and reads the same content again.

While recording, it notes three things: the files and folders that the script creates, the files that it
writes, and the size and time of the files that it reads. During a replay the script does not see its own
earlier files, and its writes go into a folder of flatout. At the resume point its open files become the real
ones. What they got after the checkpoint is cut off, since the script writes it again. Files created after the
checkpoint are moved away. A file that was rewritten or removed after the checkpoint must not be read before the
script writes it again.
"""

import builtins
import io
import json
import os
import shutil
import sqlite3
import sys
import weakref
import zlib
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from flatout.agent.bootstrap import AfterImport
from flatout.agent.file_sandbox import FileSandbox
from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay
from flatout.checkpoint.resume.value_log import ValueLog

Function = Callable[..., Any]
MAX_READ_FILES = 4096  # files
END_BYTES = 1 << 12
WHY_IN_PLACE, WHY_PROGRAMS = "it modifies part of a file in place", "it starts other programs during training"


class Files:
    """Tracks files while recording and redirects them during a replay.

    ``folder``: holds the list of created files, and the files of a replay. ``refuse`` does not return.
    ``on_own_checkpoint`` is called with a file that the script looks for before training and saves tensors to."""

    def __init__(
        self,
        folder: Path,
        value_log: ValueLog,
        refuse: Callable[[str], NoReturn],
        on_own_checkpoint: Callable[[str], None],
    ) -> None:
        self.folder, self.value_log, self.refuse = folder, value_log, refuse
        self.on_own_checkpoint = on_own_checkpoint
        self.created_list = Path(f"{folder}.made")
        self.overlay = Overlay(str(folder))
        self.created: list[str] = []
        self.written: dict[str, str] = {}  # path -> mode of the last open
        self.reads: dict[str, list[int]] = {}  # path -> size and time when it was first read
        # rewritten or removed after the checkpoint: not to be read before it is written again
        self.stale_paths: set[str] = set()
        self.checked_paths: set[str] = set()  # by the script, before training
        self.saved: set[str] = set()  # files with tensors
        self._check_hooks = Ledger()
        self._import_hook: AfterImport | None = None
        # handle -> path of the written file
        self._open: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._why_not: dict[str, None] = {}
        self._ledger = Ledger()

    def install(self) -> None:
        ledger = self._ledger
        ledger.set(builtins, "open", self._wrap_open(builtins.open))
        ledger.set(io, "open", builtins.open)
        ledger.set(os, "mkdir", self._wrap_mkdir(os.mkdir))
        for name in ("rename", "replace"):
            ledger.set(os, name, self._wrap_rename(getattr(os, name)))
        for owner in (torch, torch.jit):
            ledger.set(owner, "save", self._wrap_save(owner.save))
        ledger.set(torch, "load", self._wrap_load(torch.load))
        if (writer := sys.modules.get("safetensors.torch")) is not None:
            self._observe_safetensors(writer)
        elif self._import_hook is None:
            self._import_hook = AfterImport({"safetensors.torch": self._observe_safetensors})
            sys.meta_path.insert(0, self._import_hook)
        popen, numpy = sys.modules["subprocess"].Popen, sys.modules.get("numpy")  # torch imports subprocess
        starts_program = partial(
            self._wrap_unsupported, WHY_PROGRAMS, lambda *_, **__: self.value_log.steps > 0
        )
        ledger.set(popen, "__init__", starts_program(popen.__init__))
        ledger.set(os, "system", starts_program(os.system))
        ledger.set(
            sqlite3,
            "connect",
            self._wrap_unsupported("it uses an SQLite database", lambda *_, **__: True, sqlite3.connect),
        )
        if numpy is not None:
            ledger.set(
                numpy.memmap,
                "__new__",
                self._wrap_unsupported(WHY_IN_PLACE, _maps_to_write, numpy.memmap.__new__),
            )

    def _observe_safetensors(self, writer: object) -> None:
        for name in ("save_file", "save_model"):
            self._ledger.set(writer, name, self._wrap_save(getattr(writer, name)))

    def observe_checks(self) -> None:
        """Observe which files the script looks for until training starts."""
        self._check_hooks.set(os, "stat", self._wrap_stat(os.stat))

    def stop_observing_checks(self) -> None:
        self._check_hooks.restore()

    # -- recording and replaying

    def _wrap_stat(self, original: Function) -> Function:
        @wraps(original)
        def stat(path: object, *args: object, **kwargs: object) -> Any:
            key = None if kwargs or isinstance(path, int) else self._observes(path)
            if key is not None and len(self.checked_paths) < MAX_READ_FILES:
                self.checked_paths.add(key)
            return original(path, *args, **kwargs)

        return stat

    def _note_saved(self, key: str) -> None:
        self.saved.add(key)
        if key in self.checked_paths:
            self.on_own_checkpoint(key)

    def _observes(self, path: object) -> str | None:
        if (
            not self.value_log.observes
            or self.overlay.bypassed
            or self.overlay.excludes_path(path)
            or is_library(path)
        ):
            return None
        return self.overlay.key(path)

    def _wrap_unsupported(self, why: str, applies: Callable[..., bool], original: Function) -> Function:
        @wraps(original)
        def unsupported(*args: object, **kwargs: object) -> Any:
            if self.value_log.observes and applies(*args, **kwargs):
                self._why_not[why] = None
            return original(*args, **kwargs)

        return unsupported

    def why_inexact(self) -> list[str]:
        """Return why the script's effects outside the process prevent an exact resume."""
        return list(self._why_not)

    def _wrap_open(self, original: Function) -> Function:
        @wraps(original)
        def hooked_open(file: object, mode: object = "r", *args: object, **kwargs: object) -> Any:
            key = self._observes(file)
            if key is None:
                return original(file, mode, *args, **kwargs)
            if set(str(mode)) & set("wax+"):
                self._on_write(key, str(mode))
                if "r" in str(mode):
                    self._why_not[WHY_IN_PLACE] = None
                handle = original(file, mode, *args, **kwargs)
                self._open[handle] = key
                return handle
            self._on_read(key)
            return original(file, mode, *args, **kwargs)

        return hooked_open

    def _wrap_mkdir(self, original: Function) -> Function:
        @wraps(original)
        def mkdir(path: object, *args: object, **kwargs: object) -> None:
            key = self._observes(path) if kwargs.get("dir_fd") is None else None
            original(path, *args, **kwargs)
            if key is not None:
                self._on_create(key)

        return mkdir

    def _wrap_rename(self, original: Function) -> Function:
        @wraps(original)
        def rename(src: object, dst: object, **kwargs: object) -> None:
            key = self._observes(dst)
            if key is not None:
                self._on_write(key, "w")
                if self.overlay.key(src) in self.saved:
                    self._note_saved(key)
            original(src, dst, **kwargs)

        return rename

    def _wrap_save(self, original: Function) -> Function:
        """Wrap a function that saves tensors. During a replay it leaves an empty file in the sandbox.

        The real content is on the disk already. The empty file can be moved and removed like any other."""

        @wraps(original)
        def save(*args: object, **kwargs: object) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            key = self._observes(file) if isinstance(file, (str, os.PathLike)) else None
            if key is not None:
                self._on_write(key, "w")
                self._note_saved(key)
            if not (self.value_log.replaying and self.value_log.observes):
                return original(*args, **kwargs)
            if key is not None:
                target = self.overlay.path_to_write(key, os.O_CREAT | os.O_TRUNC)
                with self.overlay.bypass(), open(target, "wb"):
                    pass
            return None

        return save

    def _wrap_load(self, original: Function) -> Function:
        @wraps(original)
        def load(f: object, *args: object, **kwargs: object) -> Any:
            key = self._observes(f) if isinstance(f, (str, os.PathLike)) else None
            if key is not None:
                self._on_read(key)
                if not self.value_log.steps and key not in self.written:
                    self.checked_paths.add(key)
                if self.value_log.replaying and self.overlay.in_upper(key) and not os.path.getsize(key):
                    self.refuse(
                        f"the script loads {os.path.relpath(key)}, which it saved before the checkpoint"
                    )
            with self.value_log.unrecorded:
                return original(f, *args, **kwargs)

        return load

    def _on_write(self, key: str, mode: str) -> None:
        if key in self.stale_paths and "a" in mode:
            self.refuse(
                f"the script appends to {os.path.relpath(key)}, which it rewrote after the checkpoint"
            )
        self.written[key] = mode
        self.stale_paths.discard(key)
        with self.overlay.bypass():
            exists = os.path.lexists(key)
        if not exists and not self.value_log.replaying:
            self._on_create(key)

    def _on_create(self, key: str) -> None:
        if key not in self.created:
            self.created.append(key)
            if not self.value_log.replaying:
                with self.overlay.bypass(), open(self.created_list, "a", encoding="utf-8") as file:
                    file.write(json.dumps(key) + "\n")

    def _on_read(self, key: str) -> None:
        if self.value_log.replaying and self.overlay.hides(key):
            return  # does not exist yet
        with self.overlay.bypass():
            present = size_and_time(key)
        if self.value_log.replaying:
            if not self.overlay.in_upper(key) and self.reads.get(key, present) != present:
                self.refuse(f"{os.path.relpath(key)} has changed since the script read it")
        elif key in self.stale_paths:
            self.refuse(f"the script reads {os.path.relpath(key)}, which it wrote after the checkpoint")
        elif (
            key not in self.written
            and (key in self.reads or len(self.reads) < MAX_READ_FILES)
            and self.reads.setdefault(key, present) != present
        ):
            self._why_not[f"{os.path.relpath(key)} changed while the script ran"] = None

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Return the file state between two steps.

        Buffers are flushed first, so that each file has its full size."""
        for handle in list(self._open):
            if not handle.closed:
                handle.flush()
        open_now = {key for handle, key in list(self._open.items()) if not handle.closed}
        with self.overlay.bypass():
            written = {
                key: [mode, key in open_now, end_of(key), *size_and_time(key)]
                for key, mode in self.written.items()
            }
        return {
            "created": list(self.created),
            "checked_paths": sorted(self.checked_paths),
            "reads": dict(self.reads),
            "written": written,
        }

    def delete(self) -> None:
        """Delete everything: the script has finished and nothing resumes from here."""
        self._ledger.restore()
        self.created_list.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- replaying

    def replay(self, state: dict[str, Any]) -> None:
        """Hide everything that the script has created, until it creates it again."""
        self.reads = state["reads"]
        shutil.rmtree(self.folder, ignore_errors=True)
        for key in self._listed_files():
            self.overlay.hide(key)
        FileSandbox(self.overlay, self._ledger).install()

    def _listed_files(self) -> list[str]:
        try:
            return [json.loads(line) for line in self.created_list.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return []

    def leave_sandbox(self) -> None:
        """Resolve paths to the real files again."""
        self._ledger.restore()

    def resume(self, state: dict[str, Any]) -> None:
        """Replace the files of the replay by the real ones."""
        handles = [handle for handle in self._open if not handle.closed]
        created, written, aside = state["created"], state["written"], Path(f"{self.folder}.after")
        for key in reversed([key for key in self._listed_files() if key not in set(created)]):
            _move_aside(key, aside)
        self.created_list.write_text("".join(json.dumps(key) + "\n" for key in created), encoding="utf-8")
        self.stale_paths |= {
            key for key, before in written.items() if not _restore_content(key, aside, *before)
        }
        for handle in handles:
            self._reopen(handle, written)
        self.checked_paths = set(state["checked_paths"])
        self.created, self.written = list(created), {key: before[0] for key, before in written.items()}
        self.overlay = Overlay(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.install()

    def _reopen(self, handle: Any, written: dict[str, Any]) -> None:
        key = self.overlay.path_of(handle.fileno())
        if not self.overlay.in_upper(key):
            return
        if key not in written:
            self.refuse(
                f"the script has {os.path.relpath(key)} open, which it did not write in the first run"
            )
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


def is_library(path: object) -> bool:
    text = os.fsdecode(os.fspath(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return (
        text.startswith((sys.prefix, sys.base_prefix))
        or "__pycache__" in text
        or "/site-packages/" in text
        or "/.flatout/" in text
    )


def _maps_to_write(
    kind: object, filename: object, dtype: object = "", mode: object = "r+", *shape: object, **options: object
) -> bool:
    return mode not in ("r", "c", "readonly", "copyonwrite")


def size_and_time(path: str) -> list[int]:
    """Size in bytes and modification time in ns; -1 for a missing file."""
    try:
        status = os.stat(path)
    except OSError:
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def end_of(path: str, size: int | None = None) -> int:
    """Return a digest of the last bytes of a file, or of its first ``size`` bytes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            file.seek(max(0, size - END_BYTES))
            return zlib.crc32(file.read(min(size, END_BYTES)))
    except OSError:
        return 0


def _restore_content(
    path: str, aside: Path, mode: str, was_open: bool, end: int, size: int, time_ns: int
) -> bool:
    """Cut off what was appended to a file after a checkpoint; return whether it has its content of then.

    ``end``: the value of `end_of` at the checkpoint. A file that was removed since is made again, without content,
    so that the script can remove it again."""
    present = size_and_time(path)
    if present == [size, time_ns]:
        return True
    if size < 0:
        _move_aside(path, aside)
        return True
    if present[0] < 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab"):
            return False
    if not (was_open or "a" in mode) or not present[0] >= size >= 0 or end_of(path, size) != end:
        return False
    os.truncate(path, size)
    return True


def _move_aside(path: str, folder: Path) -> None:
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        elif os.path.lexists(path):
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(path, folder / f"{len(os.listdir(folder))}-{os.path.basename(path)}")
    except OSError:
        pass  # keep what cannot be moved
