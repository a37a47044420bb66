"""Exact resume of one process: it records, or replays up to a checkpoint and then records again."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from flatout.agent.bootstrap import say_at_once
from flatout.agent.frames import is_users
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.checkpoint.environment import differences, environment
from flatout.checkpoint.metadata import CheckpointMeta, ExactMeta
from flatout.checkpoint.rescue import Rescue
from flatout.checkpoint.resume.choice import check, digest_of, newest
from flatout.checkpoint.resume.script_replay import ScriptReplay
from flatout.checkpoint.resume.users_objects import users_modules
from flatout.job import heartbeat
from flatout.job.claims import keeps_first
from flatout.schema.errors import CannotResume, FlatoutError
from flatout.schema.run_request import ResumeOptions

COST_S = 0.02  # assumed cost of a checkpoint, if the one resumed from does not record it
JOURNAL = "journal-"
unlink = os.unlink  # the original, before flatout patches file functions


class ExactSession(ScriptReplay):
    """The `Checkpointing` of a program that can be resumed exactly, and the `ExactResumePart` of its checkpoints.

    ``resumed`` is called at the resume point.
    """

    def __init__(
        self,
        torch: ModuleType,
        options: ResumeOptions,
        folder: Path,
        ledger: Ledger,
        resumed: Callable[[], None],
    ) -> None:
        self.torch, self.options, self.folder, self._resumed = torch, options, folder, resumed
        self._sources = dict[str, str]()
        self._why_not = ""
        self.next_command = "the same command" + (" without --from-scratch" if options.from_scratch else "")
        heartbeat.set_exact_resume()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.save, unfinished = (None, "") if options.from_scratch else newest(folder)
        self.meta = CheckpointMeta.from_json(self.save.manifest.metadata) if self.save is not None else None
        exact = self.meta.exact if self.meta is not None else None
        self.journal = folder / (exact.journal if exact else f"{JOURNAL}{uuid.uuid4().hex[:8]}")
        claim = os.environ["FLATOUT_JOB"]
        self.rescue = Rescue(
            torch,
            folder,
            say_at_once,
            lambda: keeps_first(claim),
            ledger,
            exact=self,
            resumed=self.save.step if self.save is not None else None,
            cost_s=(exact.cost_s if exact is not None else 0.0) or COST_S,
        )
        atexit.register(self.rescue.finish)
        state = self._state(unfinished)
        super().__init__(self.journal, state, self.rescue, ledger, options.shows)
        heartbeat.on_own_resume(self.resumes_itself)
        atexit.register(self._ended)

    def _state(self, unfinished: str) -> dict[str, Any] | None:
        """Return the state of the checkpoint; None to start from scratch.

        Refuses if the checkpoint cannot be used, or if there is none although the user insists."""
        if unfinished:
            why = f"its last start left no checkpoint to resume from: {unfinished}"
            if self.options.insists:
                self.refuse(why)
            self.say(f"this program starts from scratch: {why}")
        if self.save is None or self.meta is None:
            return None
        self.say(f"replaying the program up to step {self.save.step}, from {os.path.relpath(self.save.path)}")
        try:
            check(self.torch, self.save, self.meta)
            state: dict[str, Any] = self.save.read(self.torch)["exact"]
            return state
        except FlatoutError as error:
            self.refuse(str(error).rstrip("."))

    # -- Checkpointing -----------------------------------------------------------------------------------------

    @property
    def listener(self) -> Listener:
        return self

    @property
    def replaying(self) -> bool:
        return self.saved is not None

    @property
    def active(self) -> bool:
        return self.replaying or self.rescue.active

    def begin(self, context: TrainingContext) -> None:
        self.rescue.begin(context)

    def broke(self, error: Exception) -> None:
        if self.replaying:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")
        self.rescue.leave()

    # -- ScriptReplay ------------------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        say_at_once(sentence)

    def refuse(self, why: str) -> NoReturn:
        """Exit the process, whatever the program catches: it must not run with tensors that have no values."""
        then = "`flatout rescue` lists the checkpoints; `flatout run --resume --from-scratch` starts from scratch"
        if not self.options.insists:
            unlink(self.journal)
            then = "The next start begins from scratch; `flatout rescue` lists the checkpoints"
        say_at_once(f"cannot resume exactly: {why}. {then}.")
        os._exit(CannotResume.exit_code)

    def recording_begins(self) -> None:
        """Delete journals of runs that can no longer be resumed, and the files next to them.

        Files that this run wrote before its training are next to its own journal; they stay."""
        for path in self.folder.glob(f"{JOURNAL}*"):
            if path.name.startswith(self.journal.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def at_resume_point(self, through_s: float, trained_s: float) -> None:
        assert self.save is not None
        assert self.meta is not None
        differs = differences(self.meta.surroundings, environment(self.torch))
        if differs:  # the program has made its own settings by now
            self.refuse(f"the environment differs from that of {self.save.path.name}: {'; '.join(differs)}")
        self.say(
            f"resumed exactly after step {self.save.step}, reached in {through_s:.1f} s; training had taken {trained_s:.1f} s"
        )
        heartbeat.mark_resume_point()
        self._resumed()

    def resumes_itself(self, path: str) -> None:
        """Stop recording; no checkpoint is used to resume."""
        if self.replaying or self.value_log.broken:
            return
        self.value_log.breaks(f"it resumes by itself, from {os.path.relpath(path)}")
        self.journal.unlink(missing_ok=True)
        self.say(
            f"this script resumes by itself, from {os.path.relpath(path)}; flatout leaves this to the script"
        )
        heartbeat.set_exact_resume(False)
        heartbeat.saved()  # counts the file from which the program resumes itself
        if not self.options.rescue:
            self.rescue.leave()

    # -- ExactResumePart ---------------------------------------------------------------------------------------

    def extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        state, why_not = super().extra_state(frame)
        if why_not and why_not != self._why_not and not self.value_log.broken:
            say_at_once(f"from here on this program could not be resumed exactly: {why_not}")
        self._why_not = why_not
        return state, why_not

    def metadata(self, why_not: str, cost_s: float) -> ExactMeta:
        for module in users_modules():
            file = os.path.abspath(getattr(module, "__file__", None) or "")
            if file not in self._sources and is_users(file):
                # at first sight: later edits do not affect the running program
                self._sources[file] = digest_of(file)
        return ExactMeta(self.journal.name, tuple(sys.orig_argv[1:]), dict(self._sources), why_not, cost_s)

    def kept(self, step: int) -> None:
        if not self._why_not and not self.value_log.broken:
            heartbeat.saved(step)

    # -- the end -----------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        """Delete the journal at the end of the program, unless it failed or got a signal: such a run can be resumed."""
        if os.getpid() != self.pid:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self.replaying:
            how = (
                f"failed with {type(failure).__name__}: {failure}{_place_of(failure)}"
                if failure is not None
                else "exited"
            )
            self.refuse(f"before the program reached its resume point, it {how}")
        if failure is None and not self.rescue.signalled:
            self.journal.unlink(missing_ok=True)
            self.files.ended()


def _place_of(failure: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_users(frame.filename)]
    return f", at {os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
