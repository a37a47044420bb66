"""The process race: programs that take turns with the plain one, each under something that acts before or while it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.measure.clock import seconds
from flatout.plan.lever import Value
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import Ratio
from flatout.plan.words import Moment, Origin
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.arena import Entrant
from flatout.tune.candidates import PROCESSES, Candidate, recall
from flatout.tune.elsewhere import PATIENCE_S
from flatout.tune.orders import race_order, verdicts_in
from flatout.tune.tuning import Tuning, why_gone

MOST_ENTRANTS = 8
BESIDE_THE_ENTRANTS = 2  # the observed program, and a young plain one
FEWEST_RACE_ROUNDS = 4  # rather fewer programs than fewer rounds
RACE_ROUNDS = 12
VALUES_A_LEVER = 4
OLD_TICKS = 50
PROCESSES_LOST = "processes, lost"  # not measured: a search that goes on asks for it again


@dataclass(frozen=True)
class Lineup:
    """What one program of the race runs under: nothing (A/A), one lever, or two that need each other."""

    parts: tuple[tuple[Candidate, Value], ...] = ()

    @property
    def plan(self) -> Plan:
        return Plan(tuple(Choice(candidate.lever.name, value, Origin.TUNER) for candidate, value in self.parts))

    @property
    def name(self) -> str:
        return self.plan.describe() if self.parts else "A/A"

    def measured(self, ratio: Ratio) -> None:
        """A single lever is judged by it; of two together only a gain that neither brings alone is of interest."""
        alone = max(c.median for c, _ in self.parts) if len(self.parts) > 1 else 0.0
        if len(self.parts) == 1 or (ratio.median > alone and ratio.certain):
            for candidate, value in self.parts:
                candidate.measured(value, ratio, PROCESSES if len(self.parts) == 1 else f"{PROCESSES}, together")

    def failed(self, reason: str) -> None:
        for candidate, _ in self.parts if len(self.parts) == 1 else ():
            if candidate.ratio is None:
                candidate.reject(reason)


def process_race(tuning: Tuning) -> None:
    """Levers that act before the program starts, or while its loaders are made; and A/A, the plain program again."""
    arena = tuning.arena
    most = min(MOST_ENTRANTS, tuning.copies - BESIDE_THE_ENTRANTS)
    if tuning.elsewhere is not None and most > 1 and _raced_elsewhere(tuning, most):
        return
    racing: list[tuple[Lineup, Entrant]] = []
    for lineup in lineups(tuning)[:max(0, most)]:
        if tuning.explore_until_s - seconds() < least_race_s(tuning, len(racing) + 1):
            break
        entrant = _start(tuning, lineup)
        if entrant is not None:
            racing.append((lineup, entrant))
    if most < 1:
        for candidate in tuning.candidates.values():
            if candidate.open and not candidate.lever.live:
                candidate.reason = "too few programs like this one fit into memory at once to race it"
    reference = _reference(tuning, racing) if racing else None
    if reference is not None:
        _take_turns(tuning, reference, racing)
    for _, entrant in racing:
        arena.dismiss(entrant.trial)


def lineups(tuning: Tuning) -> list[Lineup]:
    """The likeliest value of each lever first, A/A among the first, what is only worth trying together, and what no live contest could decide."""
    closed = tuning.arena.unit != "step"  # where nothing can be switched live, early levers race here
    levers = [c for c in tuning.candidates.values() if c.open and (not c.lever.live or (closed and c.lever.moment is Moment.IMPORT))]
    levers = recall(levers, tuning.session.contests)
    unclear = sorted((c for c in tuning.candidates.values() if c.undecided and not c.lever.warms_up), key=lambda c: -c.median)
    found = [Lineup(((c, v),)) for depth in range(VALUES_A_LEVER) for c in levers for v in c.values[depth:depth + 1]]
    early = [Lineup()] if tuning.session.noise_floor is None else []
    again = [Lineup(((c, c.choice.value),)) for c in unclear]
    return [*found[:2], *early, *_workers_with_cores_of_their_own(tuning), *_batches_from_memory(tuning), *again, *found[2:]]


def _workers_with_cores_of_their_own(tuning: Tuning) -> list[Lineup]:
    """Workers beside a model that computes on every core slow each other down, and one thread less alone is slower too: together they may win."""
    loader, threads, cores = tuning.candidates.get("loader"), tuning.candidates.get("threads"), tuning.facts.cores
    if loader is None or threads is None or not threads.values:
        return []
    counts = [v["workers"] for v in loader.values if isinstance(v, dict) and 0 < v.get("workers", 0) < cores]
    return [Lineup(((threads, cores - n), (loader, {"workers": n}))) for n in counts[:1]]


def _batches_from_memory(tuning: Tuning) -> list[Lineup]:
    """Fetching samples and transforming them take turns in being the wall; and what makes batches that fast needs no workers."""
    kept, batched, loader = (tuning.candidates.get(name) for name in ("cached_prefix", "batched_transforms", "loader"))
    if kept is None or batched is None or not (kept.open and batched.open):
        return []
    together = [((kept, kept.values[0]), (batched, value)) for value in batched.values]
    without = [value for value in loader.values if isinstance(value, dict) and value.get("workers") == 0] if loader is not None and loader.open else []
    return [*map(Lineup, together), *(Lineup(((loader, value), *together[0])) for value in without if loader is not None)]


def least_race_s(tuning: Tuning, entrants: int) -> float:
    """What it takes to start one more program (and a young plain one), and for a few rounds of all of them."""
    return 2 * tuning.start_cost_s + FEWEST_RACE_ROUNDS * tuning.arena.block_s * (entrants + 2)


def _reference(tuning: Tuning, racing: list[tuple[Lineup, Entrant]]) -> Trial | None:
    """The plain program that the others race against: as young as they are. Episodes lengthen and caches fill as training goes on.

    Where there is no time to start one more, the second plain program of the race serves, and leaves ``racing``.
    """
    old = tuning.observed if tuning.observed in tuning.arena.running else None
    if old is not None and old.ticks_done <= OLD_TICKS:
        return old
    if old is None or tuning.explore_until_s - seconds() >= 2 * tuning.start_cost_s:
        try:
            return tuning.enter(Plan()).trial
        except (ProgramGone, LeverFailed):
            pass
    twin = next((one for one in racing if not one[0].parts), None)
    if twin is None or len(racing) < 2:
        return old
    racing.remove(twin)
    return twin[1].trial


def _start(tuning: Tuning, lineup: Lineup) -> Entrant | None:
    tuning.watcher.stage("starting", f"a program with {lineup.plan.describe()}" if lineup.parts else "the plain program again (A/A)")
    start_s = seconds()
    try:
        return tuning.enter(lineup.plan, patience_s=60 + 4 * tuning.start_cost_s)
    except (ProgramGone, LeverFailed) as error:
        if lineup.parts:
            lineup.failed(f"the program does not survive it: {why_gone(error)}" if isinstance(error, ProgramGone) else why_gone(error))
            tuning.note(lineup.name, PROCESSES, None, why_gone(error), start_s)
        return None


def _take_turns(tuning: Tuning, plain: Trial, racing: list[tuple[Lineup, Entrant]]) -> None:
    arena, start_s = tuning.arena, seconds()
    tuning.watcher.stage("race", f"{len(racing)} programs take turns with the plain one")
    names = {id(entrant): lineup.name for lineup, entrant in racing}
    left_s = tuning.explore_until_s - seconds()
    kept_s = tuning.start_cost_s + 20 * arena.block_s  # for taking winners away again
    until_s = seconds() + min(max(RACE_ROUNDS * arena.block_s * (len(racing) + 1), 15.0), max(left_s - kept_s, 0.6 * left_s))
    verdicts = arena.processes(plain, [e for _, e in racing], until_s, heard=lambda e, r: tuning.watcher.contest(names[id(e)], r))
    _judge(tuning, [lineup for lineup, _ in racing], verdicts, start_s)
    if plain is not tuning.observed:
        arena.dismiss(plain)
    tuning.save()


def _judge(tuning: Tuning, racing: Sequence[Lineup], verdicts: Mapping[int, Ratio | str], start_s: float, host: str = "") -> None:
    """What one race has shown. Of several races, on machines of their own, the largest noise floor counts."""
    twin = next((verdicts[at] for at, lineup in enumerate(racing) if not lineup.parts and at in verdicts), None)
    if isinstance(twin, Ratio):
        floor = max(0.01, abs(math.log(twin.median)))
        if tuning.session.noise_floor is None or not host or floor > tuning.floor:
            tuning.session.noise_floor, tuning.floor = twin, floor
        # Two processes of one program differ by luck. The mean of both plain ones is a fairer measure than either.
        luck = math.sqrt(twin.median)
        verdicts = {at: v.against(luck) if isinstance(v, Ratio) and v is not twin else v for at, v in verdicts.items()}
    for at in sorted(verdicts, key=lambda at: len(racing[at].parts)):  # what is together is judged beside what was alone
        verdict, lineup = verdicts[at], racing[at]
        if isinstance(verdict, str):
            lineup.failed(f"the program does not survive it: {verdict}")
            tuning.note(lineup.name, PROCESSES, None, verdict, start_s, host=host)
        else:
            lineup.measured(verdict)
            tuning.note(lineup.name, PROCESSES, verdict, "", start_s, host=host)


def _raced_elsewhere(tuning: Tuning, most: int) -> bool:
    """Races on other machines, at once: each has a plain program, A/A, and its share of the others. False where there was no time or no machine."""
    elsewhere, start_s = tuning.elsewhere, seconds()
    assert elsewhere is not None
    left_s = tuning.explore_until_s - start_s
    todo = [lineup for lineup in lineups(tuning) if lineup.parts]
    each = 0  # beside A/A
    while each < min(most - 1, math.ceil(len(todo) / max(len(elsewhere.ready), 1))) and _race_elsewhere_s(tuning, each + 1) <= left_s:
        each += 1
    if not each or not elsewhere.ready:
        return False
    todo = todo[:each * len(elsewhere.ready)]
    shares = [[Lineup(), *todo[at::len(elsewhere.ready)]] for at in range(min(len(elsewhere.ready), len(todo)))]
    tuning.watcher.stage("race", f"{len(todo)} programs take turns with plain ones, on {len(shares)} node{'s' * (len(shares) > 1)} at once")
    for_s = min(max(RACE_ROUNDS * tuning.arena.block_s * (each + 2), 15.0), left_s - (each + 2) * tuning.start_cost_s)
    orders = [race_order(tuning, [lineup.plan for lineup in share], for_s) for share in shares]
    for held in elsewhere.held(orders, PATIENCE_S + for_s + 4 * (each + 2) * tuning.start_cost_s):
        if held.answer is not None:
            _judge(tuning, shares[held.number], verdicts_in(held.answer), start_s, held.host)
            continue
        for lineup in shares[held.number]:
            tuning.note(lineup.name, PROCESSES_LOST, None, held.why, start_s, host=held.host)
    tuning.save()
    return True


def _race_elsewhere_s(tuning: Tuning, each: int) -> float:
    """What a race of so many takes on a node, beside A/A and a plain program: their starts, one after another, and a few rounds."""
    return (each + 2) * (tuning.start_cost_s + FEWEST_RACE_ROUNDS * tuning.arena.block_s)
