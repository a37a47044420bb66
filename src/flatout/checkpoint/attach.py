"""The entry of a run that keeps checkpoints, inside the program: `flatout run --rescue` and `--resume`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.attached import Checkpointing
from flatout.agent.bootstrap import say_at_once
from flatout.agent.entry import start
from flatout.agent.ledger import Ledger
from flatout.agent.training_context import TrainingContext
from flatout.checkpoint.rescue import Rescue
from flatout.job.claims import keeps_first, records_first
from flatout.job.rank_environment import rank_number
from flatout.schema.errors import CannotResume
from flatout.schema.run_request import ResumeOptions, RunRequest

if TYPE_CHECKING:
    from flatout.checkpoint.resume.ranks import ResumeRanks


def attach(job: dict[str, Any]) -> None:
    """Attach to the program. The bootstrap calls this right after ``import torch``."""
    import torch

    request = RunRequest.from_json(job)
    try:
        start(request, torch, lambda ledger, resumed: checkpointing(request, torch, ledger, resumed))
    except Exception as error:
        if request.resume is None:
            raise
        # The program may be half replayed and must not continue in that state.
        say_at_once(f"cannot resume exactly: internal error in flatout ({type(error).__name__}: {error}).")
        os._exit(CannotResume.exit_code)


def checkpointing(
    request: RunRequest, torch: ModuleType, ledger: Ledger, resumed: Callable[[], None]
) -> Checkpointing | None:
    """Return what keeps the checkpoints of this process; None if another rank keeps them.

    With several ranks, rank 0 keeps checkpoints; all ranks do if all are resumed."""
    assert request.rescue is not None
    first = rank_number() == 0
    folder = Path(request.rescue)
    if request.resume is None:
        return RescueOnly(torch, folder, os.environ["FLATOUT_JOB"], ledger) if first else None
    from flatout.checkpoint.resume.ranks import ResumeRanks

    ranks = ResumeRanks.of(torch, folder)
    exact = _exact(torch, request.resume, ranks, ledger, resumed)
    if exact is not None or not first:
        return exact
    return RescueOnly(torch, ranks.folder, ranks.claim, ledger, ranks.say)


def _exact(
    torch: ModuleType, options: ResumeOptions, ranks: ResumeRanks, ledger: Ledger, resumed: Callable[[], None]
) -> Checkpointing | None:
    """Return the session that records or resumes this process; None if its training cannot be recorded."""
    if why_not := ranks.why_not():
        ranks.say(f"this program is not recorded and cannot be resumed exactly: {why_not}")
        return None
    processes = sys.modules.get("multiprocessing.process")
    if (processes is not None and processes.parent_process() is not None) or not records_first(ranks.claim):
        return None
    try:
        schedule = ranks.save_schedule()
    except OSError as error:
        ranks.say(
            f"this program is not recorded and cannot be resumed exactly: its ranks cannot agree on a save schedule: {error.strerror}"
        )
        return None
    from flatout.checkpoint.resume.session import ExactSession

    return ExactSession(torch, options, ranks, schedule, ledger, resumed)


class RescueOnly:
    """The `Checkpointing` of a program that keeps checkpoints and is not recorded."""

    def __init__(
        self,
        torch: ModuleType,
        folder: Path,
        claim: str,
        ledger: Ledger,
        say: Callable[[str], None] = say_at_once,
    ) -> None:
        self.listener = Rescue(torch, folder, say, lambda: keeps_first(claim), ledger)
        self.replaying = False
        atexit.register(self.listener.finish)

    @property
    def active(self) -> bool:
        return self.listener.active

    def install(self) -> None: ...

    def for_real(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, context: TrainingContext) -> None:
        self.listener.begin(context)

    def broke(self, error: Exception) -> None:
        self.listener.leave()
