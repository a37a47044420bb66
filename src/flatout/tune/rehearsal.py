"""The rehearsal: tests whether a single-device program can be split over ranks, and how.

A *reference run* trains the first steps of the program as it is. Then the program runs as N ranks on the same
batches, each cut into N parts. Random numbers and batch statistics are exactly those of one process, so only
rounding may differ. The gradients and losses, compared with the reference run, show how the loss splits:

    equal                              a mean over samples
    same gradients, losses 1/N as big  a sum over samples; rehearsed once more as a sum
    anything else                      only the model splits, not the loss; outputs are gathered (*whole*)
    not that either                    the program does not run as ranks

The rehearsal returns the split of the real job, which fetches by index if possible and draws its own random
numbers.

If weights, gradients and optimizer state do not fit on one device together (`tune/sharding.py`), the
rehearsal shards them too. If a single process cannot even be the reference run, N ranks are: each keeps its
shard of the weights and computes every whole batch, so the average of their gradients is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isfinite, sqrt
from typing import Any

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Record, TrialRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.reference_run import BY_GROUP, ENTRY, STEPS
from flatout.trial.spec import TrialOptions
from flatout.tune.already_parallel import how, meant, missing
from flatout.tune.gone import program_failed
from flatout.tune.sharding import ALWAYS, AUTO, NEVER, choices, ran_out, verdict

LEVER = "data_parallel"
WAYS = {
    "cut": "as a {} over samples",
    "input": "split as batches enter the model, as a {} over samples",
    "whole": "with the model's outputs gathered",
}
OWN_BATCHES = "it makes its batches without a DataLoader, and they cannot be split as they enter its model"
START_S = 900.0
GRADIENT, LOSS = 1e-3, 1e-3  # relative; a loss that splits differs by rounding alone, any other by far more
CARRIED = 10.0  # times the effect of a change in the last place in one process
ASTRAY = 0.1  # a larger difference is not rounding
ROUGHLY = 0.2  # tolerance around 1/N for the loss of a sum with uneven shares


@dataclass
class Rehearsed(Record):
    """The result of a rehearsal.

    ``division`` is the lever's value, or None if the program is rejected. Then ``why_not`` says why,
    ``instead`` what to do.
    """

    procs: int
    division: dict[str, Any] | None = None
    why_not: str = ""
    instead: str = "Remove --procs to run it as one process"
    losses: list[float] = field(default_factory=list)  # of the reference run
    ranks_losses: list[float] = field(default_factory=list)
    gradient_error: float | None = None
    loss_error: float | None = None
    notes: list[str] = field(default_factory=list)
    shards: bool = False  # weights, gradients and optimizer state are sharded over the ranks
    memory: str = ""  # a sentence about their memory


class Rehearsal:
    """Rehearses a program as ranks.

    ``ranks_of(command)`` returns the command that starts the same program as ranks. ``whole``: the script
    must see whole batches on every rank. ``shard``: whether to shard weights, a word of tune/sharding.py.
    """

    def __init__(
        self,
        command: Command,
        ranks_of: Callable[[Command], Command],
        procs: int,
        job: JobFolder,
        facts: Facts,
        seed: int = 0,
        whole: bool = False,
        stage: Callable[[str, str], None] = lambda name, detail: None,
        shard: str = AUTO,
    ) -> None:
        self.command, self.ranks_of, self.procs, self.job, self.facts = command, ranks_of, procs, job, facts
        self.seed, self.stage = seed, stage
        self.whole, self.shard = whole, shard
        self.found = Rehearsed(procs)
        # Effect of rounding in one process: on gradients of the first step, on losses
        self.rounding: tuple[float, float] | None = None

    def run(self) -> Rehearsed:
        """Rehearse the program. Raises ProgramFailed if it fails as one process."""
        self.stage("rehearsing", "the first steps as one process")
        alone = True  # the reference run is one process
        try:
            reference = self._observed(self.command, Plan())
        except ProgramGone as gone:
            if gone.record.status == "ended":
                return self._refused(
                    f"it ended before {STEPS} training steps were done, so there is too little to compare"
                )
            if missing(gone.record):
                return self._divides_itself(
                    f"it must be started by torchrun ({missing(gone.record)} is not set)", BY_GROUP
                )
            if self.shard == NEVER or not ran_out(gone.record):
                raise _failed(gone.record) from None
            reference, alone = self._sharded_reference(gone.record), False
        self._memory(reference, alone)
        self.found.losses = _numbers(reference["losses"])
        if not all(map(isfinite, self.found.losses)):
            return self._refused(
                "its own loss is NaN or infinite in the first steps, so there is nothing to compare"
            )
        if reference["divides_itself"]:
            return self._divides_itself(how(reference["divides_itself"]), reference["divides_itself"])
        found = self._compared(reference)
        if found.division is None and found.shards and self.shard == AUTO and alone:
            found.memory += f"; not sharded after all: {found.why_not}"
            found.shards, found.why_not = False, ""
            found = self._compared(reference)
        return found

    def _sharded_reference(self, record: TrialRecord) -> dict[str, Any]:
        """Run the reference as ranks, because one process runs out of memory. Raises ProgramFailed."""
        self.stage(
            "rehearsing",
            f"one process ran out of memory: the first steps as {self.procs} ranks with sharded weights and whole batches",
        )
        try:
            return self._observed(
                self.ranks_of(self.command),
                Plan((Choice(LEVER, {"batches": "same", "loaders": ""}), *choices(True))),
            )
        except ProgramGone as gone:
            raise _failed(
                record, f"; {self.procs} ranks with sharded weights fail too: {gone.record.last_line}"
            ) from None

    def _memory(self, reference: dict[str, Any], alone: bool) -> None:
        found = verdict(
            self.shard if alone else ALWAYS, reference["held"], reference["device"], self.facts, self.procs
        )
        self.found.shards = found.divides
        self.found.memory = (
            found.sentence
            if alone
            else f"one process ran out of memory; {found.sentence.removesuffix(', as requested')}"
        )

    def _compared(self, reference: dict[str, Any]) -> Rehearsed:
        why = ""
        for batches in self._ways(reference):
            for reduction in ("mean", "sum"):
                division = {
                    "batches": batches,
                    "reduction": reduction,
                    "loaders": ",".join(map(str, reference["fed"])),
                    "batchnorm": "all",
                    "draws": "all",
                }
                self.stage(
                    "rehearsing", f"the same steps as {self.procs} ranks, {WAYS[batches].format(reduction)}"
                )
                refused = self._tried(division, reference)
                if refused is None:
                    self.found.division = self._real_division(division, reference)
                    self.found.why_not = ""
                    return self.found
                why = why or refused
                if batches == "whole" or not self._looks_like_a_sum():
                    break
        return self._refused(why)

    def _ways(self, reference: dict[str, Any]) -> tuple[str, ...]:
        """Return the ways to split the batches, fastest first.

        A batch the script sees whole is fetched whole by every rank.
        """
        return ("whole",) if self.whole else ("cut", "whole") if reference["fed"] else ("input", "whole")

    def _tried(self, division: dict[str, Any], reference: dict[str, Any]) -> str | None:
        """Try a split; return why it does not compute the same as one process, or None if it does."""
        self.found.ranks_losses = []
        try:
            ranks = self._observed(
                self.ranks_of(self.command), Plan((Choice(LEVER, division), *choices(self.found.shards)))
            )
        except ProgramGone as gone:
            return self._why_failed(gone.record, reference)
        if not ranks["applied"] or ranks["skipped"]:
            return str(ranks["skipped"][0]["reason"]) if ranks["skipped"] else "no lever was applied"
        self._compare(reference, ranks)
        return None if self._holds() or self._carries_rounding_as_far(reference) else self._why(reference)

    def _observed(self, command: Command, plan: Plan, last_places: float = 0.0) -> dict[str, Any]:
        """Run the first steps and return what was recorded. Raises ProgramGone."""
        with Trial(
            command,
            self.job.new_trial(),
            plan,
            self.facts,
            TrialOptions(seed=self.seed, entry=ENTRY, requested={"last_places": last_places}),
        ) as trial:
            return trial.wait_ready(seconds() + START_S)

    def _real_division(self, rehearsed: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
        by_index = rehearsed["batches"] == "cut" and all(
            _by_index(reference["loaders"][at]) for at in reference["fed"]
        )
        return {
            **rehearsed,
            "batches": "index" if by_index else rehearsed["batches"],
            "batchnorm": "own",
            "draws": "own",
        }

    def _compare(self, reference: dict[str, Any], ranks: dict[str, Any]) -> None:
        self.found.gradient_error = _gradient_error(ranks["gradients"], reference["gradients"])
        self.found.ranks_losses = _numbers(ranks["losses"])
        self.found.loss_error = self._loss_error(self.found.ranks_losses, self.found.losses)

    def _looks_like_a_sum(self) -> bool:
        """Judge by the first loss, because clipping hides the size of a gradient."""
        mine, whole = self.found.ranks_losses[:1], self.found.losses[:1]
        return bool(mine and whole and whole[0] and abs(self.procs * mine[0] / whole[0] - 1) < ROUGHLY)

    def _holds(self, gradient: float = 0.0, loss: float = 0.0) -> bool:
        """Whether the errors are small, or at most ``CARRIED`` times these."""
        found = self.found
        if found.gradient_error is None or found.loss_error is None:
            return False
        return found.gradient_error <= max(GRADIENT, CARRIED * gradient) and found.loss_error <= max(
            LOSS, CARRIED * loss
        )

    def _carries_rounding_as_far(self, reference: dict[str, Any]) -> bool:
        """Whether one process amplifies rounding just as much.

        Some programs do, such as deep networks without a warm-up, or two competing networks. The reference
        run is repeated with every weight changed in its last place.
        """
        found = self.found
        if (
            found.gradient_error is None
            or found.gradient_error > ASTRAY
            or self._loss_error(found.ranks_losses[:1], found.losses[:1]) > LOSS
        ):
            return False
        if self.rounding is None:
            self.stage(
                "rehearsing",
                "the first steps as one process with weights perturbed in the last place, to see how far rounding spreads",
            )
            try:
                moved = self._observed(self.command, Plan(), last_places=1.0)
            except ProgramGone:
                return False
            self.rounding = (
                _gradient_error(moved["gradients"], reference["gradients"]) or 0.0,
                self._loss_error(_numbers(moved["losses"]), found.losses),
            )
        gradient, loss = self.rounding
        if self._holds(gradient, loss):
            found.notes.append(
                f"gradients differ by {found.gradient_error:.2g} and losses by {found.loss_error:.2g}; perturbing the weights in the last place makes "
                f"one process differ by {gradient:.2g} and {loss:.2g}"
            )
        return self._holds(gradient, loss)

    @staticmethod
    def _loss_error(a: Sequence[float], b: Sequence[float]) -> float:
        return max(
            (abs(x - y) / max(abs(x), abs(y), 1e-300) for x, y in zip(a, b, strict=False)),
            default=float("inf"),
        )

    def _refused(self, why: str) -> Rehearsed:
        self.found.why_not = why
        return self.found

    def _divides_itself(self, why: str, way: str) -> Rehearsed:
        self.found.instead = meant(way, self.command, self.procs)
        return self._refused(why)

    def _why_failed(self, record: TrialRecord, reference: dict[str, Any]) -> str:
        said = record.last_line
        _, ours, sentence = said.rpartition("CannotParallelize: ")
        if reference["fed"]:
            return sentence if ours else f"split over {self.procs} ranks it fails: {said}"
        return f"{OWN_BATCHES}: {sentence if ours else said}"

    def _why(self, reference: dict[str, Any]) -> str:
        found = self.found
        if found.gradient_error is None:
            return "its first step has no gradient, so there is nothing to compare"
        off = (
            f"split over {self.procs} ranks, the gradients of the first step differ by {found.gradient_error:.2g} of their length, the losses of the first "
            f"steps by {found.loss_error:.2g}"
        )
        if not reference["fed"]:
            return f"{OWN_BATCHES}: {off}"
        return (
            f"its loss is neither a mean nor a sum over samples: {off}. Samples may depend on each other (contrastive losses, mixed samples), or something else may "
            "depend on the batch size"
        )


def _gradient_error(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float | None:
    """Return the distance of two gradient sketches relative to the length of ``b``; None if that is zero.

    A gradient missing from one of them counts as zero.
    """
    pairs = [
        pair
        for one, other in zip_longest(a, b, fillvalue=())
        for pair in zip_longest(one, other, fillvalue=0.0)
    ]
    length = sqrt(sum(y * y for _, y in pairs))
    return sqrt(sum((x - y) ** 2 for x, y in pairs)) / length if length else None


def _by_index(loader: dict[str, Any]) -> bool:
    return not loader["iterable"] and loader["batch_size"] is not None


def _numbers(losses: Sequence[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


def _failed(record: TrialRecord, besides: str = "") -> Exception:
    return program_failed(record, f"the program does not train as one process ({record.last_line}{besides})")
