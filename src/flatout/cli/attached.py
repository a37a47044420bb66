"""The part of `flatout run` inside the program: applies the plan, reports it, and removes its hooks."""

from __future__ import annotations

import atexit
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.capture.bootstrap import keeps_first, say, say_at_once, speaks_first
from flatout.capture.ledger import Ledger
from flatout.capture.listener import Listener, Several
from flatout.capture.training_context import TrainingContext
from flatout.engine.applier import EARLY, LATE, Applier, Outcome, one_line
from flatout.levers import TABLE
from flatout.plan.enums import Moment
from flatout.plan.errors import CannotResume
from flatout.plan.facts import Facts
from flatout.plan.plan import Plan
from flatout.plan.rank_environment import this_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from flatout.engine.rescue import Rescue
    from flatout.replay.script_replay import ScriptReplay


def attach(job: dict[str, Any]) -> None:
    """Attach to the program. The bootstrap calls this right after ``import torch``."""
    import torch

    try:
        if job.get("watch") is None:
            Attached(job, torch)
        else:
            from flatout.cli.live_line import MonitoredJob

            MonitoredJob(job, torch)
    except Exception as error:
        if job.get("resume") is None:
            raise
        # The program may be half replayed and must not continue in that state.
        say_at_once(f"cannot resume exactly: internal error in flatout ({type(error).__name__}: {error}).")
        os._exit(CannotResume.exit_code)


class Attached(Listener):
    """Waits for the first step, applies the levers that need it, and removes the hooks."""

    def __init__(self, job: dict[str, Any], torch: Any) -> None:
        self.plan = Plan.from_json(job["plan"])
        left_out = dict(job.get("left_out", ()))
        self.early = [
            Outcome(c, c.name not in left_out, left_out.get(c.name, ""))
            for c in self.plan
            if any(lever.name == c.name and lever.moment is Moment.PROCESS for lever in TABLE)
        ]
        here = this_rank()
        self.rank = here.rank if here is not None else int(os.environ.get("RANK", "0"))
        ledger = Ledger()
        self.rescue, self.again = self._keeping(job, torch, ledger)
        self.kept: Listener | None = self.again or self.rescue
        self.context = TrainingContext(torch, self if self.kept is None else Several(self, self.kept), ledger)
        if here is not None and here.world_size > 1:
            from flatout.capture.rank_files import keep_aside, launch_folder

            keep_aside(torch, launch_folder(here), here.rank, self.context.ledger)
        self.applier = Applier(TABLE, Facts.from_json(job["facts"]), self.context)
        self.applier.start(self.plan, EARLY)
        self.context.install()
        if self.again is not None:
            self.again.install()
        self.speaks = False

    def _keeping(
        self, job: dict[str, Any], torch: Any, ledger: Ledger
    ) -> tuple[Rescue | None, ScriptReplay | None]:
        """Return the checkpoint writer of this process, and the replay that resumes it from its newest usable
        checkpoint or records it from the start.

        With several ranks, rank 0 keeps checkpoints; all ranks do if all are resumed."""
        if not job.get("rescue"):
            return None, None
        if not job.get("resume"):
            return (
                (_rescue(torch, Path(job["rescue"]), ledger, os.environ["FLATOUT_JOB"]), None)
                if self.rank == 0
                else (None, None)
            )
        from flatout.cli.exact_resume import ResumeRanks, resume

        ranks = ResumeRanks.of(torch, Path(job["rescue"]))
        rescue = _rescue(torch, ranks.folders[ranks.rank], ledger, ranks.claim, ranks.say)
        again = resume(rescue, ledger, self.goes_on, job["resume"], ranks)
        return (rescue, again) if again is not None or self.rank == 0 else (None, None)

    def broke(self, error: Exception) -> None:
        say(f"internal error in flatout ({type(error).__name__}: {error}); the program continues without it")
        if self.again is not None:
            self.again.broke(error)
        if self.rescue is not None:
            self.rescue.leave()
        self.context.rest()

    def step_end(self) -> None:
        if self.context.steps == 1:
            with self.again.for_real() if self.again is not None else nullcontext():
                self.applier.start(self.plan, LATE)
            if self.rescue is not None and (self.again is None or not self.again.going):
                self.rescue.begin(self.context)
            self.speaks = self.rank == 0 and speaks_first(os.environ["FLATOUT_JOB"])
            if self.again is None or not self.again.going:  # a replay shows nothing
                self._tell_what_is_applied(say)
        elif self.context.steps >= 3:
            for lever, sentence in self.context.reports:
                self._says(lever, sentence)
            self.context.reports.clear()
            self.context.says = self._says
            self.settled()

    def _says(self, lever: str, sentence: str) -> None:
        if self.speaks:
            say(f"{lever}: {sentence}")

    def settled(self) -> None:
        """Remove the hooks that are no longer needed: all levers are applied and reported."""
        if (
            self.kept is not None
            and self.rescue is not None
            and (self.rescue.active or (self.again is not None and self.again.going))
        ):
            self.context.listen_for(self.kept)
        else:
            self.context.rest()

    def goes_on(self) -> None:
        """Begin to keep checkpoints: the replay has reached the saved state."""
        assert self.rescue is not None
        self.rescue.begin(self.context)
        self._tell_what_is_applied(say_at_once)

    def _tell_what_is_applied(self, tell: Callable[[str], None]) -> None:
        if self.speaks and (len(self.plan) or self.rescue is None):
            tell(one_line([*self.early, *self.applier.outcomes]))


def _rescue(
    torch: Any, folder: Path, ledger: Ledger, claim: str, tell: Callable[[str], None] = say_at_once
) -> Rescue:
    from flatout.engine.rescue import Rescue

    found = Rescue(torch, folder, tell, lambda: keeps_first(claim), ledger)
    atexit.register(found.finish)
    return found
