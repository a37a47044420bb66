"""Interleaves programs: one runs at a time; the process groups of the others are stopped with SIGSTOP.

Programs start together, because most of a start is a single thread that imports and reads. A compiling
program continues while others start, and is stopped while they are measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.blocks import BlockTimer
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions

RANK_SETTLE_TICKS = 3  # of ranks, which first agree on the layout and size of their messages
POLL_S = 0.05  # wait for one program while several start


@dataclass
class RunningCandidate:
    """A running program under a Plan, with the seconds it took to become ready."""

    plan: Plan
    trial: Trial
    startup_s: float


class Interleaver(BlockTimer):
    """Starts, pauses and times programs.

    If ``command`` starts several ranks, ``base`` is the plan that splits the program and ``single_command`` the
    command of one process.
    """

    def __init__(
        self,
        command: Command,
        job: JobFolder,
        facts: Facts,
        base: Plan | None = None,
        single_command: Command | None = None,
    ) -> None:
        super().__init__()
        self.command, self.job, self.facts, self.base, self.single_command = (
            command,
            job,
            facts,
            base or Plan(),
            single_command,
        )
        self.running: list[Trial] = []
        self.checked_steps = 0  # of each program that starts from now on
        self.on_poll: Callable[[], None] = lambda: None  # while programs start
        self.background: list[Trial] = []  # not ready yet; they run only while others start
        job.lock()
        # Left by a killed search; the data may have changed since
        shutil.rmtree(job.shared_samples, ignore_errors=True)
        job.shared_samples.mkdir(parents=True, exist_ok=True)
        if single_command is not None:
            self.settle_ticks = RANK_SETTLE_TICKS

    # -- programs

    def start(
        self,
        plan: Plan,
        seed: int,
        perturbation: float = 0.0,
        as_one_process: bool = False,
        hold: bool = False,
    ) -> Trial:
        """Start a program; ``ready`` waits for it. ``hold``: it waits for `Trial.release`."""
        command, trial_plan = (
            (self.single_command, plan)
            if as_one_process and self.single_command is not None
            else (self.command, plan.on_top_of(self.base))
        )
        options = TrialOptions(
            seed, reseed=True, perturbation=perturbation, hold=hold, checked_steps=self.checked_steps
        )
        return self.start_trial(Trial(command, self.job.new_trial(), trial_plan, self.facts, options))

    def start_trial(self, trial: Trial) -> Trial:
        """Start a trial that takes part from now on."""
        self.running.append(trial)
        try:
            trial.start()
        except BaseException:
            self.dismiss(trial)
            raise
        return trial

    def wait_all_ready(self, trials: Sequence[Trial], timeout_s: float) -> list[ProgramGone | None]:
        """Wait until each trial reaches its steady state, and stop it there.

        Returns, in order, None or the reason why the trial was lost. A program
        that begins to train is stopped until all do. Then they warm up one after another, because computing
        programs slow each other down.
        """
        outcomes: dict[int, ProgramGone | None] = {}

        def poll(i: int) -> bool:
            """Whether this trial needs no further waiting."""
            trial = trials[i]
            self.on_poll()
            try:
                if trial.is_ready(trial.started_s + timeout_s, POLL_S):
                    trial.pause()
                    outcomes[i] = None
            except ProgramGone as gone:
                self.dismiss(trial)
                outcomes[i] = gone
            return i in outcomes

        try:
            for trial in self.background:
                trial.resume()
            importing = set(range(len(trials))) if len(trials) > 1 else set()
            while importing:
                for i in sorted(importing):
                    if poll(i) or trials[i].training:
                        trials[i].pause()
                        importing.discard(i)
            if self.background and len(trials) > 1:
                self._stop_background()
            for i in range(len(trials)):
                if i not in outcomes:
                    trials[i].resume()
                    while not poll(i):
                        pass
            return [outcomes[i] for i in range(len(trials))]
        except BaseException:
            for trial in trials:
                self.dismiss(trial)
            raise
        finally:
            self._stop_background()

    def _stop_background(self) -> None:
        for trial in self.background:
            trial.pause(rescan=True)

    def start_paused(
        self, plan: Plan, seed: int, timeout_s: float, perturbation: float = 0.0, as_one_process: bool = False
    ) -> RunningCandidate:
        """Start a program and bring it to its steady state; it is stopped on return. Raises ProgramGone."""
        trial = self.start(plan, seed, perturbation, as_one_process)
        gone = self.wait_all_ready([trial], timeout_s)[0]
        if gone is not None:
            raise gone
        return RunningCandidate(plan, trial, seconds() - trial.started_s)

    def dismiss(self, trial: Trial) -> None:
        trial.close()
        for group in (self.running, self.background):
            if trial in group:
                group.remove(trial)

    def close(self) -> None:
        for trial in list(self.running):
            self.dismiss(trial)
        shutil.rmtree(self.job.shared_samples, ignore_errors=True)


def ask_options(trial: Trial) -> dict[str, Any]:
    return trial.ask({"do": "options"}, seconds() + 120)


def ask_replica(
    trial: Trial, choices: Sequence[Choice], timeout_s: float, judge_remaining: bool = True
) -> dict[str, Any]:
    """Ask for the replica of a step. ``timeout_s``: of one judgement; each lever may cost two more."""
    command = {"do": "replica", "choices": [c.to_json() for c in choices], "remaining": judge_remaining}
    answer = trial.ask(command, seconds() + (1 + 2 * len(choices)) * timeout_s)
    trial.pause()
    replica: dict[str, Any] = answer["replica"]
    return replica
