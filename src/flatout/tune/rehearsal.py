"""The rehearsal: whether a program written for one device may be divided over ranks, and how. Tried out, not assumed.

A *witness* runs the first steps of the program as it is. Then the program runs as N ranks over the same batches: each of them cut in N, random numbers
and batch statistics exactly those of one process, so that nothing but rounding may differ. What gradients and losses are to the witness's says
how the loss divides:

    equal                               a mean over samples
    alike, but the losses 1/N as large  a sum over samples; rehearsed once more as one
    anything else                       the loss does not divide: the model alone is divided, and its outputs are put together again (*whole*)
    not that either                     the program is not run as ranks

The real job then fetches by index where it can, and draws its own random numbers; that is the division the rehearsal answers with.

Where weights, gradients and optimizer state do not fit beside each other on one device (`tune/sharding.py`) they are divided over the ranks in the
rehearsal as well. If one process cannot even be the witness, N ranks are: each of them keeps its part of the weights and computes the whole of each batch,
so that the average of their gradients is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import sqrt
from typing import Any

from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.plan.errors import ProgramFailed
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import Record, TrialRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.witness import BY_GROUP, ENTRY, STEPS
from flatout.tune.divides_itself import how, meant, missing
from flatout.tune.sharding import ALWAYS, AUTO, NEVER, choices, ran_out, verdict

LEVER = "data_parallel"
WAYS = {"cut": "as a {} over samples", "door": "divided as batches enter the model, as a {} over samples", "whole": "the model's outputs put together again"}
OWN_BATCHES = "it makes its batches itself, without a DataLoader, and they cannot be divided as they enter its model"
START_S = 900.0
GRADIENT, LOSS = 1e-3, 1e-3  # relative; what does not divide is off by far more, what does by rounding alone
CARRIED = 10.0  # times as far as one process carries a change in the last place
ASTRAY = 0.1  # more than this is no rounding
ROUGHLY = 0.2  # how near to 1/N the loss of a sum is where shares are uneven


@dataclass
class Rehearsed(Record):
    """``division`` is the lever's value, None where the program is refused; ``why_not`` says why, in a sentence, ``instead`` what to do."""

    procs: int
    division: dict[str, Any] | None = None
    why_not: str = ""
    instead: str = "Leave --procs away to run it as one process"
    losses: list[float] = field(default_factory=list)  # the witness's
    ranks_losses: list[float] = field(default_factory=list)
    gradient_error: float | None = None
    loss_error: float | None = None
    notes: list[str] = field(default_factory=list)
    shards: bool = False  # weights, gradients and optimizer state are divided over the ranks
    memory: str = ""  # what was found of them, in a sentence


class Rehearsal:
    """``ranks_of(command)`` is the command that starts the same program as ranks. ``whole``: the script is to see whole batches on every rank.
    ``shard``: whether weights are divided, a word of tune/sharding.py."""

    def __init__(self, command: Command, ranks_of: Callable[[Command], Command], procs: int, job: JobFolder, facts: Facts, seed: int = 0, whole: bool = False,
                 stage: Callable[[str, str], None] = lambda name, detail: None, shard: str = AUTO) -> None:
        self.command, self.ranks_of, self.procs, self.job, self.facts, self.seed, self.stage = command, ranks_of, procs, job, facts, seed, stage
        self.whole, self.shard = whole, shard
        self.found = Rehearsed(procs)
        self.rounding: tuple[float, float] | None = None  # how far one process carries it: gradients of the first step, losses

    def run(self) -> Rehearsed:
        """Raises ProgramFailed where the program fails by itself."""
        self.stage("rehearsing", "the first steps as one process")
        alone = True  # the witness is one process
        try:
            witness = self._heard(self.command, Plan())
        except ProgramGone as gone:
            if gone.record.status == "ended":
                return self._refused(f"it ended before {STEPS} training steps were done, so there is too little to compare")
            if missing(gone.record):
                return self._divides_itself(f"it wants to be started by torchrun ({missing(gone.record)} is not set)", BY_GROUP)
            if self.shard == NEVER or not ran_out(gone.record):
                raise _failed(gone.record) from None
            witness, alone = self._divided_witness(gone.record), False
        self._memory(witness, alone)
        self.found.losses = _numbers(witness["losses"])
        if witness["divides_itself"]:
            return self._divides_itself(how(witness["divides_itself"]), witness["divides_itself"])
        found = self._compared(witness)
        if found.division is None and found.shards and self.shard == AUTO and alone:
            found.memory += f"; but that was left again: {found.why_not}"
            found.shards, found.why_not = False, ""
            found = self._compared(witness)
        return found

    def _divided_witness(self, record: TrialRecord) -> dict[str, Any]:
        """One process does not have the memory. Raises ProgramFailed."""
        self.stage("rehearsing", f"one process has run out of memory: the first steps as {self.procs} ranks that divide the weights, not the batches")
        try:
            return self._heard(self.ranks_of(self.command), Plan((Choice(LEVER, {"batches": "same", "loaders": ""}), *choices(True))))
        except ProgramGone as gone:
            raise _failed(record, f"; nor do {self.procs} ranks that divide its weights: {gone.record.last_line}") from None

    def _memory(self, witness: dict[str, Any], alone: bool) -> None:
        found = verdict(self.shard if alone else ALWAYS, witness["held"], witness["device"], self.facts, self.procs)
        self.found.shards = found.divides
        self.found.memory = found.sentence if alone else f"one process has run out of memory; {found.sentence.removesuffix(', as asked for')}"

    def _compared(self, witness: dict[str, Any]) -> Rehearsed:
        why = ""
        for batches in self._ways(witness):
            for reduction in ("mean", "sum"):
                division = {"batches": batches, "reduction": reduction, "loaders": ",".join(map(str, witness["fed"])), "batchnorm": "all", "draws": "all"}
                self.stage("rehearsing", f"the same steps as {self.procs} ranks, {WAYS[batches].format(reduction)}")
                refused = self._tried(division, witness)
                if refused is None:
                    self.found.division = self._real_division(division, witness)
                    self.found.why_not = ""
                    return self.found
                why = why or refused
                if batches == "whole" or not self._looks_like_a_sum():
                    break
        return self._refused(why)

    def _ways(self, witness: dict[str, Any]) -> tuple[str, ...]:
        """Where batches are divided, the fastest first. What the script sees whole, every rank fetches whole."""
        return ("whole",) if self.whole else ("cut", "whole") if witness["fed"] else ("door", "whole")

    def _tried(self, division: dict[str, Any], witness: dict[str, Any]) -> str | None:
        """Nothing where this division computes what one process computes, else why it does not."""
        self.found.ranks_losses = []
        try:
            ranks = self._heard(self.ranks_of(self.command), Plan((Choice(LEVER, division), *choices(self.found.shards))))
        except ProgramGone as gone:
            return self._why_failed(gone.record, witness)
        if not ranks["applied"] or ranks["skipped"]:
            return str(ranks["skipped"][0]["reason"]) if ranks["skipped"] else "nothing was applied"
        self._compare(witness, ranks)
        return None if self._holds() or self._carries_rounding_as_far(witness) else self._why(witness)

    def _heard(self, command: Command, plan: Plan, last_places: float = 0.0) -> dict[str, Any]:
        """Raises ProgramGone."""
        with Trial(command, self.job.new_trial(), plan, self.facts, seed=self.seed, entry=ENTRY, wishes={"last_places": last_places}) as trial:
            return trial.wait_ready(seconds() + START_S)

    def _real_division(self, rehearsed: dict[str, Any], witness: dict[str, Any]) -> dict[str, Any]:
        by_index = rehearsed["batches"] == "cut" and all(_by_index(witness["loaders"][at]) for at in witness["fed"])
        return {**rehearsed, "batches": "index" if by_index else rehearsed["batches"], "batchnorm": "own", "draws": "own"}

    def _compare(self, witness: dict[str, Any], ranks: dict[str, Any]) -> None:
        self.found.gradient_error = _gradient_error(ranks["gradients"], witness["gradients"])
        self.found.ranks_losses = _numbers(ranks["losses"])
        self.found.loss_error = self._loss_error(self.found.ranks_losses, self.found.losses)

    def _looks_like_a_sum(self) -> bool:
        """By the first loss: clipping takes the size of a gradient away."""
        mine, whole = self.found.ranks_losses[:1], self.found.losses[:1]
        return bool(mine and whole and whole[0] and abs(self.procs * mine[0] / whole[0] - 1) < ROUGHLY)

    def _holds(self, gradient: float = 0.0, loss: float = 0.0) -> bool:
        """Whether the errors are small, or no more than these times ``CARRIED``."""
        found = self.found
        if found.gradient_error is None or found.loss_error is None:
            return False
        return found.gradient_error <= max(GRADIENT, CARRIED * gradient) and found.loss_error <= max(LOSS, CARRIED * loss)

    def _carries_rounding_as_far(self, witness: dict[str, Any]) -> bool:
        """Some programs (deep networks without a warm-up, two networks against one another) carry rounding far. So they do in one process: the witness again,
        every weight moved in its last place."""
        found = self.found
        if found.gradient_error is None or found.gradient_error > ASTRAY or self._loss_error(found.ranks_losses[:1], found.losses[:1]) > LOSS:
            return False
        if self.rounding is None:
            self.stage("rehearsing", "the first steps as one process, its weights moved in their last place: how far does it carry rounding?")
            try:
                moved = self._heard(self.command, Plan(), last_places=1.0)
            except ProgramGone:
                return False
            self.rounding = _gradient_error(moved["gradients"], witness["gradients"]) or 0.0, self._loss_error(_numbers(moved["losses"]), found.losses)
        gradient, loss = self.rounding
        if self._holds(gradient, loss):
            found.notes.append(f"gradients differ by {found.gradient_error:.2g} and losses by {found.loss_error:.2g}; weights moved in their last place make "
                               f"one process differ by {gradient:.2g} and {loss:.2g}")
        return self._holds(gradient, loss)

    @staticmethod
    def _loss_error(a: Sequence[float], b: Sequence[float]) -> float:
        return max((abs(x - y) / max(abs(x), abs(y), 1e-300) for x, y in zip(a, b, strict=False)), default=float("inf"))

    def _refused(self, why: str) -> Rehearsed:
        self.found.why_not = why
        return self.found

    def _divides_itself(self, why: str, way: str) -> Rehearsed:
        self.found.instead = meant(way, self.command, self.procs)
        return self._refused(why)

    def _why_failed(self, record: TrialRecord, witness: dict[str, Any]) -> str:
        said = record.last_line
        _, ours, sentence = said.rpartition("CannotDivide: ")
        if witness["fed"]:
            return sentence if ours else f"divided in {self.procs} it fails: {said}"
        return f"{OWN_BATCHES}: {sentence if ours else said}"

    def _why(self, witness: dict[str, Any]) -> str:
        found = self.found
        if found.gradient_error is None:
            return "no gradient was seen in its first step, so there is nothing to compare"
        off = (f"divided in {self.procs}, the gradients of the first step differ by {found.gradient_error:.2g} of their length, the losses of the first "
               f"steps by {found.loss_error:.2g}")
        if not witness["fed"]:
            return f"{OWN_BATCHES}: {off}"
        return (f"its loss is neither a mean nor a sum over samples: {off}. Samples look at each other (contrastive losses, mixed samples), or something else "
                "counts on the size of the batch")


def _gradient_error(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float | None:
    """How far sketches are from each other, over the length of ``b``; None where that has none. A gradient that one of them lacks is zero there."""
    pairs = [pair for one, other in zip_longest(a, b, fillvalue=()) for pair in zip_longest(one, other, fillvalue=0.0)]
    length = sqrt(sum(y * y for _, y in pairs))
    return sqrt(sum((x - y) ** 2 for x, y in pairs)) / length if length else None


def _by_index(loader: dict[str, Any]) -> bool:
    return not loader["iterable"] and loader["batch_size"] is not None


def _numbers(losses: Sequence[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


def _failed(record: TrialRecord, besides: str = "") -> Exception:
    said = record.log_tail.strip() or record.reason
    return ProgramFailed(f"the program does not train as one process ({record.last_line}{besides}):\n\n{said}", record.exit_code or 1)
