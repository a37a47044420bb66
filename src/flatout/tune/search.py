"""The search: observe, race, combine, take each away again, confirm in fresh processes, guard.

    observe    one plain program to its steady state; every lever says whether it applies
    live race  levers that can be switched between steps, one after another, against the plain program inside it
    race       levers that need a process of their own, in turns with the plain one; among them a second plain program
               (A/A), which gives the noise floor
    combine    the winners together; then each is taken away again, and stays away if nothing is lost
    confirm    at least three fresh pairs of processes, plain and tuned, each pair with a seed of its own; the same runs
               give the guard its loss curves

Everything is written down as it comes; a search that is interrupted goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.engine.guard import judge
from flatout.launch.command import Command
from flatout.levers import TABLE
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, compare
from flatout.plan.errors import NothingMeasured, ProgramFailed
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.lever import Lever, Value
from flatout.plan.plan import Choice, Plan, spell
from flatout.plan.records import Contest, GuardRecord, LeverRecord, Ratio, SessionRecord, Side, TrialRecord
from flatout.plan.words import Effect, Moment, Origin, Status
from flatout.tune.arena import Arena, Entrant, LeverFailed, ask_options, ask_replica
from flatout.trial.parent import ProgramGone, Trial

PAIRS = 3
ROUNDS_OF_A_PAIR = 6
CONFIRM_SHARE = 0.55  # of the budget at most is kept back for confirming
WORTH_COMBINING = 1.01
MOST_ENTRANTS = 7
FEWEST_TICKS = 6  # a program with fewer steps than this cannot be compared with anything
COMPILE_S = 75.0  # what a first compilation is given


class Watcher:
    """What a person in front of the search sees. Every method does nothing."""

    def stage(self, name: str, detail: str = "") -> None: ...
    def contest(self, plan: str, ratio: Ratio | None, note: str = "") -> None: ...
    def saved(self, session: SessionRecord) -> None: ...


@dataclass
class Candidate:
    """A lever with the values this program allows, and what was measured of the best of them."""

    lever: Lever
    values: tuple[Value, ...]
    effect: Effect
    value: Value | None = None
    ratio: Ratio | None = None
    how: str = ""
    reason: str = ""
    status: Status = Status.SKIPPED

    @property
    def choice(self) -> Choice:
        assert self.value is not None
        return Choice(self.lever.name, self.value, Origin.TUNER)


@dataclass
class Goal:
    budget_s: float
    effects: frozenset[Effect] = frozenset({Effect.EXACT, Effect.ROUNDING, Effect.RESAMPLED})
    only: frozenset[str] | None = None
    horizon_s: float = 3600.0


@dataclass
class Search:
    command: Command
    job: JobFolder
    facts: Facts
    session: SessionRecord
    goal: Goal
    watcher: Watcher = field(default_factory=Watcher)
    save: Callable[[SessionRecord], None] = lambda session: None

    def __post_init__(self) -> None:
        self.start_s = seconds() - self.session.spent_s
        self.arena = Arena(self.command, self.job, self.facts)
        self.candidates: dict[str, Candidate] = {}
        self.floor = 0.01
        self.start_cost_s = 5.0
        self.first_plain: TrialRecord | None = None

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def spent_s(self) -> float:
        return seconds() - self.start_s

    @property
    def left_s(self) -> float:
        return self.goal.budget_s - self.spent_s

    @property
    def confirm_s(self) -> float:
        """What three pairs will cost: two starts and a few blocks each."""
        return PAIRS * 2 * (self.start_cost_s + self._rounds * self.arena.block_s) * 1.05 + 3

    @property
    def _rounds(self) -> int:
        return max(2, min(ROUNDS_OF_A_PAIR, int(6.0 / max(self.arena.block_s, 0.1))))

    @property
    def explore_until_s(self) -> float:
        return self.start_s + self.goal.budget_s - min(self.confirm_s, CONFIRM_SHARE * self.goal.budget_s)

    # -- the whole --------------------------------------------------------------------------------------------------

    def run(self) -> SessionRecord:
        """Raises ProgramFailed where the plain program fails by itself, NothingMeasured where it does not train."""
        try:
            plain = self._observe()
            self._live_race(plain.trial)
            self._race(plain)
            tuned = self._combine()
            if tuned and plain.trial in self.arena._running:
                replica = self._replica(plain.trial, tuned)
                tuned = [c for c in tuned if c.status is not Status.REJECTED]
            else:
                replica = None
            self._keep_first_record(plain.trial)
            self._settle(tuned, replica)
        finally:
            self.arena.close()
            self.session.spent_s = self.spent_s
            self._note_levers()
            self.save(self.session)
        return self.session

    # -- observe ----------------------------------------------------------------------------------------------------

    def _observe(self) -> Entrant:
        self.watcher.stage("observing", "the plain program, until its steps are steady")
        try:
            plain = self.arena.enter(Plan(), 0, patience_s=max(60.0, 0.8 * self.goal.budget_s))
        except ProgramGone as gone:
            raise self._why_not(gone.record) from None
        ready = plain.trial.ready
        self.start_cost_s = plain.start_s
        self.arena.tick_ms, self.arena.unit = max(ready["tick_ms"], 1e-3), ready["unit"]
        answer = ask_options(plain.trial)
        self.session.scene = answer["scene"]
        workers = max((loader["num_workers"] for loader in answer["scene"]["loaders"]), default=0)
        self.arena.prefetched_ticks = 3 * workers
        self._consider(answer["options"])
        self.session.baseline = Side(step_ms=ready["tick_ms"], unit=ready["unit"], warmup_ms=ready["warmup_ms"])
        self._save()
        return plain

    def _why_not(self, record: TrialRecord) -> Exception:
        if record.status == "failed":
            what = f"the program fails by itself (exit code {record.exit_code}), before flatout changes anything"
            return ProgramFailed(f"{what}:\n\n{record.log_tail.strip() or record.reason}", record.exit_code or 1)
        if record.status == "unattached":
            why = f"`python {self.command.closed}` keeps flatout out; leave the option away" if self.command.closed else record.reason
            return NothingMeasured(f"there is nothing to tune: {why}. The program was left as it is.")
        if record.status == "hung":
            return NothingMeasured(f"the program did not train: {record.reason}. Give more time with --budget, or look at {self.job.trials}.")
        steps = len(set(record.loss_steps))
        seen = f"it ended after {steps} training {'step' if steps == 1 else 'steps'}" if steps else "it ended without a training step"
        return NothingMeasured(f"there is nothing to tune: {seen}; comparing takes about {FEWEST_TICKS + 8}. Let it train longer while tuning.")

    def _consider(self, options: dict[str, Any]) -> None:
        for lever in TABLE:
            answer = options[lever.name]
            if "skip" in answer:
                self.candidates[lever.name] = Candidate(lever, (), lever.effect, reason=answer["skip"])
                continue
            effect = Effect(answer["effect"]) if answer["effect"] else lever.effect
            candidate = Candidate(lever, tuple(answer["values"]), effect)
            if self.goal.only is not None and lever.name not in self.goal.only:
                candidate.reason = "it was not among the levers asked for"
            elif effect not in self.goal.effects:
                candidate.reason = f"its effect here is {effect}, which was not asked for"
            else:
                candidate.reason = "there was no time left to measure it"
                self.candidates[lever.name] = candidate
                continue
            candidate.values = ()
            self.candidates[lever.name] = candidate

    def _open(self, live: bool) -> list[Candidate]:
        """What is still to be measured, cheap ones first."""
        found = [c for c in self.candidates.values() if c.values and c.ratio is None and c.status is Status.SKIPPED and c.lever.live == live]
        return sorted(found, key=lambda c: c.lever.warms_up)

    # -- live race --------------------------------------------------------------------------------------------------

    def _live_race(self, plain: Trial) -> None:
        if self.arena.unit != "step":
            return  # inside a closure nothing may be switched
        todo = self._recall(self._open(live=True))
        # What switching cannot show (malloc, workers) needs its own time; half of the exploring is for these races.
        until = seconds() + 0.5 * max(0.0, self.explore_until_s - seconds())
        for at, candidate in enumerate(todo):
            left = until - seconds()
            needs = COMPILE_S if candidate.lever.warms_up and candidate.lever.name == "compile" else 6 * self.arena.block_s
            if left < needs:
                continue
            share = left / (len(todo) - at)
            for value in candidate.values[:2]:
                self._live_contest(plain, candidate, value, seconds() + min(12.0, share / len(candidate.values[:2])))
                if plain not in self.arena._running:
                    return
            self._save()

    def _live_contest(self, plain: Trial, candidate: Candidate, value: Value, until_s: float) -> None:
        choice = Choice(candidate.lever.name, value, Origin.TUNER)
        self.watcher.stage("live race", f"{spell(choice.name, choice.value)}, switched on and off in the running program")
        start = seconds()
        name = spell(choice.name, choice.value)
        try:
            if candidate.lever.warms_up:
                self._warm_up(plain, choice)
                until_s = max(until_s, seconds() + 4 * self.arena.block_s)
            ratio = self.arena.live(plain, (), (choice,), until_s, heard=lambda r: self.watcher.contest(name, r))
            plain.switch((), seconds() + 60)
        except LeverFailed as failed:
            candidate.reason, candidate.status = failed.reason, Status.REJECTED
            self._contest(name, "live", None, failed.reason, start)
            return
        except ProgramGone as gone:
            candidate.status, candidate.reason = Status.REJECTED, f"the program does not survive it: {_first_line(gone.record)}"
            self._contest(name, "live", None, candidate.reason, start)
            self.arena.dismiss(plain)
            return
        self._contest(name, "live", ratio, "", start)
        self._measured(candidate, value, ratio, "live")

    def _warm_up(self, plain: Trial, choice: Choice) -> None:
        answer = plain.switch((choice,), seconds() + COMPILE_S)
        if answer["skipped"]:
            raise LeverFailed(choice.name, answer["skipped"][0]["reason"])
        for _ in range(3):
            self.arena.run(plain, 2)

    def _measured(self, candidate: Candidate, value: Value, ratio: Ratio, how: str) -> None:
        if candidate.ratio is None or ratio.median > candidate.ratio.median:
            candidate.value, candidate.ratio, candidate.how = value, ratio, how
        best = candidate.ratio
        candidate.status = Status.REJECTED
        if best.high < 1.0:
            candidate.reason = "slower here"
        elif best.median < WORTH_COMBINING or best.low < 0.97:
            candidate.reason = "no gain that stands out from the noise"
        else:
            candidate.reason = ""
            candidate.status = Status.SKIPPED  # a winner so far; combining decides

    # -- process race -----------------------------------------------------------------------------------------------

    def _race(self, plain: Entrant) -> None:
        if plain.trial not in self.arena._running:
            return
        levers = self._open(live=False)
        if self.arena.unit != "step":
            levers += [c for c in self._open(live=True) if c.lever.moment in (Moment.IMPORT,)]
        levers = self._recall(levers)
        wanted = [(c, value) for depth in range(4) for c in levers for value in c.values[depth:depth + 1]]
        entrants: list[tuple[Candidate | None, Value, Entrant]] = []
        want_floor = True
        while wanted or want_floor:
            # Starting a program costs its start-up; racing it costs a few blocks. Both must fit.
            blocks = 2 * FEWEST_RACE_ROUNDS * self.arena.block_s * (len(entrants) + 2) / max(len(entrants) + 1, 1)
            if self.explore_until_s - seconds() < self.start_cost_s + blocks + FEWEST_RACE_ROUNDS * self.arena.block_s * len(entrants) or len(entrants) >= MOST_ENTRANTS:
                break
            if want_floor and (len(entrants) >= 2 or not wanted):
                want_floor = False
                candidate, value = None, True
            else:
                candidate, value = wanted.pop(0)
            entrant = self._enter_race(candidate, value)
            if entrant is not None:
                entrants.append((candidate, value, entrant))
        if entrants:
            self._race_them(plain, entrants)

    def _enter_race(self, candidate: Candidate | None, value: Value) -> Entrant | None:
        plan = Plan() if candidate is None else Plan((Choice(candidate.lever.name, value, Origin.TUNER),))
        self.watcher.stage("starting", f"a program of its own for {'A/A, the plain program again' if candidate is None else plan.describe()}")
        start = seconds()
        try:
            return self.arena.enter(plan, 0, patience_s=60 + 4 * self.start_cost_s)
        except ProgramGone as gone:
            if candidate is not None:
                candidate.status, candidate.reason = Status.REJECTED, f"the program does not survive it: {_first_line(gone.record)}"
                self._contest(plan.describe(), "processes", None, candidate.reason, start)
            return None

    def _race_them(self, plain: Entrant, entrants: list[tuple[Candidate | None, Value, Entrant]]) -> None:
        self.watcher.stage("race", f"{len(entrants)} programs take turns with the plain one")
        names = ["A/A" if c is None else e.plan.describe() for c, _, e in entrants]
        start = seconds()
        rounds_s = self.arena.block_s * (len(entrants) + 2)
        until = min(self.explore_until_s, seconds() + max(12 * rounds_s, 15.0))
        until -= min(0.3 * (until - seconds()), 30.0)  # something is kept for taking winners away again
        index = {id(e): n for (_, _, e), n in zip(entrants, names, strict=True)}
        verdicts = self.arena.processes(plain.trial, [e for _, _, e in entrants], until, heard=lambda e, r: self.watcher.contest(index[id(e)], r))
        for at, verdict in verdicts.items():
            candidate, value, entrant = entrants[at]
            self.arena.dismiss(entrant.trial)
            if isinstance(verdict, str):
                self._contest(names[at], "processes", None, verdict, start)
                if candidate is not None and candidate.ratio is None:
                    candidate.status, candidate.reason = Status.REJECTED, f"the program does not survive it: {verdict}"
                continue
            self._contest(names[at], "processes", verdict, "", start)
            if candidate is None:
                self.session.noise_floor = verdict
                self.floor = max(0.01, abs(math.log(verdict.median)))
            else:
                self._measured(candidate, value, verdict, "processes")
        self._save()

    # -- combine ----------------------------------------------------------------------------------------------------

    def _combine(self) -> list[Candidate]:
        winners = [c for c in self.candidates.values() if c.ratio is not None and c.status is Status.SKIPPED]
        if not winners and self.explore_until_s <= seconds():
            winners = self._untried()
        if len(winners) < 2:
            return winners
        if seconds() + self.start_cost_s + 6 * self.arena.block_s * len(winners) > self.explore_until_s:
            return winners
        plan = self._plan(winners)
        self.watcher.stage("combining", plan.describe())
        start = seconds()
        try:
            together = self.arena.enter(plan, 0, patience_s=120 + 4 * self.start_cost_s)
        except ProgramGone as gone:
            self._contest(plan.describe(), "processes", None, _first_line(gone.record), start)
            best = max(winners, key=lambda c: c.ratio.median if c.ratio else 0.0)
            for c in winners:
                if c is not best:
                    c.status, c.reason = Status.REJECTED, f"the program does not survive it together with {best.choice.name}"
            return [best]
        try:
            kept = self._take_away(together, winners)
        finally:
            self.arena.dismiss(together.trial)
        return kept

    def _untried(self) -> list[Candidate]:
        """No time to race at all (a step of many seconds): the likeliest levers go straight to confirmation."""
        likely = [c for c in self.candidates.values() if c.values and c.lever.name in ("malloc", "fused_optimizer", "debug_off")
                  and (c.lever.moment is Moment.PROCESS or self.arena.unit == "step")]
        for candidate in likely:
            candidate.value, candidate.how = candidate.values[0], "confirmation only"
        return likely

    def _take_away(self, together: Entrant, winners: list[Candidate]) -> list[Candidate]:
        """Each live winner is switched off inside the combination; what is not missed stays off."""
        kept = list(winners)
        live = [c for c in winners if c.lever.live and c.lever.moment is not Moment.PROCESS]
        for at, candidate in enumerate(live):
            left = self.explore_until_s - seconds()
            if left < 6 * self.arena.block_s or len(kept) < 2 or self.arena.unit != "step":
                break
            on = [c.choice for c in kept if c in live]
            off = [c for c in on if c.name != candidate.lever.name]
            name = f"{self._plan(kept).describe()} without {candidate.lever.name}"
            self.watcher.stage("taking away", candidate.lever.name)
            start = seconds()
            try:
                ratio = self.arena.live(together.trial, off, on, seconds() + min(8.0, left / (len(live) - at)),
                                        heard=lambda r, name=candidate.lever.name: self.watcher.contest(f"with {name}, beside the others", r))
            except (LeverFailed, ProgramGone) as error:
                candidate.status, candidate.reason = Status.REJECTED, f"it fails together with the others: {error}"
                kept.remove(candidate)
                if isinstance(error, ProgramGone):
                    break
                continue
            self.session.contests.append(Contest(self._plan(kept).describe(), name.split(" without ")[0] + f" without {candidate.lever.name}",
                                                 "live", ratio.median, ratio.low, ratio.high, ratio.n, "taking away", seconds() - start))
            if ratio.median < 1.003:  # ties go to the smaller plan
                kept.remove(candidate)
                candidate.status = Status.REJECTED
                candidate.reason = f"beside the others it brings nothing ({ratio.sentence()})"
        return kept

    def _plan(self, candidates: Sequence[Candidate]) -> Plan:
        order = [lever.name for lever in TABLE]
        return Plan(tuple(sorted((c.choice for c in candidates), key=lambda choice: order.index(choice.name))))

    # -- guard ------------------------------------------------------------------------------------------------------

    def _replica(self, plain: Trial, tuned: list[Candidate]) -> dict[str, Any] | None:
        """One step done again under the live levers, beside float64. Levers that fail it are rejected."""
        checked = [c for c in tuned if c.effect is not Effect.EXACT and c.lever.live]
        if not checked or self.arena.unit != "step":
            return None
        self.watcher.stage("guard", "one step done again plainly, under the levers, and in float64")
        patience = 60 + 40 * self.arena.tick_ms / 1000 + (COMPILE_S if any(c.lever.name == "compile" for c in checked) else 0)
        try:
            plain.switch((), seconds() + 60)
            answer = ask_replica(plain, [c.choice for c in checked], patience)
            failing = [c for c in answer.get("checks", ()) if not c["passed"]]
            if failing and len(checked) > 1 and self.left_s > self.confirm_s:
                for candidate in checked:
                    alone = ask_replica(plain, [candidate.choice], patience)
                    wrong = [c for c in alone.get("checks", ()) if not c["passed"]]
                    if wrong:
                        candidate.status, candidate.reason = Status.REJECTED, f"the guard: {wrong[0]['why']}"
                checked = [c for c in checked if c.status is not Status.REJECTED]
                answer = ask_replica(plain, [c.choice for c in checked], patience) if checked else {"checks": []}
                failing = [c for c in answer.get("checks", ()) if not c["passed"]]
            if failing:
                for candidate in checked:
                    candidate.status, candidate.reason = Status.REJECTED, f"the guard: {failing[0]['why']}"
                return None
            return answer
        except ProgramGone as gone:
            return {"failure": f"the program did not survive the replica of a step ({_first_line(gone.record)})"}

    def _keep_first_record(self, plain: Trial) -> None:
        """The observed program had seed 0 and was plain until the races: its first losses tell whether the script repeats itself."""
        if plain in self.arena._running:
            record = plain.finish()
            races = [c for c in self.session.contests if c.how == "live"]
            if races or record.unit != "step":
                record.losses = record.losses[:record.warmup_steps]
            self.first_plain = record
            self.arena.dismiss(plain)

    # -- confirm ----------------------------------------------------------------------------------------------------

    def _settle(self, tuned: list[Candidate], replica: dict[str, Any] | None) -> None:
        """Confirm the combination; where it fails, what is exact of it; where that fails too, the plain program stays."""
        attempts = [tuned]
        exact = [c for c in tuned if c.effect is Effect.EXACT]
        if exact and len(exact) < len(tuned):
            attempts.append(exact)
        for at, attempt in enumerate(attempts):
            if not attempt or (at and self.left_s < 0.6 * self.confirm_s):
                continue
            if self._confirm(attempt, replica if at == 0 else None):
                return
        self._stay_plain(tuned)

    def _confirm(self, tuned: list[Candidate], replica: dict[str, Any] | None) -> bool:
        plan = self._plan(tuned)
        pairs: list[list[Round]] = []
        records: list[tuple[TrialRecord, TrialRecord]] = []
        start = seconds()
        until = self.start_s + self.goal.budget_s
        seed = 0
        while seed < PAIRS or (seed < 2 * PAIRS and until - seconds() > 1.2 * self.confirm_s / PAIRS):
            if seed and seconds() > until + 0.15 * self.goal.budget_s:
                break
            self.watcher.stage("confirming", f"pair {seed + 1}: {plan.describe()} against the plain program, fresh processes")
            outcome = self._one_pair(plan, seed)
            if isinstance(outcome, str):
                self._contest(plan.describe(), "fresh pairs", None, outcome, start)
                for candidate in tuned:
                    candidate.reason = candidate.reason or f"in fresh processes: {outcome}"
                return False
            rounds, plain_record, tuned_record = outcome
            pairs.append(rounds)
            records.append((plain_record, tuned_record))
            self.watcher.contest(plan.describe(), compare(pairs), f"pair {seed + 1}")
            seed += 1
        ratio = compare(pairs)
        self._contest(plan.describe(), "fresh pairs", ratio, "", start)
        effect = max((c.effect for c in tuned), key=lambda e: e.rank)
        guard = judge(effect, [p for p, _ in records], [t for _, t in records], replica, self.first_plain)
        self.session.guard = guard
        self._describe_sides(plan, records, pairs)
        self.session.payback_steps = self._payback(records)
        if guard.verdict == "failed":
            for candidate in tuned:
                candidate.reason = f"the guard: {guard.why}"
            return False
        if ratio.low <= 1.0 or ratio.median <= 1 + min(self.floor, 0.02):
            for candidate in tuned:
                candidate.reason = f"together {ratio.sentence()} in fresh processes: no gain that stands out from the noise"
            return False
        repaid = self._repaid()
        if not repaid:
            for candidate in tuned:
                if candidate.lever.warms_up:
                    candidate.reason = f"its warm-up is repaid after {self.session.payback_steps:,} steps only"
            return False
        self.session.speedup = ratio
        for candidate in tuned:
            candidate.status, candidate.reason = Status.APPLIED, ""
        self.session.best.plan = self._with_evidence(tuned, ratio).to_json()
        return True

    def _one_pair(self, plan: Plan, seed: int) -> tuple[list[Round], TrialRecord, TrialRecord] | str:
        entrants: list[Entrant] = []
        try:
            # Who starts first changes from pair to pair: the machine may warm up, or tire, in between.
            for mine in (Plan(), plan) if seed % 2 == 0 else (plan, Plan()):
                entrants.append(self.arena.enter(mine, seed, patience_s=120 + 4 * self.start_cost_s))
            first, second = entrants
            plain, tuned = (first, second) if seed % 2 == 0 else (second, first)
            rounds = self.arena.pair(plain.trial, tuned.trial, self._rounds, seconds() + self.confirm_s)
            return rounds, plain.trial.finish(), tuned.trial.finish()
        except ProgramGone as gone:
            return f"a program did not come through: {_first_line(gone.record)}"
        finally:
            for entrant in entrants:
                self.arena.dismiss(entrant.trial)

    def _describe_sides(self, plan: Plan, records: Sequence[tuple[TrialRecord, TrialRecord]], pairs: Sequence[Sequence[Round]]) -> None:
        for side, at, times in ((self.session.baseline, 0, [r.a_ms for pair in pairs for r in pair]), (self.session.best, 1, [r.b_ms for pair in pairs for r in pair])):
            own = [record[at] for record in records]
            side.step_ms = sorted(times)[len(times) // 2]
            side.unit = own[0].unit
            per_step = [r.samples_per_step for r in own if r.samples_per_step]
            side.samples_per_s = per_step[0] / side.step_ms * 1000 if per_step else None
            side.phases = own[0].phases
            side.peak_memory_bytes = max((r.peak_memory_bytes or 0 for r in own), default=0) or None
            side.warmup_ms = sorted(r.warmup_ms for r in own)[len(own) // 2]
            side.steps = sum(r.steps for r in own)
        self.session.best.plan = plan.to_json()

    def _payback(self, records: Sequence[tuple[TrialRecord, TrialRecord]]) -> int | None:
        """After how many steps the longer start is repaid; 0 where there is nothing to repay, None where it never is."""
        extra = self.session.best.warmup_ms - self.session.baseline.warmup_ms
        plain, tuned = self.session.baseline.step_ms, self.session.best.step_ms
        if plain is None or tuned is None or tuned >= plain:
            return None
        if extra <= 0.05 * self.session.baseline.warmup_ms:
            return 0
        return math.ceil(extra / (plain - tuned))

    def _repaid(self) -> bool:
        steps, plain = self.session.payback_steps, self.session.baseline.step_ms
        return steps is not None and (steps == 0 or steps * (plain or 0) / 1000 <= self.goal.horizon_s)

    def _with_evidence(self, tuned: Sequence[Candidate], ratio: Ratio) -> Plan:
        plan = self._plan(tuned)
        choices = []
        for choice in plan:
            alone = self.candidates[choice.name].ratio
            said = f"alone {alone.sentence()}" if alone else "measured only together with the others"
            choices.append(Choice(choice.name, choice.value, Origin.TUNER, f"{said}; the whole plan {ratio.sentence()}"))
        return Plan(tuple(choices), self.session.key)

    def _stay_plain(self, tuned: Sequence[Candidate]) -> None:
        for candidate in tuned:
            candidate.status = Status.REJECTED
        self.session.best = Side(**{**self.session.baseline.__dict__, "plan": Plan((), self.session.key).to_json()})
        self.session.speedup = None
        self.session.payback_steps = None
        if self.session.guard.verdict not in ("failed",):
            self.session.guard = GuardRecord("same", "the plain program stays as it is")

    # -- records ----------------------------------------------------------------------------------------------------

    def _contest(self, plan: str, how: str, ratio: Ratio | None, note: str, start: float) -> None:
        self.watcher.contest(plan, ratio, note)
        self.session.contests.append(Contest(plan, "plain", how, ratio.median if ratio else None, ratio.low if ratio else None,
                                             ratio.high if ratio else None, ratio.n if ratio else 0, note, round(seconds() - start, 1)))
        self._save()

    def _recall(self, todo: list[Candidate]) -> list[Candidate]:
        """Take over what an interrupted session has measured; answer what is left."""
        known = {c.plan: c for c in self.session.contests if c.against == "plain" and c.how in ("live", "processes")}
        left = []
        for candidate in todo:
            values = []
            for value in candidate.values:
                old = known.get(spell(candidate.lever.name, value))
                if old is None:
                    values.append(value)
                elif old.ratio is None or old.low is None or old.high is None:
                    candidate.status, candidate.reason = Status.REJECTED, old.note
                else:
                    self._measured(candidate, value, Ratio(old.ratio, old.low, old.high, old.n), old.how)
            if values and candidate.status is Status.SKIPPED:
                candidate.values = tuple(values)
                left.append(candidate)
        return left

    def _note_levers(self) -> None:
        self.session.levers = [
            LeverRecord(name, c.value, c.status.value, c.ratio.median if c.ratio else None, c.ratio.low if c.ratio else None,
                        c.ratio.high if c.ratio else None, c.ratio.n if c.ratio else 0,
                        c.reason or ("won alone; the search ended before it was confirmed" if c.status is Status.SKIPPED else ""), c.effect.value, c.how)
            for name, c in self.candidates.items()
        ]

    def _save(self) -> None:
        self.session.spent_s = self.spent_s
        self._note_levers()
        self.save(self.session)
        self.watcher.saved(self.session)


FEWEST_RACE_ROUNDS = 2


def _first_line(record: TrialRecord) -> str:
    lines = [line for line in record.reason.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:240] if lines else record.status
