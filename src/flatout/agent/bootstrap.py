"""Attaches to a Python process: reads the job, then waits for torch.

The job is a JSON file named by FLATOUT_JOB. Its ``entry`` ("module:function") is called with the job right
after ``import torch`` finishes, in every Python process of the script. A process that never imports torch
only reads the job.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys

TYPE_CHECKING = False  # typing takes 3 ms in every Python process of the program
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any


class AfterImport:
    """Calls back once after a named module has been executed; it finds no modules itself."""

    def __init__(
        self,
        callbacks: dict[str, Callable[[ModuleType], None]],
        report: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._callbacks, self._report = callbacks, report
        self._searching = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        # another finder of this kind queries the others, too
        if fullname not in self._callbacks or self._searching:
            return None
        others = (
            finder.find_spec(fullname, path, target)
            for finder in list(sys.meta_path)
            if finder is not self and hasattr(finder, "find_spec")
        )
        self._searching = True
        try:
            spec = next((candidate for candidate in others if candidate is not None), None)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        # Run this when the module is executed, not here: libraries look up torch's spec long before they
        # import it.
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
                why = f"{type(error).__name__}: {error}"
                self._report(why)
                notify(f"could not attach to {fullname} ({why}); the script runs without flatout")

        # the loader belongs to this spec
        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def notify(sentence: str) -> None:
    """Print a line for the user; all lines of flatout under a running script go through here."""
    from flatout.job.sanitize import sanitize

    show(f"flatout: {sanitize(sentence)}")


def show(text: str) -> None:
    """Print lines that are no sentence, such as a table."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # standard error is closed


def notify_unbuffered(sentence: str) -> None:
    """Print a line without Python's buffers, whose lock the script may hold when a signal interrupts it."""
    try:
        os.write(2, f"flatout: {sentence}\n".encode(errors="replace"))
    except OSError:
        pass  # stderr is closed


def install(path: str, report: Callable[[str], None]) -> None:
    """Arrange the call of the job's entry; ``report`` receives an error of it."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    seed = job.get("seed")
    callbacks: dict[str, Callable[[ModuleType], None]] = {"torch": lambda torch: _call_entry(job, torch)}
    if seed is not None:
        import random

        random.seed(seed)
        callbacks["numpy"] = lambda numpy: numpy.random.seed(seed % 2**32)
    sys.meta_path.insert(0, AfterImport(callbacks, report))
    if job.get("pid") == os.getpid():
        # a run without levers is only counted
        atexit.register(_at_exit, path, os.getpid(), not job["entry"].endswith(":count"))


def _call_entry(job: dict[str, Any], torch: ModuleType) -> None:
    if job.get("seed") is not None:
        torch.manual_seed(job["seed"])
    importlib.import_module("flatout.agent.compiler_import").postpone(torch)
    for entry in (job["entry"], *job.get("checks", ())):
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(job)


def _at_exit(path: str, pid: int, has_levers: bool) -> None:
    """At the end of a run's first process, remove the job. Report if levers were to be applied and none was."""
    if pid != os.getpid():
        return
    from flatout.job.claims import REPORT, claim

    if has_levers and claim(path + REPORT):
        milestone = "finished a training step" if "torch" in sys.modules else "imported torch"
        notify(f"nothing was applied: this program never {milestone}")
    folder, name = os.path.split(path)
    try:
        for entry in os.listdir(folder):
            if entry.startswith(name):  # the job and its claims
                os.unlink(os.path.join(folder, entry))
        os.rmdir(folder)
    except OSError:
        pass  # already removed, or not empty
