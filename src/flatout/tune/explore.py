"""Exploring: measures all levers together in many short processes, following an experimental design.

    observed    the plain program; a balanced design switches its live levers together, block by block
    waves       two programs start together and alternate with the observed one. Each has half of the process
                levers on for life and switches the live ones. The first wave tests the prior's best plan
    compile     a process compiles while others start; then it is measured with and without the compiler

All blocks feed one regression (`flatout.tune.effects`), which also chooses the next wave
(`flatout.tune.design`). Exploring ends when the expected regret is small, or when confirming needs the rest
of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.measure.clock import seconds
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.blame import handle_end
from flatout.tune.candidates import PROCESSES, Candidate, fetches_all
from flatout.tune.comparison import (
    MIN_TURNS,
    Member,
    ProgramRequest,
    ProgramResult,
    measure_together,
    take_turns,
)
from flatout.tune.conclude import best_measured, conclude
from flatout.tune.design import live_factor_sets, next_processes, worth_more_time
from flatout.tune.effects import Factor, Fitted, Space
from flatout.tune.factors import make_space, reuse_blocks
from flatout.tune.goal import restricted
from flatout.tune.limits import COMPILE_S
from flatout.tune.one_thread import np
from flatout.tune.remote import TIMEOUT_S
from flatout.tune.tuning import Tuning

MAX_COMPILE_S = 10 * COMPILE_S  # since its start, including the time it is stopped
POLL_S = 0.2
# Least exploring time left, on few cores and on MANY_CORES: a start and compiling a small model
MIN_REMAINING_S = {False: 40.0, True: 20.0}
MANY_CORES = 4  # from here on a compiler hardly delays other starting programs
SOLE_COMPILE_SHARE = 0.15  # of the budget, for compiling that is not done, or not begun, after the last wave
MIN_COPIES = 4  # in memory at once: the observed program, two of a wave, and this one
MIN_COPIES_ALONE = 2  # the observed program and this one


class BackgroundCompiler:
    """Runs one compiling program at a time, in ``interleaver.background`` until it is ready.

    Each factor with a long warm-up is compiled once, the most promising first.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.trial: Trial | None = None
        self.factor: Factor | None = None  # the factor being compiled
        self.active: frozenset[str] = frozenset()
        self.started_keys: set[str] = set()

    @property
    def next_factor(self) -> Factor | None:
        factors = self.tuning.space.factors
        remaining = (f for f in factors if f.warms_up and f.key not in self.started_keys)
        return min(remaining, key=lambda f: f.mean, default=None)

    def begin(self, quick_space: Space, exclusive: bool = False) -> None:
        """Start compiling together with the likely best of the other factors.

        ``exclusive``: no other program starts meanwhile.
        """
        tuning, factor = self.tuning, self.next_factor
        if (
            self.trial is not None
            or factor is None
            or not (exclusive or self._has_room)
            or tuning.explore_until_s - seconds() < self._min_remaining_s
        ):
            return
        if exclusive and tuning.max_copies < MIN_COPIES_ALONE:
            tuning.finish_plain_trial()
        self.factor = factor
        self.started_keys.add(factor.key)
        levers = {tuning.choices[key].name: key for key in tuning.fit_effects(quick_space).best()}
        conflicting = {other for pair in tuning.space.excludes if factor.lever in pair for other in pair}
        self.active = frozenset(key for name, key in levers.items() if name not in conflicting) | {factor.key}
        plan = tuning.plan_for(self.active)
        tuning.stage(
            "compiling", plan.describe() if exclusive else f"{plan.describe()}, while others are measured"
        )
        self.trial = tuning.interleaver.start(plan, 0)
        tuning.interleaver.background.append(self.trial)

    @property
    def _has_room(self) -> bool:
        return self.tuning.max_copies >= MIN_COPIES

    @property
    def _min_remaining_s(self) -> float:
        return MIN_REMAINING_S[self.tuning.facts.cores >= MANY_CORES]

    def poll(self, wait_s: float = 0.0) -> bool:
        """Measure it if it is ready. Returns True if there is nothing left to wait for."""
        tuning, trial = self.tuning, self.trial
        if trial is None:
            return True
        try:
            if not trial.is_ready(trial.started_s + MAX_COMPILE_S, wait_s):
                return False
            trial.pause(rescan=True)
            tuning.interleaver.background.remove(trial)
            self._measure(trial)
        except ProgramGone as gone:
            handle_end(tuning, self.active, ProgramResult(end_record=gone.record))
        self._end(trial)
        return True

    def _measure(self, trial: Trial) -> None:
        tuning, active, factor = self.tuning, self.active, self.factor
        assert factor is not None
        for skipped in trial.ready.get("skipped", ()):
            handle_end(tuning, active, ProgramResult(failed_lever=(skipped["name"], skipped["reason"])))
            return
        live = active & {other.key for other in tuning.space.factors if other.live}
        without_compiler = live - {factor.key}
        rows = [live, without_compiler, without_compiler, live, live, without_compiler]
        tuning.stage("exploring", f"{tuning.plan_for(active).describe()}: with and without the compiler")
        member = Member(trial, tuning.live_levers(rows), ProgramResult(), fresh=False)
        until_s = max(tuning.explore_until_s, seconds() + 8 * tuning.interleaver.block_s)
        take_turns(tuning.interleaver, [member], until_s)
        tuning.processes += 1
        tuning.add_blocks(tuning.processes, [active - live | row for row in rows], member.result, 0)
        handle_end(tuning, active, member.result)

    @property
    def reserved_s(self) -> float:
        sole_compile_s = min(COMPILE_S, SOLE_COMPILE_SHARE * self.tuning.budget_s)
        if self.trial is None and (
            self.next_factor is None or self._has_room or sole_compile_s < self._min_remaining_s
        ):
            return 0.0
        return sole_compile_s

    def wait(self, quick_space: Space) -> None:
        """Spend the rest of the exploring time on compilers alone."""
        self._begin_next(quick_space)
        while self.trial is not None:
            self._wait_for(self.trial)
            self._begin_next(quick_space)

    def _begin_next(self, quick_space: Space) -> None:
        if not self.tuning.blocks or worth_more_time(self.tuning.refit(), best_measured(self.tuning)):
            self.begin(quick_space, exclusive=True)

    def _wait_for(self, trial: Trial) -> None:
        tuning, factor = self.tuning, self.factor
        assert factor is not None
        tuning.stage("compiling", tuning.plan_for(self.active).describe())
        trial.resume()
        while not self.poll(POLL_S):
            if seconds() >= tuning.explore_until_s:
                spent_s = seconds() - trial.started_s
                hint = f"give --budget {math.ceil((tuning.budget_s + COMPILE_S) / 60)}m"
                tuning.candidates[
                    factor.lever
                ].reason = f"compilation did not finish within {spent_s:.0f} s; {hint}"
                self._end(trial)
                return

    def _end(self, trial: Trial) -> None:
        self.tuning.interleaver.dismiss(trial)
        self.trial = None


WAVE_PROGRAMS = 2  # programs that start together
FIRST_ROWS, MIN_FIRST_ROWS = 6, 2  # of the observed program, before any other starts
FIRST_SHARE = 0.1  # of the budget, for these rows
OBSERVED_ROWS = 2  # of the observed program in each wave
MAX_ROWS = 10  # of each program of a wave; at least MIN_TURNS
MAX_STARTUP_RATIO = 0.75  # of the time that a wave measures to the time that its programs start
SLOW_TICK_MS = 1000.0  # above this, each row counts
OBSERVED_PROCESS = 0  # the number of the observed process
Keys = frozenset[str]
PLAIN: Keys = frozenset()


def explore(tuning: Tuning) -> list[Candidate]:
    """The candidates of the plan with the best expected speed; empty if that is the plain program.

    The measurements are in ``tuning.blocks``.
    """
    make_space(tuning)
    reuse_blocks(tuning)
    if tuning.choices:
        _Exploring(tuning).run()
    return conclude(tuning)


class _Exploring:
    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.interleaver = tuning, tuning.interleaver
        self.random = np.random.default_rng(0)
        self.compiler = BackgroundCompiler(tuning)
        self.waves = 0

    @property
    def quick_space(self) -> Space:
        """The space that waves measure: all factors without a long warm-up."""
        space = self.tuning.space
        return restricted(space, [factor.key for factor in space.factors if not factor.warms_up])

    def run(self) -> None:
        tuning = self.tuning
        self._measure_plain()
        while self.quick_space.factors and self._rows_per_program(self._wave_size) >= self._min_rows:
            self._wave()
            self.compiler.begin(self.quick_space)
            compiling = not self.compiler.poll()
            if not tuning.choices or (
                self.waves > 1
                and not compiling
                and not worth_more_time(tuning.refit(), best_measured(tuning))
            ):
                break
        self.compiler.wait(self.quick_space)

    # -- the observed program

    def _measure_plain(self) -> None:
        tuning, plain = self.tuning, self.tuning.plain_trial
        if plain is None or not self.quick_space.switchable.any():
            return
        tuning.stage("exploring", "levers switched on and off in the running program")
        n = max(MIN_FIRST_ROWS, min(FIRST_ROWS, int(FIRST_SHARE * tuning.budget_s / self._row_s)))
        rows = [PLAIN, *live_factor_sets(self.quick_space, None, PLAIN, n - 1, self.random)]
        member = Member(plain, tuning.live_levers(rows), ProgramResult(), fresh=False)
        least_s = 1.5 * n * self._row_s  # even if the budget barely covers confirming
        take_turns(self.interleaver, [member], max(tuning.explore_until_s, seconds() + least_s))
        self._record_plain(member, rows)

    def _record_plain(self, member: Member, rows: Sequence[Keys]) -> None:
        tuning, end_record = self.tuning, member.result.end_record
        tuning.max_plain_tick = max(tuning.max_plain_tick, member.result.ticks)
        if end_record is not None:
            tuning.keep_first_plain(end_record)
            tuning.plain_trial = None
            self.interleaver.dismiss(member.trial)
        self._record_result(OBSERVED_PROCESS, PLAIN, rows, member.result)

    # -- waves

    @property
    def _wave_size(self) -> int:
        """How many programs start at once: two if memory and time allow it."""
        remote = self.tuning.remote
        if remote is not None and remote.nodes:
            return WAVE_PROGRAMS * len(remote.nodes)
        fit = self.tuning.max_copies > WAVE_PROGRAMS
        return WAVE_PROGRAMS if fit and self._rows_per_program(WAVE_PROGRAMS) >= self._min_rows else 1

    @property
    def _wave_until_s(self) -> float:
        return self.tuning.explore_until_s if self.waves else self.tuning.first_wave_until_s

    def _rows_per_program(self, programs: int) -> int:
        tuning, local = self.tuning, min(programs, WAVE_PROGRAMS)
        reserved_s = self.compiler.reserved_s + tuning.joint_start_s(local)
        left_s = self._wave_until_s - reserved_s - seconds()
        plain_rows = self._plain_rows if tuning.plain_trial is not None else 0
        rows = min(MAX_ROWS, int((left_s / self._row_s - plain_rows) / local))
        if tuning.length_ticks is not None:
            row_ticks = self.interleaver.block_ticks + self.interleaver.settle_ticks
            rows = min(rows, max(1, (tuning.length_ticks - tuning.warmup_ticks) // row_ticks))
        return rows

    @property
    def _row_s(self) -> float:
        return max(self.interleaver.window_ticks * self.interleaver.tick_ms / 1000, 0.01)

    @property
    def _plain_rows(self) -> int:
        return OBSERVED_ROWS if self.interleaver.tick_ms < SLOW_TICK_MS else 1

    @property
    def _min_rows(self) -> int:
        if self.tuning.length_ticks is not None:
            return 1
        return MIN_TURNS - (self.interleaver.tick_ms >= SLOW_TICK_MS)

    def _wave(self) -> None:
        tuning, space = self.tuning, self.quick_space
        tuning.save()
        tuning.disturbance.sample()
        fitted = tuning.fit_effects(space)
        settings = self._wave_settings(space, fitted)
        n = max(1, self._rows_per_program(len(settings)))
        rows = [live_factor_sets(space, fitted, active, n, self.random) for active in settings]
        requests = [
            ProgramRequest(tuning.plan_for(active | live[0]), tuning.live_levers(live))
            for active, live in zip(settings, rows, strict=True)
        ]
        tuning.stage("exploring", " against ".join(tuning.plan_for(active).describe() for active in settings))
        self._make_room(len(settings))
        measured = self._measure_requests(requests)
        self.waves += 1
        for active, live, (result, host) in zip(settings, rows, measured, strict=True):
            tuning.processes += 1
            self._record_result(tuning.processes, active, live, result, host)
        self._report()

    def _wave_settings(self, space: Space, fitted: Fitted) -> list[Keys]:
        """The active factors of each program of a wave.

        The first wave omits the plain program if it is already observed.
        """
        tuning = self.tuning
        skip_plain = self.waves == 0 and tuning.plain_trial is not None
        n, blocks = self._wave_size + skip_plain, tuning.blocks_of(space)
        wave = next_processes(space, fitted, blocks, n, self.random)
        wave = [active for active in wave if active or not skip_plain][: self._wave_size] or [PLAIN]
        return [wave[0], *(active - self._fetching_keys for active in wave[1:])] if self.waves == 0 else wave

    @property
    def _fetching_keys(self) -> Keys:
        """The factors that fetch the whole data set first.

        Only one program of the first wave does that; later waves reuse the samples it kept.
        """
        return frozenset(key for key, choice in self.tuning.choices.items() if fetches_all(choice.value))

    def _make_room(self, programs: int) -> None:
        plain = self.tuning.plain_trial
        if plain is not None and self.tuning.max_copies < programs + 1:
            self.tuning.finish_plain_trial()

    def _measure_requests(self, requests: Sequence[ProgramRequest]) -> list[tuple[ProgramResult, str]]:
        tuning, remote = self.tuning, self.tuning.remote
        if remote is not None and remote.nodes:
            return self._measure_remotely(requests)
        plain, running = tuning.plain_trial, []
        if plain is not None and tuning.length_ticks is None:
            space = self.quick_space
            rows = [PLAIN]
            if space.switchable.any():
                rows += live_factor_sets(
                    space, tuning.fit_effects(space), PLAIN, self._plain_rows - 1, self.random
                )
            running = [(Member(plain, tuning.live_levers(rows), ProgramResult(), fresh=False), rows)]
        members = [member for member, _ in running]
        results = measure_together(
            self.interleaver, requests, self._wave_until_s, tuning.timeout_s, members, MAX_STARTUP_RATIO
        )
        startup_times = [result.startup_s for result in results if result.ready]
        if startup_times:
            start_s = tuning.single_start_s(max(startup_times), len(requests))
            tuning.start_cost_s = 0.5 * (tuning.start_cost_s + start_s)
        for member, live in running:
            self._record_plain(member, live)
        return [(result, "") for result in results]

    def _measure_remotely(self, requests: Sequence[ProgramRequest]) -> list[tuple[ProgramResult, str]]:
        """Measure parts of the wave on remote machines at once. A lost part counts as not measured."""
        tuning, remote = self.tuning, self.tuning.remote
        assert remote is not None
        parts = [requests[i : i + WAVE_PROGRAMS] for i in range(0, len(requests), WAVE_PROGRAMS)]
        limit_s = max(5.0, tuning.explore_until_s - seconds())
        orders = [tuning.remote_order(part, limit_s, MAX_STARTUP_RATIO) for part in parts]
        measured: dict[int, list[tuple[ProgramResult, str]]] = {}
        for reply in remote.run_orders(orders, TIMEOUT_S + limit_s + tuning.timeout_s):
            part = parts[reply.number]
            measured[reply.number] = [(result, reply.host) for result in reply.results]
            if reply.answer is None:
                measured[reply.number] = [(ProgramResult(), "")] * len(part)
                plans = " | ".join(request.plan.describe() for request in part)
                tuning.record_comparison(plans, PROCESSES, None, reply.why, seconds(), host=reply.host)
        return [result for i in range(len(parts)) for result in measured[i]]

    # -- measurements

    def _record_result(
        self, process: int, active: Keys, rows: Sequence[Keys], result: ProgramResult, host: str = ""
    ) -> None:
        tuning = self.tuning
        tuning.add_blocks(process, [active | row for row in rows], result, 0, host)
        handle_end(tuning, active | rows[min(len(result.blocks), len(rows) - 1)], result)

    def _report(self) -> None:
        tuning = self.tuning
        if not tuning.blocks:
            return
        tuning.refit()
        best = best_measured(tuning)
        for key in tuning.choices:
            if key in tuning.measured_keys:
                tuning.watcher.comparison(key, tuning.effect(key, best))
        ratio = tuning.gain(best)
        expected = f"expect about {ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}) with {tuning.plan_for(best).describe()}{tuning.beside}"
        tuning.watcher.report(
            f"after {tuning.spent_s:.0f} s: {expected if best else 'nothing is faster than the plain program yet'}"
        )
