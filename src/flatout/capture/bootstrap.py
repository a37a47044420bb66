"""Enters a Python process: reads the job, then waits for torch.

The job is a JSON file named by FLATOUT_JOB. Its ``entry`` ("module:function") is called with the job right after
``import torch`` has finished, in every Python process of the program. A process that never imports torch pays only
for the reading of the job.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once, right after a named module has been executed; finds nothing itself."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = callbacks
        self._asks = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in self._callbacks or self._asks:  # another finder of this kind asks the others, too
            return None
        others = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        self._asks = True
        try:
            spec = next((found for found in others if found is not None), None)
        finally:
            self._asks = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        # Called when the module is executed, not here: libraries look for torch's spec long before anybody imports it.
        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            callback = self._callbacks.pop(fullname, None)
            if not self._callbacks and self in sys.meta_path:
                sys.meta_path.remove(self)
            if callback is None:
                return
            try:
                callback(module)
            except Exception as error:
                say(f"could not attach to {fullname} ({type(error).__name__}: {error}); the program runs as it is")

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]  # this loader is the spec's own
        return spec


def say(sentence: str) -> None:
    """A line for the person in front of the program; the only way in which a program under flatout gets one."""
    from flatout.plan.legible import harmless

    sys.stderr.write(f"flatout: {harmless(sentence)}\n")
    sys.stderr.flush()


def say_at_once(sentence: str) -> None:
    """The same past Python's own buffers, whose lock the program may hold where a signal has interrupted it."""
    try:
        os.write(2, f"flatout: {sentence}\n".encode(errors="replace"))
    except OSError:
        pass  # nobody reads it any more


def install(path: str) -> None:
    """Arrange for the job's entry to be called. Raises nothing that a program could notice."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    seed = job.get("seed")
    callbacks: dict[str, Callable[[ModuleType], None]] = {"torch": lambda torch: _call_entry(job, torch)}
    if seed is not None:
        random.seed(seed)
        callbacks["numpy"] = lambda numpy: numpy.random.seed(seed % 2**32)
    sys.meta_path.insert(0, AfterImport(callbacks))
    if job.get("pid") == os.getpid():
        atexit.register(_leave, path, os.getpid())


def _call_entry(job: dict[str, Any], torch: ModuleType) -> None:
    if job.get("seed") is not None:
        torch.manual_seed(job["seed"])
    module, function = job["entry"].split(":")
    getattr(importlib.import_module(module), function)(job)


def speaks_first(path: str) -> bool:
    """Whether this process is the one of a run that tells the person what was applied: the first that asks."""
    return _is_first(f"{path}.told")


def keeps_first(path: str) -> bool:
    """Whether this process is the one of a run whose training is kept: the first that asks, or after its death the next."""
    return _is_first_alive(f"{path}.kept")


def records_first(path: str) -> bool:
    """Whether this process is the one of a run that is gone on with exactly: not one that the program has started."""
    return _is_first_alive(f"{path}.exactly")


def _is_first_alive(claim: str) -> bool:
    return _is_first(claim) or (_is_of_the_dead(claim) and _is_first(claim))


def _is_first(claim: str) -> bool:
    try:
        handle = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return False
    try:
        os.write(handle, str(os.getpid()).encode())
    except OSError:
        pass  # a disk that is full; then it stays first
    os.close(handle)
    return True


def _is_of_the_dead(claim: str) -> bool:
    """Whether who made a claim lives no more; then nobody has made it."""
    try:
        with open(claim, encoding="ascii") as file:
            owner = int(file.read())
        if os.path.exists(f"/proc/{owner}") or not os.path.isdir("/proc/self"):
            return False
        os.unlink(claim)
    except (OSError, ValueError):
        return False
    return True


def _leave(path: str, pid: int) -> None:
    """The end of a run's first process: says so where nothing could act, and removes the job, which is of no more use."""
    if pid != os.getpid():
        return
    if speaks_first(path):
        never = "finished a training step" if "torch" in sys.modules else "imported torch"
        say(f"nothing was applied: this program never {never}")
    folder, name = os.path.split(path)
    try:
        for each in os.listdir(folder):
            if each.startswith(name):  # the job, and what processes have claimed of it
                os.unlink(os.path.join(folder, each))
        os.rmdir(folder)
    except OSError:
        pass  # somebody has tidied up before, or something else is in it
