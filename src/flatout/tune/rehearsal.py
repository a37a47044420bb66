"""The rehearsal: tests whether a single-device program can be split over ranks, and how.

A *reference run* trains the first steps of the program as it is. Then the program runs as N ranks on the same
batches, each cut into N parts. Random numbers and batch statistics are exactly those of one process, so only
rounding may differ. The gradients and losses, compared with the reference run, show how the loss splits:

    equal                              a mean over samples
    same gradients, losses 1/N as big  a sum over samples; rehearsed once more as a sum
    anything else                      only the model splits, not the loss; outputs are gathered (*whole*)
    not that either                    the program does not run as ranks

If weights, gradients and optimizer state do not fit on one device together (`tune/sharding.py`), the
rehearsal shards them too. If a single process cannot even be the reference run, N ranks are: each keeps its
shard of the weights and computes every whole batch, so the average of their gradients is that of one process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isfinite, sqrt
from typing import Any

from flatout.job.folder import JobFolder
from flatout.job.rank_environment import RANK_VARIABLES
from flatout.launch.command import Command, is_python, parse_python
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Record, TrialRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.reference_run import BY_GROUP, BY_LAUNCHER, ENTRY, IN_CHILDREN, STEPS
from flatout.trial.spec import TrialOptions
from flatout.tune.endings import failure_error
from flatout.tune.sharding import ALWAYS, AUTO, NEVER, choices, decide, ran_out_of_memory

EXPLANATIONS = {
    BY_LAUNCHER: "a launcher starts it and creates the ranks",
    IN_CHILDREN: "it trains in processes that it starts itself",
}
OWN_GROUP = "it is already data-parallel (it calls torch.distributed.init_process_group)"
MISSING_VARIABLE = re.compile(
    r"environment variable (?P<name>\w+) expected, but not set|KeyError: '(?P<key>\w+)'"
)


def explain(rank_source: str) -> str:
    """The explanation, without a full stop, for how a reference run creates its ranks."""
    return EXPLANATIONS.get(rank_source, OWN_GROUP)


def missing_variable(record: TrialRecord) -> str:
    """The launcher variable whose absence made the program fail; empty if it failed otherwise."""
    lines = (record.reason or record.log_tail).strip().splitlines()
    match = MISSING_VARIABLE.search(lines[-1]) if lines else None
    name = (match["name"] or match["key"]) if match else ""
    return name if name in RANK_VARIABLES else ""


def advice_for(rank_source: str, command: Command, procs: int) -> str:
    """Say what to do instead of --procs, with the command."""
    shown = shlex.join(command.shown)
    if rank_source == BY_LAUNCHER:
        return f"Remove --procs and set the number of ranks in the launcher: flatout run {shown}"
    if rank_source == IN_CHILDREN:
        return f"Remove --procs; the program starts its own processes: flatout run {shown}"
    return f"Remove --procs and let torchrun start the ranks: flatout run torchrun --nproc-per-node {procs} {_for_torchrun(command)}"


def _for_torchrun(command: Command) -> str:
    """The program in the form torchrun expects: a script or ``-m module``, with its arguments."""
    if not is_python(command.typed[0]):
        is_script = command.typed[0].endswith(".py")
        return f"{'' if is_script else '--no-python '}{shlex.join(command.typed)}"
    line = parse_python(command.typed)
    if line.kind not in ("script", "module"):
        return f"--no-python {shlex.join(command.typed)}"
    return shlex.join([*(["-m"] if line.kind == "module" else []), *line.words])


LEVER = "data_parallel"
SPLIT_WORDS = {
    "cut": "as a {} over samples",
    "input": "split as batches enter the model, as a {} over samples",
    "whole": "with the model's outputs gathered",
}
NO_LOADER = "it makes its batches without a DataLoader, and they cannot be split as they enter its model"
START_TIMEOUT_S = 900.0
GRADIENT_TOLERANCE, LOSS_TOLERANCE = (
    1e-3,
    1e-3,
)  # relative; a loss that splits differs by rounding alone, any other by far more
ROUNDING_FACTOR = 10.0  # times the effect of a change in the last place in one process
MAX_ROUNDING_ERROR = 0.1  # a larger difference is not rounding
SUM_TOLERANCE = 0.2  # tolerance around 1/N for the loss of a sum with uneven shares


@dataclass
class RehearsalResult(Record):
    """The result of a rehearsal.

    ``division`` is the lever's value, or None if the program is rejected. Then ``why_not`` says why,
    ``advice`` what to do.
    """

    procs: int
    division: dict[str, Any] | None = None
    why_not: str = ""
    advice: str = "Remove --procs to run it as one process"
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
        self.result = RehearsalResult(procs)
        # Effect of rounding in one process: on gradients of the first step, on losses
        self.rounding: tuple[float, float] | None = None

    def run(self) -> RehearsalResult:
        """Rehearse the program. Raises ProgramFailed if it fails as one process."""
        self.stage("rehearsing", "the first steps as one process")
        one_process = True  # the reference run is one process
        try:
            reference = self._run_steps(self.command, Plan())
        except ProgramGone as gone:
            if gone.record.status == "ended":
                return self._reject(
                    f"it ended before {STEPS} training steps were done, so there is too little to compare"
                )
            if missing_variable(gone.record):
                return self._reject_parallel(
                    f"it must be started by torchrun ({missing_variable(gone.record)} is not set)", BY_GROUP
                )
            if self.shard == NEVER or not ran_out_of_memory(gone.record):
                raise _failed_alone(gone.record) from None
            reference, one_process = self._sharded_reference(gone.record), False
        self._check_memory(reference, one_process)
        self.result.losses = _numbers(reference["losses"])
        if not all(map(isfinite, self.result.losses)):
            return self._reject(
                "its own loss is NaN or infinite in the first steps, so there is nothing to compare"
            )
        if reference["own_ranks"]:
            return self._reject_parallel(explain(reference["own_ranks"]), reference["own_ranks"])
        result = self._try_splits(reference)
        if result.division is None and result.shards and self.shard == AUTO and one_process:
            result.memory += f"; not sharded after all: {result.why_not}"
            result.shards, result.why_not = False, ""
            result = self._try_splits(reference)
        return result

    def _sharded_reference(self, record: TrialRecord) -> dict[str, Any]:
        self.stage(
            "rehearsing",
            f"one process ran out of memory: the first steps as {self.procs} ranks with sharded weights and whole batches",
        )
        try:
            return self._run_steps(
                self.ranks_of(self.command),
                Plan((Choice(LEVER, {"batches": "same", "loaders": ""}), *choices(True))),
            )
        except ProgramGone as gone:
            raise _failed_alone(
                record, f"; {self.procs} ranks with sharded weights fail too: {gone.record.error_line}"
            ) from None

    def _check_memory(self, reference: dict[str, Any], one_process: bool) -> None:
        result = decide(
            self.shard if one_process else ALWAYS,
            reference["state_bytes"],
            reference["device"],
            self.facts,
            self.procs,
        )
        self.result.shards = result.shards
        self.result.memory = (
            result.sentence
            if one_process
            else f"one process ran out of memory; {result.sentence.removesuffix(', as requested')}"
        )

    def _try_splits(self, reference: dict[str, Any]) -> RehearsalResult:
        why = ""
        for batches in self._split_modes(reference):
            for reduction in ("mean", "sum"):
                division = {
                    "batches": batches,
                    "reduction": reduction,
                    "loaders": ",".join(map(str, reference["training_loaders"])),
                    "batchnorm": "all",
                    "draws": "all",
                }
                split = SPLIT_WORDS[batches].format(reduction)
                self.stage("rehearsing", f"the same steps as {self.procs} ranks, {split}")
                failure = self._try_split(division, reference)
                if failure is None:
                    self.result.division = self._real_division(division, reference)
                    self.result.why_not = ""
                    return self.result
                why = why or failure
                if batches == "whole" or not self._looks_like_a_sum():
                    break
        return self._reject(why)

    def _split_modes(self, reference: dict[str, Any]) -> tuple[str, ...]:
        """The ways to split the batches, fastest first.

        A batch the script sees whole is fetched whole by every rank.
        """
        if self.whole:
            return ("whole",)
        return ("cut", "whole") if reference["training_loaders"] else ("input", "whole")

    def _try_split(self, division: dict[str, Any], reference: dict[str, Any]) -> str | None:
        """Try a split; return why it does not compute the same as one process, or None if it does."""
        self.result.ranks_losses = []
        try:
            plan = Plan((Choice(LEVER, division), *choices(self.result.shards)))
            ranks = self._run_steps(self.ranks_of(self.command), plan)
        except ProgramGone as gone:
            return self._why_failed(gone.record, reference)
        if not ranks["applied"] or ranks["skipped"]:
            return str(ranks["skipped"][0]["reason"]) if ranks["skipped"] else "no lever was applied"
        self._compare(reference, ranks)
        equal = self._within_tolerance() or self._explained_by_rounding(reference)
        return None if equal else self._difference(reference)

    def _run_steps(self, command: Command, plan: Plan, weight_ulps: float = 0.0) -> dict[str, Any]:
        with Trial(
            command,
            self.job.new_trial(),
            plan,
            self.facts,
            TrialOptions(seed=self.seed, entry=ENTRY, requested={"weight_ulps": weight_ulps}),
        ) as trial:
            return trial.wait_ready(seconds() + START_TIMEOUT_S)

    def _real_division(self, rehearsed: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
        loaders = [reference["loaders"][number] for number in reference["training_loaders"]]
        by_index = rehearsed["batches"] == "cut" and all(
            not loader["iterable"] and loader["batch_size"] is not None for loader in loaders
        )
        batches = "index" if by_index else rehearsed["batches"]
        return {**rehearsed, "batches": batches, "batchnorm": "own", "draws": "own"}

    def _compare(self, reference: dict[str, Any], ranks: dict[str, Any]) -> None:
        self.result.gradient_error = _gradient_error(ranks["gradients"], reference["gradients"])
        self.result.ranks_losses = _numbers(ranks["losses"])
        self.result.loss_error = self._loss_error(self.result.ranks_losses, self.result.losses)

    def _looks_like_a_sum(self) -> bool:
        """Judge by the first loss, because clipping hides the size of a gradient."""
        ranks_loss, plain_loss = self.result.ranks_losses[:1], self.result.losses[:1]
        return bool(
            ranks_loss
            and plain_loss
            and plain_loss[0]
            and abs(self.procs * ranks_loss[0] / plain_loss[0] - 1) < SUM_TOLERANCE
        )

    def _within_tolerance(self, gradient_noise: float = 0.0, loss_noise: float = 0.0) -> bool:
        result = self.result
        if result.gradient_error is None or result.loss_error is None:
            return False
        return result.gradient_error <= max(
            GRADIENT_TOLERANCE, ROUNDING_FACTOR * gradient_noise
        ) and result.loss_error <= max(LOSS_TOLERANCE, ROUNDING_FACTOR * loss_noise)

    def _explained_by_rounding(self, reference: dict[str, Any]) -> bool:
        """Whether one process amplifies rounding just as much.

        The reference run is repeated with every weight changed in its last place.
        """
        result = self.result
        if (
            result.gradient_error is None
            or result.gradient_error > MAX_ROUNDING_ERROR
            or self._loss_error(result.ranks_losses[:1], result.losses[:1]) > LOSS_TOLERANCE
        ):
            return False
        if self.rounding is None:
            self.stage(
                "rehearsing",
                "the first steps as one process with weights perturbed in the last place, to see how far rounding spreads",
            )
            try:
                perturbed = self._run_steps(self.command, Plan(), weight_ulps=1.0)
            except ProgramGone:
                return False
            self.rounding = (
                _gradient_error(perturbed["gradients"], reference["gradients"]) or 0.0,
                self._loss_error(_numbers(perturbed["losses"]), result.losses),
            )
        gradient, loss = self.rounding
        if self._within_tolerance(gradient, loss):
            result.notes.append(
                f"gradients differ by {result.gradient_error:.2g} and losses by {result.loss_error:.2g}; perturbing the weights in the last place makes "
                f"one process differ by {gradient:.2g} and {loss:.2g}"
            )
        return self._within_tolerance(gradient, loss)

    @staticmethod
    def _loss_error(a: Sequence[float], b: Sequence[float]) -> float:
        return max(
            (abs(x - y) / max(abs(x), abs(y), 1e-300) for x, y in zip(a, b, strict=False)),
            default=float("inf"),
        )

    def _reject(self, why: str) -> RehearsalResult:
        self.result.why_not = why
        return self.result

    def _reject_parallel(self, why: str, rank_source: str) -> RehearsalResult:
        self.result.advice = advice_for(rank_source, self.command, self.procs)
        return self._reject(why)

    def _why_failed(self, record: TrialRecord, reference: dict[str, Any]) -> str:
        message = record.error_line
        _, split_error, sentence = message.rpartition("CannotParallelize: ")
        if reference["training_loaders"]:
            return sentence if split_error else f"split over {self.procs} ranks it fails: {message}"
        return f"{NO_LOADER}: {sentence if split_error else message}"

    def _difference(self, reference: dict[str, Any]) -> str:
        result = self.result
        if result.gradient_error is None:
            return "its first step has no gradient, so there is nothing to compare"
        difference = (
            f"split over {self.procs} ranks, the gradients of the first step differ by {result.gradient_error:.2g} of their length, the losses of the first "
            f"steps by {result.loss_error:.2g}"
        )
        if not reference["training_loaders"]:
            return f"{NO_LOADER}: {difference}"
        return (
            f"its loss is neither a mean nor a sum over samples: {difference}. Samples may depend on each other (contrastive losses, mixed samples), or something else may "
            "depend on the batch size"
        )


def _gradient_error(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float | None:
    """The distance of two gradient sketches relative to the length of ``b``; None if that is zero.

    A gradient missing from one of them counts as zero.
    """
    pairs = [
        pair
        for one, other in zip_longest(a, b, fillvalue=())
        for pair in zip_longest(one, other, fillvalue=0.0)
    ]
    length = sqrt(sum(y * y for _, y in pairs))
    return sqrt(sum((x - y) ** 2 for x, y in pairs)) / length if length else None


def _numbers(losses: Sequence[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


def _failed_alone(record: TrialRecord, suffix: str = "") -> Exception:
    return failure_error(record, f"the program does not train as one process ({record.error_line}{suffix})")
