"""Interrupted checkpoints:

SIGKILL at each call that changes the disk, and a power loss after each of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
from pathlib import Path

CALLS = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "fchmod",
    "chmod",
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
)
BEFORE, MIDDLE, AFTER, REFUSED = "before", "in the middle", "after", "refused"


class Calls:
    """Replaces the calls of ``os`` that change the disk in this process, and reports each to ``observed``
    before and after.
    """

    def __init__(self, observed):
        self.observed, self.really = observed, {name: getattr(os, name) for name in CALLS}

    def __enter__(self):
        for name in CALLS:
            setattr(os, name, self._standing_in(name))
        return self

    def __exit__(self, *what):
        for name, really in self.really.items():
            setattr(os, name, really)

    def _standing_in(self, name):
        really = self.really[name]

        def call(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return really(*args, **kwargs)
            self.observed(BEFORE, name, args, kwargs)
            try:
                found = really(*args, **kwargs)
            except OSError:
                self.observed(REFUSED, name, args, kwargs)
                raise
            self.observed(AFTER, name, args, kwargs, found)
            return found

        return call


def in_a_child(act):
    """The end of a child that runs this: 0, 1 where it raised, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def points(act):
    """The calls that ``act`` makes; this runs it."""
    found = []

    def observed(when, name, *rest):
        if when == BEFORE:
            found.append(name)

    with Calls(observed):
        act()
    return found


def killed_at(number, when, act):
    """Run ``act`` in a child that is killed at its call ``number``; in the middle of a write, half of the
    bytes are written.
    """
    count = -1

    def observed(moment, name, args, kwargs, *found):
        nonlocal count
        if moment == BEFORE:
            count += 1
            if count == number and when == MIDDLE and name == "write":
                calls.really["write"](args[0], args[1][: len(args[1]) // 2])
        if count == number and (moment == when or (moment, when) in ((BEFORE, MIDDLE), (REFUSED, AFTER))):
            os.kill(os.getpid(), signal.SIGKILL)

    calls = Calls(observed)

    def child():
        with calls:
            act()

    return in_a_child(child)


# -- power loss


class Node:
    """A file or a folder.

    ``entries`` and ``data`` are as the program sees them; ``flushed`` is certain to be on the disk.
    """

    def __init__(self, folder):
        self.folder = folder
        self.data = bytearray()
        self.entries: dict[str, Node] = {}
        self.flushed: bytes | None = None
        self.flushed_entries: dict[str, Node] = {}
        self.pending: list[tuple[str, Node | None]] = []  # of this folder's names, since it was flushed


class Disk:
    """Everything below ``root`` during a recorded run, and the states that a power loss may leave.

    It starts with the contents of ``like``.
    """

    def __init__(self, root, like=None):
        self.root, self.top = root, self._read(like or root)
        self.handles: dict[int, Node] = {}
        self.observed: list[tuple[str, tuple, dict, object]] = []

    def _read(self, path):
        node = Node(path.is_dir())
        if node.folder:
            node.entries = {child.name: self._read(child) for child in path.iterdir()}
            node.flushed_entries = dict(node.entries)
        else:
            node.data = bytearray(path.read_bytes())
            node.flushed = bytes(node.data)
        return node

    # -- recording

    def record(self, act):
        def observed(when, name, args, kwargs, *found):
            if when != AFTER:
                return
            if name in ("write", "pwrite"):
                args = (args[0], bytes(args[1][: found[0]]), *args[2:])
            where = (
                os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}") if kwargs.get("dir_fd") is not None else None
            )
            folder = None
            if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):
                folder = os.readlink(f"/proc/self/fd/{args[0]}")
            self.observed.append((name, args, {"where": where, "folder": folder}, found[0]))

        with Calls(observed):
            act()

    # -- replaying

    def after(self, count):
        """The disk after the first ``count`` recorded calls."""
        for name, args, more, found in self.observed[:count]:
            self._do(name, args, more, found)
        return self

    def _place(self, path, where):
        whole = Path(where, os.fspath(path)) if where else Path(path)
        node = self.top
        parts = whole.relative_to(self.root).parts
        for part in parts[:-1]:
            node = node.entries[part]
        return node, parts[-1] if parts else ""

    def _put(self, folder, name, node):
        if node is None:
            del folder.entries[name]
        else:
            folder.entries[name] = node
        folder.pending.append((name, node))

    def _do(self, name, args, more, found):
        if name in ("open", "mkdir"):
            folder, last = self._place(args[0], more["where"])
            if last not in folder.entries:
                self._put(folder, last, Node(name == "mkdir"))
            if name == "open":
                self.handles[found] = folder.entries[last]
        elif name == "write":
            self.handles[args[0]].data += args[1]
        elif name == "pwrite":
            self.handles[args[0]].data[args[2] : args[2] + len(args[1])] = args[1]
        elif name == "ftruncate":
            del self.handles[args[0]].data[args[1] :]
        elif name == "fsync" and more["folder"]:
            folder, last = self._place(more["folder"], None)
            node = folder.entries[last] if last else folder
            node.flushed_entries, node.pending = dict(node.entries), []
        elif name == "fsync":
            node = self.handles[args[0]]
            node.flushed = bytes(node.data)
        elif name == "rename":
            (source, old), (target, new) = self._place(args[0], None), self._place(args[1], None)
            node = source.entries[old]
            self._put(source, old, None)
            self._put(target, new, node)
        elif name in ("unlink", "rmdir"):
            self._put(*self._place(args[0], more["where"]), None)

    # -- the state after a power loss

    def left(self, chance, how, into):
        """Write the state after the power loss into an empty folder.

        Names that were not flushed may be missing; data that was not flushed is whole, torn, zeros or gone.
        ``how`` keeps "nothing", "everything" or "any" of it. Both halves of a rename in one folder happen
        together, as in every file system.
        """
        self._left(self.top, chance, how, into)

    def _left(self, node, chance, how, into):
        if not node.folder:
            into.write_bytes(self._data_of(node, chance, how))
            return
        into.mkdir(exist_ok=True)
        names = dict(node.flushed_entries)
        at = 0
        while at < len(node.pending):
            together = (
                2
                if at + 1 < len(node.pending)
                and node.pending[at][1] is None
                and node.pending[at + 1][1] is not None
                else 1
            )
            if how == "everything" or (how == "any" and chance.random() < 0.5):
                for name, child in node.pending[at : at + together]:
                    names.pop(name, None) if child is None else names.__setitem__(name, child)
            at += together
        for name, child in names.items():
            self._left(child, chance, how, into / name)

    def _data_of(self, node, chance, how):
        now = bytes(node.data)
        if node.flushed == now or how == "everything":
            return now
        before = node.flushed if node.flushed is not None else b""
        if how == "nothing":
            return before
        upto = chance.randrange(len(now) + 1)
        return chance.choice((now, before, now[:upto], now[:upto] + bytes(len(now) - upto)))


def copied(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target
