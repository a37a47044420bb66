"""Exact resume of one process: RECORDING, REPLAYING up to a checkpoint, or RESUMED from it."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import traceback
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from enum import Enum
from types import FrameType, ModuleType
from typing import Any, NoReturn

from flatout.agent.bootstrap import say_at_once
from flatout.agent.frames import is_users
from flatout.agent.ledger import Ledger
from flatout.agent.training_context import TrainingContext
from flatout.checkpoint.environment import differences, environment
from flatout.checkpoint.metadata import CheckpointMeta, ExactMeta, RankCounts
from flatout.checkpoint.rescue import Rescue
from flatout.checkpoint.resume.choice import check, digest_of, newest
from flatout.checkpoint.resume.ranks import ResumeRanks
from flatout.checkpoint.resume.replay_host import ResumeRequest
from flatout.checkpoint.resume.script_replay import ScriptReplay
from flatout.checkpoint.resume.users_objects import users_modules
from flatout.checkpoint.save_schedule import SaveSchedule
from flatout.data.streams import own_generators
from flatout.job import heartbeat
from flatout.job.claims import keeps_first
from flatout.measure.clock import seconds
from flatout.schema.errors import CannotResume, FlatoutError
from flatout.schema.run_request import ResumeOptions

COST_S = 0.02  # assumed cost of a checkpoint, if the one resumed from does not record it
JOURNAL, FETCHES = "journal-", "FLATOUT_FETCHES"
unlink = os.unlink  # the original, before flatout patches file functions


class Phase(Enum):
    RECORDING = "recording"  # from the start of the program
    REPLAYING = "replaying"  # up to the state of the checkpoint
    RESUMED = "resumed"  # recording again, after that state


class ExactSession:
    """The `Checkpointing` of a program that can be resumed exactly.

    It is the host of the replay (`ReplayHost`) and the part of each checkpoint that a resume needs
    (`ExactResumePart`). ``resumed`` is called at the resume point.
    """

    def __init__(
        self,
        torch: ModuleType,
        options: ResumeOptions,
        ranks: ResumeRanks,
        schedule: SaveSchedule | None,
        ledger: Ledger,
        resumed: Callable[[], None],
    ) -> None:
        self.torch, self.options, self.ranks = torch, options, ranks
        self._resumed = resumed
        self._replay: ScriptReplay | None = None
        self._launch = schedule.launch if schedule is not None else 0
        self._sources = dict[str, str]()
        self._why_not = ""
        self.next_command = "the same command" + (" without --from-scratch" if options.from_scratch else "")
        heartbeat.set_exact_resume()
        ranks.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.save, unfinished = (None, "") if options.from_scratch else newest(ranks)
        self.meta = CheckpointMeta.from_json(self.save.manifest.metadata) if self.save is not None else None
        exact = self.meta.exact if self.meta is not None else None
        self.journal = ranks.folder / (exact.journal if exact else f"{JOURNAL}{uuid.uuid4().hex[:8]}")
        self.rescue = Rescue(
            torch,
            ranks.folder,
            ranks.say,
            lambda: keeps_first(ranks.claim),
            ledger,
            exact=self,
            schedule=schedule,
            resumed=self.save.step if self.save is not None else None,
            cost_s=(exact.cost_s if exact is not None else 0.0) or COST_S,
        )
        atexit.register(self.rescue.finish)
        state = self._state(unfinished)
        self.phase = Phase.RECORDING if state is None else Phase.REPLAYING
        self.listener = self._replay = ScriptReplay(
            ResumeRequest(
                self.journal, state, ranks.size > 1, shows=options.shows, fetches=FETCHES in os.environ
            ),
            self,
            self.rescue,
            ledger,
            own_generators,
        )
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
            if FETCHES in os.environ:
                self.refuse("the checkpoint that it was resuming from no longer exists")
            return None
        self.say(f"replaying the program up to step {self.save.step}, from {os.path.relpath(self.save.path)}")
        try:
            check(self.torch, self.save, self.meta)
            found: dict[str, Any] = self.save.read(self.torch)["exact"]
            return found
        except FlatoutError as error:
            self.refuse(str(error).rstrip("."))

    # -- Checkpointing -----------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        return self.phase is Phase.REPLAYING

    @property
    def active(self) -> bool:
        return self.replaying or self.rescue.active

    def install(self) -> None:
        self.listener.install()

    def for_real(self) -> AbstractContextManager[None]:
        return self.listener.for_real()

    def begin(self, context: TrainingContext) -> None:
        self.rescue.begin(context)

    def broke(self, error: Exception) -> None:
        self.listener.broke(error)
        self.rescue.leave()

    # -- ReplayHost --------------------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        self.ranks.say(sentence)

    def seconds(self) -> float:
        return seconds()

    def refuse(self, why: str) -> NoReturn:
        """Exit the process, whatever the program catches: it must not run with tensors that have no values."""
        then = "`flatout rescue` lists the checkpoints; `flatout run --resume --from-scratch` starts from scratch"
        if not self.options.insists:
            unlink(self.journal)
            then = "The next start begins from scratch; `flatout rescue` lists the checkpoints"
        say_at_once(f"{self.ranks.prefix}cannot resume exactly: {why}. {then}.")
        os._exit(CannotResume.exit_code)

    def diverged(self, why: str) -> NoReturn:
        """Replay the program once more and read its data this time; give up if that was done already."""
        skipped = self._replay is not None and self._replay.skips
        if skipped and FETCHES not in os.environ and self.ranks.size == 1:
            say_at_once(f"{why}; replaying again, now reading the data")
            for claim in ("exactly", "reported"):
                with suppress(FileNotFoundError):
                    unlink(f"{os.environ['FLATOUT_JOB']}.{claim}")
            # The same command again: only the process ID and inheritable open files survive.
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, FETCHES: "1"})
        self.refuse(why)

    def begins(self) -> None:
        """Delete journals of runs that can no longer be resumed, and the files next to them.

        Files that this run wrote before its training are next to its own journal; they stay."""
        for path in self.ranks.folder.glob(f"{JOURNAL}*"):
            if path.name.startswith(self.journal.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def at_resume_point(self, through_s: float, trained_s: float) -> None:
        os.environ.pop(FETCHES, None)
        assert self.save is not None
        assert self.meta is not None
        differs = differences(self.meta.surroundings, environment(self.torch))
        if differs:  # the program has made its own settings by now
            self.refuse(f"the environment differs from that of {self.save.path.name}: {'; '.join(differs)}")
        self.phase = Phase.RESUMED
        self.say(
            f"resumed exactly after step {self.save.step}, reached in {through_s:.1f} s; training had taken {trained_s:.1f} s"
        )
        heartbeat.mark_resume_point()
        self._resumed()

    def left_alone(self, sentence: str) -> None:
        self.say(sentence)
        heartbeat.set_exact_resume(False)
        heartbeat.saved()  # counts the file from which the program resumes itself
        if not self.options.rescue:
            self.rescue.leave()

    # -- ExactResumePart ---------------------------------------------------------------------------------------

    def beside(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        found, why_not = self.listener.beside(frame)
        if why_not and why_not != self._why_not and not self.listener.value_log.broken:
            say_at_once(
                f"{self.ranks.prefix}from here on this program could not be resumed exactly: {why_not}"
            )
        self._why_not = why_not
        return found, why_not

    def metadata(self, why_not: str, cost_s: float) -> ExactMeta:
        for module in users_modules():
            file = os.path.abspath(getattr(module, "__file__", None) or "")
            if file not in self._sources and is_users(file):
                # at first sight: later edits do not affect the running program
                self._sources[file] = digest_of(file)
        met = self.listener.met()
        counts = RankCounts(self.ranks.size, self._launch, met["met"], met["begun"]) if met else None
        return ExactMeta(
            self.journal.name, tuple(sys.orig_argv[1:]), dict(self._sources), why_not, cost_s, counts
        )

    def kept(self, step: int) -> None:
        if not self._why_not and not self.listener.value_log.broken:
            heartbeat.saved(step)

    def flush(self) -> None:
        self.listener.flush()

    # -- the end -----------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        """Mark the run as ended at process exit, unless it failed or got a signal: such a run can be resumed."""
        if os.getpid() != self.listener.pid:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self.replaying:
            what = (
                f"failed with {type(failure).__name__}: {failure}{_place_of(failure)}"
                if failure is not None
                else "exited"
            )
            self.diverged(f"before the program reached its resume point, it {what}")
        if failure is None and not self.rescue.signalled:
            self.listener.ended()


def _place_of(failure: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_users(frame.filename)]
    return f", at {os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
