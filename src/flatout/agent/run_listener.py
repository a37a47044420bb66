"""A real run, inside the program: applies the plan, reports it, and removes its hooks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Protocol

from flatout.agent.applier import AFTER_FIRST_STEP, BEFORE_FIRST_STEP, Applier, Outcome, one_line
from flatout.agent.bootstrap import notify, notify_unbuffered
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener, ListenerGroup
from flatout.agent.training_context import TrainingContext
from flatout.job.claims import REPORT, claim
from flatout.job.rank_environment import first_on_node, rank_number, this_rank
from flatout.levers import TABLE
from flatout.schema.plan import Plan
from flatout.schema.run_request import RunRequest


class Checkpointing(Protocol):
    """What a run that keeps checkpoints adds. ``listener`` gets the events of every step."""

    @property
    def listener(self) -> Listener: ...

    @property
    def replaying(self) -> bool:
        """Whether the program replays the steps up to its checkpoint."""

    @property
    def active(self) -> bool:
        """Whether the listener needs further events."""

    def install(self) -> None:
        """Called after everything else that changes how loaders are made."""

    def real_execution(self) -> AbstractContextManager[None]:
        """Inside, flatout's own code acts on real tensors and is not recorded."""

    def begin(self, context: TrainingContext) -> None:
        """Called after the first step, or at the resume point of a replay."""

    def on_error(self, error: Exception) -> None:
        """Called after an internal error; the program continues without flatout."""


# Called with the ledger of the run and the function to call at the resume point; None keeps no checkpoints.
MakeCheckpointing = Callable[[Ledger, Callable[[], None]], Checkpointing | None]


class RunListener(Listener):
    """Waits for the first step, applies the levers that need it, and removes the hooks."""

    def __init__(self, request: RunRequest, torch: ModuleType, checkpoints: MakeCheckpointing) -> None:
        self.plan = request.plan
        self.start_outcomes = list(map(Outcome.from_json, request.process_outcomes))
        rank_env = this_rank()
        self.rank = rank_number()
        ledger = Ledger()
        self.checkpoints = checkpoints(ledger, self.resumed)
        listener = self if self.checkpoints is None else ListenerGroup(self, self.checkpoints.listener)
        self.context = TrainingContext(torch, listener, ledger)
        self.real_files: Callable[[], AbstractContextManager[None]] = nullcontext
        if rank_env is not None and rank_env.world_size > 1:
            from flatout.agent.rank_files import launch_folder, redirect_files
            from flatout.distributed.single_process import broadcast_text

            self.plan = Plan.from_json(
                json.loads(broadcast_text(torch, rank_env, json.dumps(self.plan.to_json())))
            )
            self.real_files = redirect_files(launch_folder(rank_env), rank_env.rank, self.context.ledger)
        self.applier = Applier(TABLE.of(self.plan.names), request.facts, self.context)
        self.applier.start(self.plan, BEFORE_FIRST_STEP)
        self.context.install()
        if self.checkpoints is not None:
            self.checkpoints.install()
        self.prints = False

    @property
    def replaying(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.replaying

    def on_error(self, error: Exception) -> None:
        notify(
            f"internal error in flatout ({type(error).__name__}: {error}); the program continues without it"
        )
        if self.checkpoints is not None:
            self.checkpoints.on_error(error)
        self.context.stop_observing()

    def step_end(self) -> None:
        if self.context.steps == 1:
            with self.checkpoints.real_execution() if self.checkpoints is not None else nullcontext():
                self.applier.start(self.plan, AFTER_FIRST_STEP)
            if self.checkpoints is not None and not self.replaying:
                self.checkpoints.begin(self.context)
            # on every node, so that none says at its end that nothing was applied; rank 0 alone speaks
            with self.real_files():
                claimed = first_on_node() and claim(os.environ["FLATOUT_JOB"] + REPORT)
            self.prints = self.rank == 0 and claimed
            if not self.replaying:  # a replay shows nothing
                self._report_applied(notify)
        elif self.context.steps >= 3:
            for lever, sentence in self.context.reports:
                self._print_report(lever, sentence)
            self.context.reports.clear()
            self.context.print_report = self._print_report
            self.finish_start()

    def _print_report(self, lever: str, sentence: str) -> None:
        if self.prints:
            notify(f"{lever}: {sentence}")

    def finish_start(self) -> None:
        """Remove the hooks that are no longer needed: all levers are applied and reported."""
        if self.checkpoints is not None and self.checkpoints.active:
            self.context.switch_listener(self.checkpoints.listener)
        else:
            self.context.stop_observing()

    def resumed(self) -> None:
        """Called at the resume point: the program continues from its saved state."""
        assert self.checkpoints is not None
        self.checkpoints.begin(self.context)
        self._report_applied(notify_unbuffered)

    def _report_applied(self, print_line: Callable[[str], None]) -> None:
        if self.prints and (len(self.plan) or self.checkpoints is None):
            print_line(one_line([*self.start_outcomes, *self.applier.outcomes]))
