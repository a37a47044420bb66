"""Carries out the actions of a search on a GPU (`flatout.tune.card_policy`) with real processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flatout.measure.clock import seconds
from flatout.measure.load import available_bytes
from flatout.measure.statistics import Round, compare
from flatout.schema.enums import Effect, Moment, Status
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.blame import handle_end
from flatout.tune.candidates import LIVE, SLOWER, Candidate, widest_effect
from flatout.tune.card_policy import FEW_CORES, first_starts, gain, next_action
from flatout.tune.card_process import (
    Process,
    first_bits_of,
    keys_of_plan,
    process_plan,
    restore_result,
    result_of,
    same_bits,
)
from flatout.tune.card_state import (
    PLAIN,
    Action,
    Confirm,
    Costs,
    End,
    Keys,
    Measure,
    Outcome,
    Program,
    Release,
    Replay,
    Stage,
    Start,
    State,
    Stop,
)
from flatout.tune.comparison import Member, ProgramResult, take_turns
from flatout.tune.conclude import limiting_factor
from flatout.tune.confirm import MIN_SPEEDUP, conclude_pairs, keep_plain
from flatout.tune.effects import PLAN
from flatout.tune.factors import make_space
from flatout.tune.limits import COMPILE_S, OVERRUN_SHARE
from flatout.tune.narrow import replay_levers, without_culprits
from flatout.tune.pairs import Pairs
from flatout.tune.prior import NEUTRAL, priors
from flatout.tune.tuning import Tuning

DEVICE_TAKEN = "devices are busy or unavailable"  # cudaErrorDevicesUnavailable: an exclusive compute mode
NOT_KEPT = "the plans with it were not faster than those without"
CHECKED_STEPS = 8  # of each process, with deterministic kernels and exact levers alone
HELD_SHARE = 0.6  # of the time until a program is ready: its imports and its data
MIN_FREE_SHARE = 0.25  # of the host's memory; below it, no process is held beside the plain program
POLL_S = 0.05
SLOW_S = {False: COMPILE_S, True: 40.0}  # of a compiler, on few cores and on more


class CardSearch:
    """Holds the processes. ``start_first`` comes before the plain program starts, ``run`` when it is ready."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.interleaver = tuning, tuning.interleaver
        self.processes: dict[int, Process] = {}
        self.outcomes: dict[Keys, Outcome] = {}
        self.replicas: dict[Keys, dict[str, Any]] = {}
        self.equal: dict[Keys, bool] = {}
        self.kept_speed = 0.0  # of the last confirmed plan
        self.started = 0
        self.repeats: bool | None = None  # the plain program's first bits
        self.import_s: float | None = None
        self.choices: dict[str, Choice] = {}  # also those that left the search
        self.process_plan = process_plan(tuning)
        self.host_bytes = 1  # of the host's memory, that the plain program takes

    # -- processes

    def start_first(self) -> None:
        """Start the processes that import beside the plain program, and are held."""
        for start in first_starts(self.tuning.facts.cores, keys_of_plan(self.process_plan)):
            self.interleaver.background.append(self._start(start).trial)
        self.interleaver.on_poll = self._spare_memory
        self.interleaver.checked_steps = CHECKED_STEPS

    def stop_waiting(self) -> None:
        """The plain program is ready: the others run as this search decides."""
        self.interleaver.background.clear()
        self.interleaver.on_poll = lambda: None

    def close(self) -> None:
        """End the processes that wait: this program does not train on a GPU."""
        self.stop_waiting()
        self.interleaver.checked_steps = 0
        for process in self.processes.values():
            self.interleaver.dismiss(process.trial)

    def _spare_memory(self) -> None:
        """End a process that waits if memory becomes short: its size is not known yet."""
        if self.processes and available_bytes() < MIN_FREE_SHARE * self.tuning.facts.memory_bytes:
            self.interleaver.dismiss(self.processes.popitem()[1].trial)

    def _start(self, action: Start) -> Process:
        plan = Plan(tuple(choice for choice in self.process_plan if choice.text in action.plan))
        trial = self.interleaver.start(plan, action.seed, hold=True)
        self.started += 1
        program = Program(self.started, action.seed, Stage.IMPORTING, action.plan)
        self.processes[self.started] = Process(program, trial, Member(trial, (), ProgramResult()), seconds())
        return self.processes[self.started]

    def _starting(self) -> list[Process]:
        return [p for p in self.processes.values() if p.program.stage in (Stage.IMPORTING, Stage.WARMING)]

    def _poll(self) -> bool:
        """Whether a process became held, ready, or was lost."""
        changed = False
        for process in self._starting():
            program, trial = process.program, process.trial
            try:
                ready = trial.is_ready(process.since_s + self.tuning.timeout_s, POLL_S)
            except ProgramGone as gone:
                self._lose(process, gone)
                changed = True
                continue
            if ready:
                trial.pause()
                self._take_ready(process)
                changed = True
            elif program.stage is Stage.IMPORTING and trial.held:
                self.import_s = self.import_s or seconds() - trial.started_s
                process.program = replace(program, stage=Stage.HELD)
                changed = True
        return changed

    def _take_ready(self, process: Process) -> None:
        """Leave out the levers that this program does not take, in all processes."""
        for skipped in process.trial.ready["skipped"]:
            keys = frozenset(key for key, choice in self.choices.items() if choice.name == skipped["name"])
            dropped = ProgramResult(failed_lever=(skipped["name"], skipped["reason"]))
            handle_end(self.tuning, keys & process.program.plan, dropped)
            for other in self.processes.values():
                other.program = replace(other.program, plan=other.program.plan - keys)
        program, skipped_names = process.program, {s["name"] for s in process.trial.ready["skipped"]}
        applied = {choice.text for choice in process.trial.plan if choice.name not in skipped_names}
        if applied != program.plan:  # another process did not take a lever that this one took
            self._drop(process)
            return
        process.program = replace(program, stage=Stage.READY)
        process.member.result.ready = process.trial.ready
        process.member.active_row = self._row(program.plan)
        self._compare_first_steps(process)

    def _compare_first_steps(self, process: Process) -> None:
        """Compare the bits of the checked steps with the plain program's of the same seed."""
        process.first_bits = first_bits_of(self._record(process.trial), process.trial.ready["checked_steps"])
        plain_of = {
            p.program.seed: p for p in self.processes.values() if p.program.has_plan and not p.program.plan
        }
        for planned in self.processes.values():
            plain = plain_of.get(planned.program.seed)
            if plain is None or not planned.program.plan or not planned.first_bits:
                continue
            exact = self._exact(planned.program.plan)
            others = planned.program.plan - exact - self._live
            if others or not exact or exact in self.equal or not plain.first_bits:
                continue
            same = same_bits(plain.first_bits, planned.first_bits)
            if same or self._repeats(plain):
                self.equal[exact] = same

    def _repeats(self, plain: Process) -> bool:
        """Whether a second plain run has the same first bits: otherwise unequal bits say nothing of a lever."""
        if self.repeats is None:
            self.tuning.stage("guard", "the plain program once more, to see whether it repeats its own bits")
            try:
                again = self.tuning.start_paused(Plan(), plain.program.seed)
                bits = first_bits_of(self._record(again.trial), again.trial.ready["checked_steps"])
                self.interleaver.dismiss(again.trial)
            except (ProgramGone, LeverFailed):
                return False
            self.repeats = same_bits(plain.first_bits, bits)
        return self.repeats

    def _drop(self, process: Process) -> None:
        del self.processes[process.program.number]
        self.interleaver.dismiss(process.trial)

    def _lose(self, process: Process, gone: ProgramGone) -> None:
        """Handle a process that ended or failed: a lever may be to blame, or a device for one process at a time."""
        self._drop(process)
        if DEVICE_TAKEN in gone.record.reason and self.processes:
            self.tuning.max_copies = 1
            return
        handle_end(
            self.tuning,
            process.program.plan,
            ProgramResult(end_record=gone.record, ticks=process.trial.ticks_done),
        )

    def _end(self, process: Process, fetch_samples: bool = False) -> None:
        """Take the record of a process, and end it."""
        process.record = process.trial.finish(fetch_samples=fetch_samples)
        process.program = replace(process.program, stage=Stage.ENDED)
        self.interleaver.dismiss(process.trial)

    # -- the policy's view

    def _row(self, keys: Iterable[str]) -> tuple[Choice, ...]:
        """The live levers among these keys."""
        return self.tuning.plan_for(self._live.intersection(keys)).choices

    @property
    def _live(self) -> Keys:
        return frozenset(factor.key for factor in self.tuning.space.factors if factor.live)

    @property
    def _inexact(self) -> Keys:
        """The live keys that the guard replays."""
        return frozenset(key for key in self._live if self._candidate(key).effect is not Effect.EXACT)

    def _exact(self, plan: Keys) -> Keys:
        return frozenset(key for key in plan if self._candidate(key).effect is Effect.EXACT)

    def _candidate(self, key: str) -> Candidate:
        return self.tuning.candidates[self.tuning.choices[key].name]

    def _of(self, keys: Keys) -> list[Candidate]:
        """The candidates of these keys, with their values."""
        candidates = []
        for key in sorted(keys):
            candidate = self._candidate(key)
            candidate.value = self.tuning.choices[key].value
            candidates.append(candidate)
        return candidates

    def state(self) -> State:
        tuning, step_s = self.tuning, self.interleaver.tick_ms / 1000
        factors = tuning.space.factors
        slow = sorted((f for f in factors if f.warms_up), key=lambda f: f.mean)
        import_s = self.import_s or HELD_SHARE * tuning.start_cost_s
        warm_steps = tuning.warmup_ticks + 1
        free_bytes = available_bytes() - MIN_FREE_SHARE * tuning.facts.memory_bytes
        many = tuning.facts.cores > FEW_CORES
        return State(
            now_s=seconds(),
            end_s=tuning.end_s,
            overrun_s=OVERRUN_SHARE * tuning.budget_s,
            cores=tuning.facts.cores,
            copies=tuning.max_copies,
            room=max(0, int(free_bytes // self.host_bytes)),
            costs=Costs(
                import_s,
                max(0.5, tuning.start_cost_s - import_s - warm_steps * step_s),
                warm_steps,
                step_s,
                tuning.replica_s,
                SLOW_S[many],
            ),
            space=tuning.space,
            bundle=self.bundle,
            process=keys_of_plan(self.process_plan) & tuning.choices.keys(),
            live=self._live,
            inexact=self._inexact,
            slow=tuple(f.key for f in slow),
            replaced_by_slow=frozenset(
                f.key for f in factors if f.lever in self._replaced(f.key for f in slow)
            ),
            programs=tuple(process.program for process in self.processes.values()),
            blocks=tuple(tuning.blocks),
            checked=frozenset(self.replicas),
            wrong=frozenset(f.key for f in factors if self._candidate(f.key).status is Status.REJECTED),
            equal=self.equal,
            outcomes=self.outcomes,
        )

    @property
    def bundle(self) -> Keys:
        """The first plan: the first value of each lever, unless it starts slowly or was slower before."""
        tuning, taken, levers = self.tuning, PLAIN, set[str]()
        prior = priors(tuning.facts, tuning.session.context, {})
        replaced = self._replaced(f.key for f in tuning.space.factors if not f.warms_up)
        for factor in sorted(tuning.space.factors, key=lambda f: f.mean):
            lever, choice = tuning.candidates[factor.lever].lever, tuning.choices[factor.key]
            known = prior(factor.lever, choice.value)
            if (
                factor.lever in replaced
                or factor.warms_up
                or lever.sets_threads
                or factor.lever in levers
                or known.mean > NEUTRAL.mean
            ):
                continue
            if lever.moment is Moment.PROCESS and factor.key not in keys_of_plan(self.process_plan):
                continue
            if tuning.space.allowed(taken | {factor.key}):
                taken |= {factor.key}
                levers.add(factor.lever)
        return taken

    def _replaced(self, keys: Iterable[str]) -> set[str]:
        return {name for key in keys for name in self._candidate(key).lever.replaces}

    # -- actions

    def run(self, plain: Trial) -> None:
        """Search until the budget ends; the session then holds the result."""
        tuning = self.tuning
        make_space(tuning)
        self.choices = dict(tuning.choices)
        member = Member(plain, (), ProgramResult(ready=plain.ready))
        self.processes[0] = Process(Program(0, 0, Stage.READY), plain, member, plain.started_s)
        self.host_bytes = max(1, plain.ready["host_bytes"])
        self._compare_first_steps(self.processes[0])
        self.stop_waiting()
        tuning.plain_trial = None
        for process in self._starting():
            process.trial.resume()
        self._poll()
        while not isinstance(action := next_action(self.state()), Stop):
            self._carry_out(action)
            tuning.save()
        self._conclude()

    def _carry_out(self, action: Action) -> None:
        tuning = self.tuning
        match action:
            case Start():
                self._start(action)
            case Release(number, plan):
                process = self.processes[number]
                process.trial.release(tuning.plan_for(plan))
                process.program = replace(process.program, stage=Stage.WARMING, plan=plan)
                process.since_s = seconds()
            case End(number):
                self._end(self.processes[number])
            case Measure():
                self._measure(action)
            case Replay(number, keys):
                self._replay(self.processes[number], keys)
            case Confirm():
                self._confirm(action)
            case _:
                tuning.stage("starting", "the next programs")
                while self._starting() and not self._poll():
                    pass

    def _measure(self, action: Measure) -> None:
        tuning, processes = self.tuning, [self.processes[number] for number in action.numbers]
        plans = " against ".join(tuning.plan_for(process.program.plan).describe() for process in processes)
        tuning.stage("measuring", plans)
        starting = self._starting() if action.alone else []
        for process in starting:
            process.trial.pause(rescan=True)
        members = []
        for process, rows in zip(processes, action.rows, strict=True):
            process.member.rows = tuple(self._row(row) for row in rows)
            process.member.result.blocks = []
            members.append(process.member)
        plain_tick_ms = self.interleaver.tick_ms
        if all(process.program.plan for process in processes):  # as many ticks as their speed needs
            slowest_ms = max(process.trial.ready["tick_ms"] for process in processes)
            self.interleaver.tick_ms = min(plain_tick_ms, max(slowest_ms, 1e-3))
        take_turns(self.interleaver, members, tuning.end_s + OVERRUN_SHARE * tuning.budget_s)
        self.interleaver.tick_ms = plain_tick_ms
        for process in starting:
            process.trial.resume()
        for process, rows in zip(processes, action.rows, strict=True):
            program, result = process.program, process.member.result
            fixed = program.plan - self._live
            active = [row | fixed for row in rows]
            tuning.add_blocks(program.number, active, result, program.seed)
            if not result.complete:
                handle_end(tuning, active[min(len(result.blocks), len(rows) - 1)], result)
                self._drop(process)
        tuning.disturbance.sample()

    def _replay(self, process: Process, keys: Keys) -> None:
        candidates = self._of(keys)
        try:
            replica = replay_levers(self.tuning, process.trial, candidates)
        except ProgramGone as gone:
            self._lose(process, gone)
            replica = {"failure": f"the program ended while the guard replayed a step: {gone}"}
        process.member.active_row = ()
        if "failure" in replica:
            for candidate in candidates:
                candidate.reject(f"not kept, because its gradient could not be checked: {replica['failure']}")
            return
        passed = frozenset(key for key in keys if self._candidate(key).status is not Status.REJECTED)
        self.replicas[passed] = replica

    def _confirm(self, action: Confirm) -> None:
        tuning, state, start_s = self.tuning, self.state(), seconds()
        plan, candidates, pairs = action.plan, self._of(action.plan), Pairs()
        for numbers in action.pairs:
            for process in (self.processes[number] for number in numbers):
                program = process.program
                if process.record is None and widest_effect(candidates) is Effect.RESAMPLED:
                    self._end(process, fetch_samples=True)
                record = process.record or self._record(process.trial)
                pairs.add(tuning, program.seed, record, plain=not program.plan)
                (pairs.tuned_ms if program.plan else pairs.plain_ms).extend(state.blocks_of(program))
                active = frozenset({PLAN}) if program.plan else PLAIN
                pairs.blocks += [
                    replace(block, active=active)
                    for block in tuning.blocks
                    if (block.process, block.active) == (program.number, program.plan)
                ]
        ratio = pairs.speed(tuning)
        tuning.stage("confirming", f"{tuning.plan_for(plan).describe()} against the plain program")
        if ratio.median <= self.kept_speed:
            self.outcomes[plan] = Outcome.REJECTED
            return
        before = copy.deepcopy(result_of(tuning))
        replica = self.replicas.get(plan & self._inexact)
        rejection = conclude_pairs(tuning, candidates, replica, pairs, ratio, start_s)
        if rejection is None:
            if self.equal.get(self._exact(plan)) and tuning.session.guard.verdict == "equivalent":
                tuning.session.guard.why += "; the first steps, with deterministic kernels and the exact levers alone, are bitwise the plain program's"
            for key in state.kept - plan:
                if self._candidate(key) not in candidates:
                    self._candidate(key).status = Status.SKIPPED
            self.outcomes.pop(plan, None)
            self.outcomes[plan] = Outcome.KEPT
            self.kept_speed = ratio.median
            return
        if state.kept:
            restore_result(tuning, before)
        if rejection.guard_record is not None:
            without_culprits(tuning, candidates, rejection.guard_record, pairs.plain)
        undecided = rejection.undecided or (ratio.median > MIN_SPEEDUP and not ratio.significant)
        self.outcomes[plan] = Outcome.UNDECIDED if undecided and not state.kept else Outcome.REJECTED
        tuning.session.undecided, tuning.session.obstacle = rejection.undecided, rejection.reason
        for candidate in candidates:
            candidate.reason = rejection.reason

    def _record(self, trial: Trial) -> TrialRecord:
        """The record so far; the program stays ready."""
        answer = trial.ask({"do": "record"}, self.interleaver.deadline(1))
        trial.pause()
        return TrialRecord.from_json(answer["record"])

    def _conclude(self) -> None:
        """Give every candidate its result."""
        tuning, state = self.tuning, self.state()
        kept, lever_of = state.kept, tuning.space.lever_of
        base = state.base or state.bundle - state.wrong
        for key in tuning.choices:
            candidate = self._candidate(key)
            same = {other for other in base if lever_of[other] == lever_of[key]}
            ratio = (
                gain(state, base, base - {key}) if key in base else gain(state, (base - same) | {key}, base)
            )
            if ratio is not None and (key in base or not same):
                candidate.value, candidate.ratio, candidate.method = tuning.choices[key].value, ratio, LIVE
            measured = any(key in block.active for block in state.blocks)
            if measured and not kept & same and key not in kept and candidate.status is not Status.REJECTED:
                candidate.value = tuning.choices[key].value
                candidate.reject(SLOWER if ratio is not None and ratio.high < 1.0 else NOT_KEPT)
        if kept:
            tuning.session.undecided, tuning.session.obstacle = False, limiting_factor(tuning)
            return
        first = state.first or state.bundle - state.wrong
        sides = state.at(0, PLAIN), state.at(0, first)
        rounds = [state.blocks_of(side) for side in sides if side is not None]
        if not self.outcomes and len(rounds) == 2 and all(rounds):
            ratio = compare([[Round(x, y) for x, y in zip(*rounds, strict=False)]])
            why = f"together {ratio.sentence()} in a fresh pair: no speed-up beyond the noise"
            tuning.record_comparison(
                tuning.plan_for(first).describe(), "fresh pairs", ratio, why, tuning.start_s
            )
            for candidate in self._of(first):
                if candidate.status is not Status.REJECTED:
                    candidate.reject(why)
        elif not self.outcomes:
            tuning.session.undecided = True
            tuning.session.obstacle = f"no plan was confirmed; {tuning.budget_hint(tuning.budget_s)}"
        keep_plain(tuning, [c for c in tuning.candidates.values() if c.value is not None])
