"""The entry of a run that keeps checkpoints, inside the program: `flatout run --rescue` and `--resume`."""

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.agent.bootstrap import notify_unbuffered
from flatout.agent.entry import start
from flatout.agent.ledger import Ledger
from flatout.agent.run_listener import Checkpointing
from flatout.agent.training_context import TrainingContext
from flatout.checkpoint.rescue import Rescue
from flatout.job.claims import CHECKPOINTS, RECORDING, claim_or_take_over
from flatout.job.rank_environment import rank_number, this_rank
from flatout.schema.errors import CannotResume
from flatout.schema.run_request import ResumeOptions, RunRequest


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
        notify_unbuffered(
            f"cannot resume exactly: internal error in flatout ({type(error).__name__}: {error})."
        )
        os._exit(CannotResume.exit_code)


def checkpointing(
    request: RunRequest, torch: ModuleType, ledger: Ledger, resumed: Callable[[], None]
) -> Checkpointing | None:
    """Return what keeps the checkpoints of this process; None if another rank keeps them."""
    assert request.checkpoint_folder is not None
    if rank_number() > 0:
        return None
    folder = Path(request.checkpoint_folder)
    if request.resume is not None and (session := _exact(request.resume, folder, ledger, resumed)):
        return session
    return RescueOnly(torch, folder, ledger)


def _exact(
    options: ResumeOptions, folder: Path, ledger: Ledger, resumed: Callable[[], None]
) -> Checkpointing | None:
    if this_rank() is not None or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        notify_unbuffered(
            "this program is not recorded and cannot be resumed exactly: it runs as several ranks. Its checkpoints hold weights "
            "and optimizers; `flatout rescue --to DIR` exports them"
        )
        return None
    processes = sys.modules.get("multiprocessing.process")
    if (processes is not None and processes.parent_process() is not None) or not claim_or_take_over(
        os.environ["FLATOUT_JOB"] + RECORDING
    ):
        return None
    from flatout.checkpoint.resume.session import ExactSession

    return ExactSession(options, folder, ledger, resumed)


class RescueOnly:
    """The `Checkpointing` of a program that keeps checkpoints and is not recorded."""

    def __init__(self, torch: ModuleType, folder: Path, ledger: Ledger) -> None:
        claim = os.environ["FLATOUT_JOB"] + CHECKPOINTS
        self.listener = Rescue(torch, folder, notify_unbuffered, lambda: claim_or_take_over(claim), ledger)
        self.replaying = False
        atexit.register(self.listener.finish)

    @property
    def active(self) -> bool:
        return self.listener.active

    def install(self) -> None: ...

    def real_execution(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, context: TrainingContext) -> None:
        self.listener.begin(context)

    def on_error(self, error: Exception) -> None:
        self.listener.stop()
