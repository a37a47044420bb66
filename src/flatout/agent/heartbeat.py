"""Writes a heartbeat of the script (`job/heartbeat.py`): a few numbers per step, and on a signal its Python stack.

    steps, backward passes, batches     counted by `agent/step_counters.py`
    torch.save, torch.load              when a checkpoint was saved, and whether the script has resumed from one

It uses no thread and no clock. A request for the stack runs no Python code: faulthandler's handler writes it,
even while C code holds the interpreter. Forked children (loader workers) have their own page and stack.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import AfterImport
from flatout.agent.ledger import Ledger
from flatout.job import heartbeat
from flatout.job.heartbeat import EXITING, HEARTBEATS, NOT_FINITE, RANK, SIGNAL, STACK, STEPS
from flatout.schema.errors import NotFinite

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.agent.step_counters import StepCounters

ON_NAN = "FLATOUT_ON_NAN"
# a real-time signal; threads, debuggers and profilers use the first ones
ASKS_FOR_STACK = 45 if sys.platform == "linux" else 0
FIRST_DESCRIPTOR = 300  # high, so that scripts get small descriptors as usual
LOOK_EVERY = 20  # steps, on a device: reading a value synchronises
_installed: HeartbeatWriter | None = None


class HeartbeatWriter:
    """Writes the heartbeat. ``words`` are the page of this process; a forked child gets its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.counters: StepCounters | None = None
        self._not_finite: Tensor | None = None
        self._observed_losses = 0
        self._begin()

    def install(self) -> None:
        os.register_at_fork(after_in_child=self._begin)
        sys.meta_path.insert(0, AfterImport({"torch": self._torch_is_there}))

    def _begin(self) -> None:
        self.words = words = heartbeat.begin(self.folder).words
        rank = os.environ.get("FLATOUT_RANK") or os.environ.get("RANK") or ""
        words[RANK] = int(rank) + 1 if rank.isdigit() else 0
        if self.counters is not None:
            self.counters.page = words
        try:
            self._can_be_asked()
        except (OSError, ValueError, RuntimeError, AttributeError):
            pass  # no descriptor left: the monitor must use /proc instead

    def _can_be_asked(self) -> None:
        if not ASKS_FOR_STACK or signal.getsignal(ASKS_FOR_STACK) is not signal.SIG_DFL:
            return  # the script handles this signal itself
        path = os.path.join(self.folder, f"stack.{os.getpid()}")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            kept = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        except OSError:  # the descriptor limit is lower
            kept = os.dup(handle)
        os.close(handle)
        faulthandler.register(ASKS_FOR_STACK, file=kept, all_threads=True, chain=False)
        self.words[STACK], self.words[SIGNAL] = kept, ASKS_FOR_STACK

    def _torch_is_there(self, torch: ModuleType) -> None:
        from flatout.agent.step_counters import counters

        self.torch = torch
        self.words[HEARTBEATS] += 1
        # handlers registered before torch's import, and torch's own cleanup, run later
        atexit.register(self.words.__setitem__, EXITING, 1)
        self.counters = counters(torch)
        self.counters.page = self.words
        if os.environ.get(ON_NAN) == "stop":
            self.counters.losses = self._look_at
        ledger = Ledger()
        ledger.set(torch, "save", self._tell_of_save(torch.save))
        ledger.set(torch, "load", self._tell_of_load(torch.load))

    def _tell_of_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def hooked_save(*args: object, **kwargs: object) -> Any:
            self.words[HEARTBEATS] += 1
            result = save(*args, **kwargs)
            heartbeat.checkpoint_written()
            return result

        return hooked_save

    def _tell_of_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def hooked_load(f: Any, *args: object, **kwargs: object) -> Any:
            result = load(f, *args, **kwargs)
            try:  # a data file is older than the run; a file written since is a checkpoint
                name = f if isinstance(f, (str, os.PathLike)) else f.name
                if os.stat(name).st_mtime_ns >= os.stat(os.path.join(self.folder, "begun")).st_mtime_ns:
                    heartbeat.checkpoint_read()
            except (OSError, AttributeError, TypeError, ValueError):
                pass
            return result

        return hooked_load

    # -- losses ---------------------------------------------------------------------------------------------

    def _look_at(self, losses: Tensor | Sequence[Tensor]) -> None:
        """End the script if a loss is NaN or infinite; on a device, up to LOOK_EVERY steps later.

        It raises SystemExit, which no ``except Exception`` catches.
        """
        loss = losses if isinstance(losses, self.torch.Tensor) else losses[0] if losses else None
        if loss is None or loss.numel() != 1:
            return
        strange = ~self.torch.isfinite(loss.detach()).reshape(())
        if loss.device.type != "cpu":
            self._not_finite = (
                strange
                if self._not_finite is None
                else self._not_finite | strange.to(self._not_finite.device)
            )
            self._observed_losses += 1
            if self._observed_losses % LOOK_EVERY:
                return
            strange, self._not_finite = self._not_finite, None
        if bool(strange):
            self.words[NOT_FINITE] = self.words[STEPS] + 1
            raise SystemExit(NotFinite.exit_code)


def install(folder: str) -> None:
    """Install the heartbeat at the start of a Python process of a monitored run."""
    global _installed
    if _installed is None:
        _installed = HeartbeatWriter(folder)
        _installed.install()


def failed(error: BaseException) -> None:
    """Report the exception that ends this process. Raises nothing."""
    if _installed is None:
        return
    try:
        import traceback
        from pathlib import Path

        from flatout.job.folder import write_json

        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        info = {
            "pid": os.getpid(),
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error)[:2000],
            "places": places[-60:],
        }
        write_json(Path(_installed.folder, f"failed.{os.getpid()}"), info)
    except Exception:
        return
