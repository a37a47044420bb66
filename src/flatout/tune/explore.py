"""Exploring: all levers are measured together, by a design of experiments, in many short processes.

    observed    the plain program, in whose blocks live levers are switched together by a balanced design
    waves       two programs at a time, started together: each has its own half of the levers that hold for the life of a process, and switches the live
                ones; they take turns with the observed program. The first wave has the plan that the prior calls likeliest, whole
    compile     compiled in a process of its own that works while others start; then measured with and without (`flatout.tune.compiling`)

Everything goes into one regression (`flatout.tune.effects`), which also chooses the next wave (`flatout.tune.design`). Exploring ends when the
regret that is expected is small, or when the rest of the time is needed for confirming.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.measure.clock import seconds
from flatout.tune.blame import program_ended
from flatout.tune.candidates import PROCESSES, Candidate, fetches_all
from flatout.tune.compiling import Compiling
from flatout.tune.conclude import best_measured, conclude
from flatout.tune.design import live_rows, next_processes, worth_more_time
from flatout.tune.effects import Fitted, Space
from flatout.tune.elsewhere import PATIENCE_S
from flatout.tune.factors import make_space, recall
from flatout.tune.one_thread import np
from flatout.tune.orders import together_order
from flatout.tune.together import FEWEST_TURNS, Asked, Member, Seen, measure_together, take_turns
from flatout.tune.tuning import Tuning, only

WAVE = 2  # programs that are started together
FIRST_ROWS, FEWEST_FIRST_ROWS = 6, 2  # of the observed program, before any other is started
FIRST_SHARE = 0.1  # of the budget, for them
BESIDE_ROWS = 2  # of the observed program in each wave
ROWS = 10  # of each program of a wave, and FEWEST_TURNS at least
ROWS_SHARE = 0.75  # of what a start costs may be spent on measuring
SLOW_TICK_MS = 1000.0  # from here on each row counts
OBSERVED = 0  # the number of the observed process
Keys = frozenset[str]
NOTHING: Keys = frozenset()


def explore(tuning: Tuning) -> list[Candidate]:
    """The candidates of the plan that is expected to be fastest; none where the plain program is. What was measured is in ``tuning.blocks``."""
    make_space(tuning)
    recall(tuning)
    if tuning.choices:
        _Exploring(tuning).run()
    return conclude(tuning)


class _Exploring:
    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.arena = tuning, tuning.arena
        self.random = np.random.default_rng(0)
        self.compiling = Compiling(tuning)
        self.waves = 0

    @property
    def quick(self) -> Space:
        """What is measured in waves: all that does not need to warm up for long."""
        return only(self.tuning.space, [factor.key for factor in self.tuning.space.factors if not factor.warms_up])

    def run(self) -> None:
        tuning = self.tuning
        self._observed()
        while self._time_for_a_wave():
            self._wave()
            self.compiling.begin(self.quick)
            waiting = not self.compiling.look()
            if not tuning.choices or (self.waves > 1 and not waiting and not worth_more_time(tuning.refit(), best_measured(tuning))):
                break
        self.compiling.wait(self.quick)

    # -- the observed program -----------------------------------------------------------------------------------------

    def _observed(self) -> None:
        """Live levers, switched together in the plain program."""
        tuning, plain = self.tuning, self.tuning.observed
        if plain is None or not self.quick.switched.any():
            return
        tuning.watcher.stage("exploring", "live levers, switched together in the running program")
        n = max(FEWEST_FIRST_ROWS, min(FIRST_ROWS, int(FIRST_SHARE * tuning.budget_s / self._row_s)))
        rows = [NOTHING, *live_rows(self.quick, None, NOTHING, n - 1, self.random)]
        member = Member(plain, tuning.live_rows(rows), Seen(), fresh=False)
        least_s = 1.5 * n * self._row_s  # also where the budget is hardly enough for confirming
        take_turns(self.arena, [member], max(tuning.explore_until_s, seconds() + least_s))
        self._keep_observed(member, rows)

    def _keep_observed(self, member: Member, rows: Sequence[Keys]) -> None:
        """Note its blocks; where it did not come through them, it is gone."""
        tuning, gone = self.tuning, member.seen.gone
        tuning.furthest_plain = max(tuning.furthest_plain, member.seen.ticks)
        if gone is not None:
            tuning.keep_first_plain(gone)
            tuning.observed = None
            self.arena.dismiss(member.trial)
        self._keep(OBSERVED, NOTHING, rows, member.seen)

    # -- waves ----------------------------------------------------------------------------------------------------------

    @property
    def _programs(self) -> int:
        """How many are started at once: two where memory and time allow it."""
        elsewhere = self.tuning.elsewhere
        if elsewhere is not None and elsewhere.ready:
            return WAVE * len(elsewhere.ready)
        two = self.tuning.copies > WAVE and self._rows_each(WAVE) >= self._fewest_rows
        return WAVE if two else 1

    @property
    def _until_s(self) -> float:
        return self.tuning.explore_until_s if self.waves else self.tuning.first_wave_until_s

    def _rows_each(self, programs: int) -> int:
        """How many blocks each program of a wave may have. It has fewer where measuring would cost more than ROWS_SHARE of what starting did."""
        tuning, here = self.tuning, min(programs, WAVE)
        left_s = self._until_s - self.compiling.reserved_s - seconds() - tuning.starts_s(here)
        beside = self._beside_rows if tuning.observed is not None else 0
        rows = min(ROWS, int((left_s / self._row_s - beside) / here))
        if tuning.length_ticks is not None:
            rows = min(rows, max(1, (tuning.length_ticks - tuning.warm_ticks) // (self.arena.block_ticks + self.arena.settle_ticks)))
        return rows

    @property
    def _row_s(self) -> float:
        """What one row takes, with what comes after a switch."""
        return max(self.arena.window_ticks * self.arena.tick_ms / 1000, 0.01)

    @property
    def _beside_rows(self) -> int:
        return BESIDE_ROWS if self.arena.tick_ms < SLOW_TICK_MS else 1

    @property
    def _fewest_rows(self) -> int:
        return 1 if self.tuning.length_ticks is not None else FEWEST_TURNS if self.arena.tick_ms < SLOW_TICK_MS else FEWEST_TURNS - 1

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
        asked = [Asked(tuning.plan_for(on | mine[0]), tuning.live_rows(mine)) for on, mine in zip(settings, rows, strict=True)]
        names = " | ".join(tuning.plan_for(on).describe() for on in settings)
        tuning.watcher.stage("exploring", f"wave {self.waves + 1}: {names}")
        self.waves += 1
        self._make_room(len(settings))
        for on, mine, (seen, host) in zip(settings, rows, self._measured(asked), strict=True):
            tuning.processes += 1
            self._keep(tuning.processes, on, mine, seen, host)
        self._tell()

    def _settings(self, space: Space, fitted: Fitted) -> list[Keys]:
        """What each program of a wave has on. The first wave leaves the plain program out where the observed one is that."""
        tuning = self.tuning
        plain_too = self.waves == 0 and tuning.observed is not None
        found = next_processes(space, fitted, tuning.blocks_of(space), self._programs + plain_too, self.random, always_plain=False)
        found = [on for on in found if on or not plain_too][:self._programs] or [NOTHING]
        return [found[0], *(on - self._fetching for on in found[1:])] if self.waves == 0 else found

    @property
    def _fetching(self) -> Keys:
        """What fetches the whole data set first. In the first wave one program does that; those of later waves find what it has kept."""
        return frozenset(key for key, choice in self.tuning.choices.items() if fetches_all(choice.value))

    def _make_room(self, programs: int) -> None:
        """Where no more fit into memory, the observed program ends first."""
        plain = self.tuning.observed
        if plain is not None and self.tuning.copies < programs + 1:
            self.tuning.keep_observed()

    def _measured(self, asked: Sequence[Asked]) -> list[tuple[Seen, str]]:
        """What came of each program, with the machine that measured it."""
        tuning, elsewhere = self.tuning, self.tuning.elsewhere
        if elsewhere is not None and elsewhere.ready:
            return self._measured_elsewhere(asked)
        plain, beside = tuning.observed, []
        if plain is not None and tuning.length_ticks is None:
            space = self.quick
            rows = [NOTHING]
            if space.switched.any():
                rows += live_rows(space, tuning.fit_of(space), NOTHING, self._beside_rows - 1, self.random)
            beside = [(Member(plain, tuning.live_rows(rows), Seen(), fresh=False), rows)]
        until_s = tuning.first_wave_until_s if self.waves == 1 else tuning.explore_until_s
        found = measure_together(self.arena, asked, until_s, tuning.patience_s, [member for member, _ in beside], ROWS_SHARE)
        started = [seen.start_s for seen in found if seen.ready]
        if started:
            tuning.start_cost_s = 0.5 * (tuning.start_cost_s + tuning.start_of(max(started), len(asked)))
        for member, mine in beside:
            self._keep_observed(member, mine)
        return [(seen, "") for seen in found]

    def _measured_elsewhere(self, asked: Sequence[Asked]) -> list[tuple[Seen, str]]:
        """A part of the wave on each other machine, at once. What is lost counts as not measured."""
        tuning, elsewhere = self.tuning, self.tuning.elsewhere
        assert elsewhere is not None
        parts = [asked[at:at + WAVE] for at in range(0, len(asked), WAVE)]
        for_s = max(5.0, tuning.explore_until_s - seconds())
        found: dict[int, tuple[list[Seen], str]] = {}
        for held in elsewhere.held([together_order(tuning, part, for_s, ROWS_SHARE) for part in parts], PATIENCE_S + for_s + tuning.patience_s):
            if held.answer is not None:
                found[held.number] = [Seen.from_json(each) for each in held.answer["seen"]], held.host
            else:
                tuning.note(" | ".join(one.plan.describe() for one in parts[held.number]), PROCESSES, None, held.why, seconds(), host=held.host)
        return [(seen, host) for at, part in enumerate(parts) for seen, host in
                ([(seen, found[at][1]) for seen in found[at][0]] if at in found else [(Seen(), "")] * len(part))]

    # -- what was measured ------------------------------------------------------------------------------------------------

    def _keep(self, process: int, on: Keys, rows: Sequence[Keys], seen: Seen, host: str = "") -> None:
        """Note the blocks of one process, and what follows where it did not come through."""
        tuning = self.tuning
        tuning.keep_blocks(process, [on | row for row in rows], seen, 0, host)
        program_ended(tuning, on | rows[min(len(seen.blocks), len(rows) - 1)], seen)

    def _tell(self) -> None:
        """What is expected so far, and what each lever seems to bring."""
        tuning = self.tuning
        if not tuning.blocks:
            return
        tuning.refit()
        best = best_measured(tuning)
        for key in tuning.choices:
            if key in tuning.measured:
                tuning.watcher.contest(key, tuning.effect(key, best))
        ratio = tuning.gain(best)
        expected = f"expect about {ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}) with {tuning.plan_for(best).describe()}"
        tuning.watcher.expect(f"after {tuning.spent_s:.0f} s: {expected if best else 'nothing is faster than the plain program yet'}")
