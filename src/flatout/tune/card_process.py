"""The processes of a search on a GPU, and what is known before the first one is seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.levers import TABLE
from flatout.schema.enums import Moment, Status
from flatout.schema.lever import Skip
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import TrialRecord
from flatout.trial.parent import Trial
from flatout.tune.candidates import ordered_plan
from flatout.tune.card_state import Keys, Program
from flatout.tune.comparison import Member
from flatout.tune.tuning import Tuning

Bits = dict[int, tuple[list[str], str]]  # losses before a step, and the digest of the weights after it


@dataclass
class Process:
    """A process of the search: what the policy sees of it, and its trial."""

    program: Program
    trial: Trial
    member: Member
    since_s: float  # when it was started or released
    first_bits: Bits = field(default_factory=dict)  # of the checked steps
    record: TrialRecord | None = None


def suits(tuning: Tuning) -> bool:
    """Whether this search may be one on a GPU, before the program is seen."""
    goal = tuning.goal
    simple = tuning.base is None and tuning.single_command is None and tuning.remote is None
    return bool(tuning.facts.cuda) and simple and not goal.named and goal.memory_limit_bytes is None


def keys_of_plan(plan: Plan) -> Keys:
    return frozenset(choice.text for choice in plan)


def process_plan(tuning: Tuning) -> Plan:
    """The levers of the first plan that act before a program starts: they depend on the machine alone."""
    choices = []
    for lever in TABLE:
        allowed = tuning.goal.only_levers is None or lever.name in tuning.goal.only_levers
        if lever.moment is not Moment.PROCESS or not allowed or lever.effect not in tuning.goal.effects:
            continue
        answer = lever.applies(tuning.facts, None)
        if not isinstance(answer, Skip):
            choices.append(Choice(lever.name, answer.values[0]))
    return ordered_plan(choices)


def first_bits_of(record: TrialRecord, steps: int) -> Bits:
    """The losses before, and the digest of the weights after, each step whose weights were digested."""
    bits: Bits = {}
    for step in map(int, record.weights_digests):
        if step <= steps:
            before = sum(at < step for at in record.loss_steps)
            bits[step] = record.losses[:before], record.weights_digests[str(step)]
    return bits


def same_bits(a: Bits, b: Bits) -> bool:
    """Whether the bits are equal at each step that both have; there must be one."""
    steps = a.keys() & b.keys()
    return bool(steps) and all(a[step] == b[step] for step in steps)


RESULT_FIELDS = ("guard", "baseline", "best", "speedup", "payback_steps", "certificate")


def result_of(tuning: Tuning) -> tuple[dict[str, Any], dict[str, tuple[Status, str]]]:
    """What a confirmation changes in the session and its candidates."""
    return (
        {name: getattr(tuning.session, name) for name in RESULT_FIELDS},
        {name: (c.status, c.reason) for name, c in tuning.candidates.items()},
    )


def restore_result(tuning: Tuning, result: tuple[dict[str, Any], dict[str, tuple[Status, str]]]) -> None:
    vars(tuning.session).update(result[0])
    for name, (status, reason) in result[1].items():
        tuning.candidates[name].status, tuning.candidates[name].reason = status, reason
