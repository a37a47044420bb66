"""The rehearsal: whether a program written for one device may be divided over ranks, and how. Tried out, not assumed.

A *witness* runs the first steps of the program as it is. Then the program runs as N ranks over the same batches: each of them cut in N, random numbers
and batch statistics exactly those of one process, so that nothing but rounding may differ. What gradients and losses are to the witness's says
how the loss divides:

    equal                               a mean over samples
    alike, but the losses 1/N as large  a sum over samples; rehearsed once more as one
    anything else                       it does not divide, and the program is not run as ranks

The real job then fetches by index where it can, and draws its own random numbers; that is the division the rehearsal answers with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from flatout.trial.witness import ENTRY

LEVER = "data_parallel"
OWN_BATCHES = "it makes its batches itself, without a DataLoader, and they cannot be divided as they enter its model"
START_S = 900.0
GRADIENT, LOSS = 1e-3, 1e-3  # relative; what does not divide is off by far more, what does by rounding alone
CARRIED = 10.0  # times as far as the witness whose gradients were led astray
ROUGHLY = 0.2  # how near to 1/N the loss of a sum is where shares are uneven


@dataclass
class Rehearsed(Record):
    """``division`` is the lever's value, None where the program is refused; ``why_not`` says why, in a sentence."""

    procs: int
    division: dict[str, Any] | None = None
    why_not: str = ""
    losses: list[float] = field(default_factory=list)  # the witness's
    ranks_losses: list[float] = field(default_factory=list)
    gradient_error: float | None = None
    loss_error: float | None = None
    notes: list[str] = field(default_factory=list)


class Rehearsal:
    """``ranks_of(command)`` is the command that starts the same program as ranks."""

    def __init__(self, command: Command, ranks_of: Callable[[Command], Command], procs: int, job: JobFolder, facts: Facts, seed: int = 0,
                 stage: Callable[[str, str], None] = lambda name, detail: None) -> None:
        self.command, self.ranks_of, self.procs, self.job, self.facts, self.seed, self.stage = command, ranks_of, procs, job, facts, seed, stage
        self.found = Rehearsed(procs)

    def run(self) -> Rehearsed:
        """Raises ProgramFailed where the program fails by itself."""
        self.stage("rehearsing", "the first steps as one process")
        try:
            witness = self._heard(self.command, Plan())
        except ProgramGone as gone:
            raise _failed(gone.record) from None
        self.found.losses = _numbers(witness["losses"])
        first = self._exact_division(witness)
        for reduction in ("mean", "sum"):
            division = {**first, "reduction": reduction}
            self.stage("rehearsing", f"the same steps as {self.procs} ranks, as a {reduction} over samples")
            try:
                ranks = self._heard(self.ranks_of(self.command), Plan((Choice(LEVER, division),)))
            except ProgramGone as gone:
                return self._refused(self._why_failed(gone.record, witness))
            if not ranks["applied"]:
                return self._refused(ranks["skipped"][0]["reason"] if ranks["skipped"] else "nothing was applied")
            self._compare(witness, ranks)
            if self._gradients_hold() and (self._losses_hold() or self._carries_rounding_as_far(witness)):
                self.found.division = self._real_division(division, witness)
                return self.found
            if not self._looks_like_a_sum():
                break
        return self._refused(self._why(witness))

    def _heard(self, command: Command, plan: Plan, shake: float = 0.0) -> dict[str, Any]:
        """Raises ProgramGone."""
        with Trial(command, self.job.new_trial(), plan, self.facts, seed=self.seed, entry=ENTRY, shake=shake) as trial:
            return trial.wait_ready(seconds() + START_S)

    def _exact_division(self, witness: dict[str, Any]) -> dict[str, Any]:
        fed = witness["fed"]
        return {"batches": "cut" if fed else "door", "loaders": ",".join(map(str, fed)), "batchnorm": "all", "draws": "all"}

    def _real_division(self, rehearsed: dict[str, Any], witness: dict[str, Any]) -> dict[str, Any]:
        by_index = rehearsed["batches"] == "cut" and all(_by_index(witness["loaders"][at]) for at in witness["fed"])
        return {**rehearsed, "batches": "index" if by_index else rehearsed["batches"], "batchnorm": "own", "draws": "own"}

    def _compare(self, witness: dict[str, Any], ranks: dict[str, Any]) -> None:
        a, b = flattened(ranks["gradients"], witness["gradients"])
        length = sqrt(sum(x * x for x in b))
        self.found.gradient_error = sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True))) / length if length else None
        self.found.ranks_losses = _numbers(ranks["losses"])
        self.found.loss_error = self._loss_error(self.found.ranks_losses, self.found.losses)

    def _looks_like_a_sum(self) -> bool:
        """By the first loss: clipping takes the size of a gradient away."""
        mine, whole = self.found.ranks_losses[:1], self.found.losses[:1]
        return bool(mine and whole and whole[0] and abs(self.procs * mine[0] / whole[0] - 1) < ROUGHLY)

    def _gradients_hold(self) -> bool:
        return self.found.gradient_error is not None and self.found.gradient_error <= GRADIENT

    def _losses_hold(self) -> bool:
        return self.found.loss_error is not None and self.found.loss_error <= LOSS

    def _carries_rounding_as_far(self, witness: dict[str, Any]) -> bool:
        """Some programs (two networks against one another, Adam's first steps) carry the rounding of one step into the next ones enlarged. So they do in one
        process: the witness again, its first gradients led astray by as much as the ranks' were."""
        found, first, error = self.found, len(witness["losses"]) // max(1, witness["steps"]), self.found.gradient_error or 0.0
        self.stage("rehearsing", f"the first steps as one process, its first gradients off by {error:.2g}: how far does it carry rounding?")
        try:
            shaken = self._heard(self.command, Plan(), shake=error)
        except ProgramGone:
            return False
        moved = self._loss_error(_numbers(shaken["losses"]), found.losses)
        if self._loss_error(found.ranks_losses[:first], found.losses[:first]) > LOSS or not (found.loss_error or 0.0) <= LOSS + CARRIED * moved:
            return False
        found.notes.append(f"after some steps the losses differ by {found.loss_error:.2g}; gradients led astray by {error:.2g} make one process differ by "
                           f"{moved:.2g}")
        return True

    @staticmethod
    def _loss_error(a: Sequence[float], b: Sequence[float]) -> float:
        return max((abs(x - y) / max(abs(x), abs(y), 1e-300) for x, y in zip(a, b, strict=False)), default=float("inf"))

    def _refused(self, why: str) -> Rehearsed:
        self.found.why_not = why
        return self.found

    def _why_failed(self, record: TrialRecord, witness: dict[str, Any]) -> str:
        said = last_line(record)
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


def flattened(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Two lists of sketches as two vectors; a gradient that one of them lacks is zero there."""
    first, second = list[float](), list[float]()
    for one, other in zip(a, b, strict=False):
        size = max(len(one), len(other))
        first += [*one, *[0.0] * (size - len(one))]
        second += [*other, *[0.0] * (size - len(other))]
    return first, second


def _by_index(loader: dict[str, Any]) -> bool:
    return not loader["iterable"] and loader["batch_size"] is not None


def _numbers(losses: Sequence[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


def _failed(record: TrialRecord) -> Exception:
    said = record.log_tail.strip() or record.reason
    return ProgramFailed(f"the program does not train as one process ({last_line(record)}):\n\n{said}", record.exit_code or 1)


def last_line(record: TrialRecord) -> str:
    lines = (record.reason or record.log_tail).strip().splitlines()
    return lines[-1].strip().rstrip(".")[:300] if lines else record.status
