"""Exploring: measures all levers together in many short processes, following an experimental design.

    observed    the plain program; a balanced design switches its live levers together, block by block
    waves       two programs start together and alternate with the observed one. Each has half of the process
                levers on for life and switches the live ones. The first wave tests the prior's best plan
    compile     a process compiles while others start; then it is measured with and without the compiler
                (`flatout.tune.compiling`)

All blocks feed one regression (`flatout.tune.effects`), which also chooses the next wave
(`flatout.tune.design`). Exploring ends when the expected regret is small, or when confirming needs the rest
of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.measure.clock import seconds
from flatout.tune.blame import program_ended
from flatout.tune.candidates import PROCESSES, Candidate, fetches_all
from flatout.tune.comparison import (
    FEWEST_TURNS,
    Member,
    ProgramRequest,
    ProgramResult,
    measure_together,
    take_turns,
)
from flatout.tune.compiling import Compiling
from flatout.tune.conclude import best_measured, conclude
from flatout.tune.design import live_rows, next_processes, worth_more_time
from flatout.tune.effects import Fitted, Space
from flatout.tune.factors import make_space, recall
from flatout.tune.goal import only
from flatout.tune.one_thread import np
from flatout.tune.remote import TIMEOUT_S
from flatout.tune.tuning import Tuning

WAVE = 2  # programs that start together
FIRST_ROWS, FEWEST_FIRST_ROWS = 6, 2  # of the observed program, before any other starts
FIRST_SHARE = 0.1  # of the budget, for these rows
BESIDE_ROWS = 2  # of the observed program in each wave
ROWS = 10  # of each program of a wave; at least FEWEST_TURNS
ROWS_SHARE = 0.75  # of the cost of a start may be spent on measuring
SLOW_TICK_MS = 1000.0  # above this, each row counts
OBSERVED = 0  # the number of the observed process
Keys = frozenset[str]
NOTHING: Keys = frozenset()


def explore(tuning: Tuning) -> list[Candidate]:
    """Return the candidates of the plan with the best expected speed; empty if that is the plain program.

    The measurements are in ``tuning.blocks``.
    """
    make_space(tuning)
    recall(tuning)
    if tuning.choices:
        _Exploring(tuning).run()
    return conclude(tuning)


class _Exploring:
    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.interleaver = tuning, tuning.interleaver
        self.random = np.random.default_rng(0)
        self.compiling = Compiling(tuning)
        self.waves = 0

    @property
    def quick(self) -> Space:
        """The space that waves measure: all factors without a long warm-up."""
        return only(
            self.tuning.space, [factor.key for factor in self.tuning.space.factors if not factor.warms_up]
        )

    def run(self) -> None:
        tuning = self.tuning
        self._observed()
        while self._time_for_a_wave():
            self._wave()
            self.compiling.begin(self.quick)
            waiting = not self.compiling.look()
            if not tuning.choices or (
                self.waves > 1 and not waiting and not worth_more_time(tuning.refit(), best_measured(tuning))
            ):
                break
        self.compiling.wait(self.quick)

    # -- the observed program -----------------------------------------------------------------------------------------

    def _observed(self) -> None:
        """Switch live levers together in the plain program."""
        tuning, plain = self.tuning, self.tuning.observed
        if plain is None or not self.quick.switched.any():
            return
        tuning.stage("exploring", "levers switched on and off in the running program")
        n = max(FEWEST_FIRST_ROWS, min(FIRST_ROWS, int(FIRST_SHARE * tuning.budget_s / self._row_s)))
        rows = [NOTHING, *live_rows(self.quick, None, NOTHING, n - 1, self.random)]
        member = Member(plain, tuning.live_rows(rows), ProgramResult(), fresh=False)
        least_s = 1.5 * n * self._row_s  # even if the budget barely covers confirming
        take_turns(self.interleaver, [member], max(tuning.explore_until_s, seconds() + least_s))
        self._keep_observed(member, rows)

    def _keep_observed(self, member: Member, rows: Sequence[Keys]) -> None:
        """Record its blocks; if it did not survive them, it is no longer available."""
        tuning, gone = self.tuning, member.seen.gone
        tuning.furthest_plain = max(tuning.furthest_plain, member.seen.ticks)
        if gone is not None:
            tuning.keep_first_plain(gone)
            tuning.observed = None
            self.interleaver.dismiss(member.trial)
        self._keep(OBSERVED, NOTHING, rows, member.seen)

    # -- waves ----------------------------------------------------------------------------------------------------------

    @property
    def _programs(self) -> int:
        """How many programs start at once: two if memory and time allow it."""
        elsewhere = self.tuning.elsewhere
        if elsewhere is not None and elsewhere.ready:
            return WAVE * len(elsewhere.ready)
        two = self.tuning.copies > WAVE and self._rows_each(WAVE) >= self._fewest_rows
        return WAVE if two else 1

    @property
    def _until_s(self) -> float:
        return self.tuning.explore_until_s if self.waves else self.tuning.first_wave_until_s

    def _rows_each(self, programs: int) -> int:
        """How many blocks each program of a wave may have.

        Fewer if measuring would cost more than ROWS_SHARE of the start.
        """
        tuning, here = self.tuning, min(programs, WAVE)
        left_s = self._until_s - self.compiling.reserved_s - seconds() - tuning.starts_s(here)
        beside = self._beside_rows if tuning.observed is not None else 0
        rows = min(ROWS, int((left_s / self._row_s - beside) / here))
        if tuning.length_ticks is not None:
            rows = min(
                rows,
                max(
                    1,
                    (tuning.length_ticks - tuning.warm_ticks)
                    // (self.interleaver.block_ticks + self.interleaver.settle_ticks),
                ),
            )
        return rows

    @property
    def _row_s(self) -> float:
        """Seconds of one row, including the ticks that settle after a switch."""
        return max(self.interleaver.window_ticks * self.interleaver.tick_ms / 1000, 0.01)

    @property
    def _beside_rows(self) -> int:
        return BESIDE_ROWS if self.interleaver.tick_ms < SLOW_TICK_MS else 1

    @property
    def _fewest_rows(self) -> int:
        return (
            1
            if self.tuning.length_ticks is not None
            else FEWEST_TURNS
            if self.interleaver.tick_ms < SLOW_TICK_MS
            else FEWEST_TURNS - 1
        )

    def _time_for_a_wave(self) -> bool:
        return bool(self.quick.factors) and self._rows_each(self._programs) >= self._fewest_rows

    def _wave(self) -> None:
        tuning, space = self.tuning, self.quick
        tuning.save()
        tuning.disturbance.look()
        fitted = tuning.fit_of(space)
        settings = self._settings(space, fitted)
        n = max(1, self._rows_each(len(settings)))
        rows = [live_rows(space, fitted, on, n, self.random) for on in settings]
        asked = [
            ProgramRequest(tuning.plan_for(on | mine[0]), tuning.live_rows(mine))
            for on, mine in zip(settings, rows, strict=True)
        ]
        tuning.stage("exploring", " against ".join(tuning.plan_for(on).describe() for on in settings))
        self.waves += 1
        self._make_room(len(settings))
        for on, mine, (seen, host) in zip(settings, rows, self._measured(asked), strict=True):
            tuning.processes += 1
            self._keep(tuning.processes, on, mine, seen, host)
        self._tell()

    def _settings(self, space: Space, fitted: Fitted) -> list[Keys]:
        """Return the active factors of each program of a wave.

        The first wave omits the plain program if it is already observed.
        """
        tuning = self.tuning
        plain_too = self.waves == 0 and tuning.observed is not None
        found = next_processes(
            space,
            fitted,
            tuning.blocks_of(space),
            self._programs + plain_too,
            self.random,
            always_plain=False,
        )
        found = [on for on in found if on or not plain_too][: self._programs] or [NOTHING]
        return [found[0], *(on - self._fetching for on in found[1:])] if self.waves == 0 else found

    @property
    def _fetching(self) -> Keys:
        """The factors that fetch the whole data set first.

        Only one program of the first wave does that; later waves reuse the samples it kept.
        """
        return frozenset(key for key, choice in self.tuning.choices.items() if fetches_all(choice.value))

    def _make_room(self, programs: int) -> None:
        """End the observed program if no more programs fit into memory."""
        plain = self.tuning.observed
        if plain is not None and self.tuning.copies < programs + 1:
            self.tuning.keep_observed()

    def _measured(self, asked: Sequence[ProgramRequest]) -> list[tuple[ProgramResult, str]]:
        """Return the outcome of each program, with the machine that measured it."""
        tuning, elsewhere = self.tuning, self.tuning.elsewhere
        if elsewhere is not None and elsewhere.ready:
            return self._measured_elsewhere(asked)
        plain, beside = tuning.observed, []
        if plain is not None and tuning.length_ticks is None:
            space = self.quick
            rows = [NOTHING]
            if space.switched.any():
                rows += live_rows(space, tuning.fit_of(space), NOTHING, self._beside_rows - 1, self.random)
            beside = [(Member(plain, tuning.live_rows(rows), ProgramResult(), fresh=False), rows)]
        until_s = tuning.first_wave_until_s if self.waves == 1 else tuning.explore_until_s
        found = measure_together(
            self.interleaver, asked, until_s, tuning.timeout_s, [member for member, _ in beside], ROWS_SHARE
        )
        started = [seen.start_s for seen in found if seen.ready]
        if started:
            tuning.start_cost_s = 0.5 * (tuning.start_cost_s + tuning.start_of(max(started), len(asked)))
        for member, mine in beside:
            self._keep_observed(member, mine)
        return [(seen, "") for seen in found]

    def _measured_elsewhere(self, asked: Sequence[ProgramRequest]) -> list[tuple[ProgramResult, str]]:
        """Measure parts of the wave on remote machines at once. A lost part counts as not measured."""
        tuning, elsewhere = self.tuning, self.tuning.elsewhere
        assert elsewhere is not None
        parts = [asked[at : at + WAVE] for at in range(0, len(asked), WAVE)]
        for_s = max(5.0, tuning.explore_until_s - seconds())
        found: dict[int, tuple[list[ProgramResult], str]] = {}
        for held in elsewhere.held(
            [tuning.order(part, for_s, ROWS_SHARE) for part in parts],
            TIMEOUT_S + for_s + tuning.timeout_s,
        ):
            if held.answer is not None:
                found[held.number] = (
                    [ProgramResult.from_json(each) for each in held.answer["seen"]],
                    held.host,
                )
            else:
                tuning.note(
                    " | ".join(one.plan.describe() for one in parts[held.number]),
                    PROCESSES,
                    None,
                    held.why,
                    seconds(),
                    host=held.host,
                )
        return [
            (seen, host)
            for at, part in enumerate(parts)
            for seen, host in (
                [(seen, found[at][1]) for seen in found[at][0]]
                if at in found
                else [(ProgramResult(), "")] * len(part)
            )
        ]

    # -- measurements -----------------------------------------------------------------------------------------------------

    def _keep(
        self, process: int, on: Keys, rows: Sequence[Keys], seen: ProgramResult, host: str = ""
    ) -> None:
        """Record the blocks of one process, and the consequences if it did not survive."""
        tuning = self.tuning
        tuning.keep_blocks(process, [on | row for row in rows], seen, 0, host)
        program_ended(tuning, on | rows[min(len(seen.blocks), len(rows) - 1)], seen)

    def _tell(self) -> None:
        """Report the expected speed so far and the effect of each lever."""
        tuning = self.tuning
        if not tuning.blocks:
            return
        tuning.refit()
        best = best_measured(tuning)
        for key in tuning.choices:
            if key in tuning.measured:
                tuning.watcher.comparison(key, tuning.effect(key, best))
        ratio = tuning.gain(best)
        expected = f"expect about {ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}) with {tuning.plan_for(best).describe()}"
        tuning.watcher.expect(
            f"after {tuning.spent_s:.0f} s: {expected if best else 'nothing is faster than the plain program yet'}"
        )
