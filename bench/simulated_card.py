"""Runs the policy of a search on a GPU (`flatout.tune.card_policy`) against simulated programs and clocks.

The parts of a step (data, launches, the device, other) and the seconds of a start are those recorded on an
H100; what was not recorded is an assumption, marked with [A]. A step takes data + max(launch, device) + other,
or max(loader, device) if workers load. Levers act on parts, so their effects are not additive in log time.

    python bench/simulated_card.py --sessions 500 --out bench/results

Share: the step time under the best plan over that under the plan that was kept, 1 at best. Goals: `GOALS`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from provenance import RESULTS, markdown_table, stamp, write_result

from flatout.schema.records import MIN_RATIO_LOW
from flatout.tune.card_policy import first_starts, next_action
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
    block_s,
)
from flatout.tune.confirm import MIN_SPEEDUP
from flatout.tune.effects import PLAN, Factor, Space, TimedBlock, plan_speed

Parts = dict[str, float]
PROCESS = frozenset({"allocator"})
WRONG = 0.03  # chance that a lever computes something wrong
# Cores, copies that the device holds (None: those of the program), chance of a wrong lever
VARIANTS = ((16, None, 0.0), (16, None, WRONG), (2, None, 0.0), (16, 1, 0.0))
INTERACTION_SD = 0.05


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of program: milliseconds of the parts of its step, its levers, and what they do to the parts.

    ``exact``: levers that the guard need not replay. ``slow``: levers that start slowly. ``refused``: levers that
    the guard rejects, though they are fast.
    """

    parts: Parts
    levers: tuple[str, ...]
    change: Callable[[Parts, Keys], None]
    fixed: Keys  # of the levers: set for the life of a process
    exact: Keys
    slow: tuple[str, ...] = ()
    excludes: tuple[tuple[str, str], ...] = ()
    refused: Keys = PLAIN
    copies: int = 9


def tutorial(part: Parts, on: Keys) -> None:
    if "batched_transforms" in on:
        part["data"] *= 0.11 if "resident_data" in on else 0.3  # the latter [A]
    elif "resident_data" in on:
        part["data"] *= 0.6  # [A]
    if "resident_data" in on:
        part["other"] *= 0.35  # copies to the device
    if "cached_prefix" in on and "resident_data" not in on:
        part["data"] *= 0.85
    if "device_prefetch" in on:
        part["data"] *= 0.95
    if "compile" in on:
        part["launch"] = 2.2
        part["device"] *= 0.7
    if "fused_optimizer" in on:
        part["launch"] *= 0.92
    if "graphs" in on:
        part["launch"] = 0.9
    part["device"] *= {0: 1.0, 1: 0.8, 2: 0.45}[len(on & {"autocast", "channels_last"})]
    if "cudnn_benchmark" in on:
        part["device"] *= 0.9
    if "early_values" in on:
        part["other"] *= 0.7


def gpt(part: Parts, on: Keys) -> None:
    if "tf32" in on:
        part["device"] *= 0.6
    if "autocast" in on:
        part["device"] = min(part["device"], 33.0)
    for lever, factor in (("attention", 0.75), ("fused_ops", 0.92), ("compile", 0.66)):
        if lever in on:
            part["device"] *= factor
    if "compile" in on:
        part["launch"] = 10.0
    if "fused_optimizer" in on:
        part["launch"] *= 0.93
    if "graphs" in on:
        part["launch"] = 1.5


def large_gpt(part: Parts, on: Keys) -> None:
    if "autocast" in on:
        part["device"] /= 5.6
    elif "tf32" in on:
        part["device"] /= 2.5  # [A]
    for lever, factor in (("attention", 0.8), ("compile", 0.62), ("fused_ops", 0.97)):
        if lever in on:
            part["device"] *= factor
    if "graphs" in on:
        part["launch"] = 2.0


def gan(part: Parts, on: Keys) -> None:
    if "fused_optimizer" in on:
        part["launch"] *= 0.6
        part["python"] *= 0.75
    if "graphs" in on:
        part["launch"] = 0.5
        part["python"] *= 0.8
    if "autocast" in on:
        part["launch"] *= 1.1


def imagenet(part: Parts, on: Keys) -> None:
    if "loader" in on:
        part["loader"] = 165.0
    part["device"] *= {0: 1.0, 1: 0.75, 2: 0.5}[len(on & {"autocast", "channels_last"})]
    if "graphs" in on:
        part["launch"] = 2.0


SETTINGS = ("allocator", "gc_pause", "debug_off")
KINDS = {
    "tutorial": Kind(
        {"data": 20.2, "launch": 6.6, "device": 2.4, "other": 3.0},
        (*SETTINGS, "cached_prefix", "batched_transforms", "resident_data", "device_prefetch", "tf32",
         "channels_last", "autocast", "fused_optimizer", "graphs", "early_values", "cudnn_benchmark", "compile"),
        tutorial,
        frozenset({"allocator", "cached_prefix", "batched_transforms", "resident_data", "device_prefetch", "cudnn_benchmark"}),
        frozenset({*SETTINGS, "cached_prefix", "batched_transforms", "resident_data", "device_prefetch", "early_values", "cudnn_benchmark"}),
        ("compile", "cudnn_benchmark"),
    ),
    "gan": Kind(
        {"python": 4.0, "launch": 2.3, "device": 0.25, "data": 0.2},
        (*SETTINGS, "tf32", "autocast", "fused_ops", "fused_optimizer", "graphs", "early_values", "compile"),
        gan,
        frozenset({"allocator"}),
        frozenset({*SETTINGS, "early_values"}),
        ("compile",),
        refused=frozenset({"autocast"}),
    ),
    "gpt": Kind(
        {"data": 0.3, "launch": 60.0, "device": 118.0, "other": 2.0},
        (*SETTINGS, "tf32", "autocast", "attention", "fused_ops", "fused_optimizer", "graphs", "early_values", "compile"),
        gpt,
        frozenset({"allocator"}),
        frozenset({*SETTINGS, "early_values"}),
        ("compile",),
    ),
    "gpt at batch 64": Kind(
        {"data": 1.0, "launch": 65.0, "device": 1900.0, "other": 2.0},
        (*SETTINGS, "tf32", "autocast", "attention", "fused_ops", "fused_optimizer", "graphs", "early_values", "compile"),
        large_gpt,
        frozenset({"allocator"}),
        frozenset({*SETTINGS, "early_values"}),
        ("compile",),
        copies=1,
    ),
    "imagenet": Kind(
        {"loader": 300.0, "launch": 30.0, "device": 180.0},
        (*SETTINGS, "loader", "tf32", "channels_last", "autocast", "fused_optimizer", "graphs", "early_values", "compile"),
        imagenet,
        frozenset({"allocator", "loader"}),
        frozenset({*SETTINGS, "loader", "early_values"}),
        ("compile",),
    ),
}  # fmt: skip
# Budget in seconds: the least median share, and the least at the 5th percentile
GOALS: dict[str, dict[int, tuple[float, float]]] = {
    "tutorial": {90: (0.97, 0.92)},
    "gan": {90: (0.97, 0.92)},
    "imagenet": {90: (0.97, 0.92)},
    "gpt": {90: (0.70, 0.60), 180: (0.97, 0.92)},
    "gpt at batch 64": {90: (0.80, 0.60), 180: (0.95, 0.88)},
}


@cache
def space_of(kind: Kind) -> Space:
    """The space that the search explores; priors are neutral, except for compilers."""
    factors = tuple(
        Factor(
            name, name, name not in kind.fixed, -0.1 if name == "compile" else 0.0, 0.25, name in kind.slow
        )
        for name in kind.levers
    )
    return Space(factors, frozenset(map(frozenset, kind.excludes)))


def warm_up_steps(ms: float) -> int:
    """Eight deterministic steps and eight until they are steady; fewer if they take seconds."""
    return 16 if ms < 300 else 4


@dataclass
class Simulation:
    """A session on one card: carries out actions, and keeps what the state needs."""

    kind: Kind
    budget_s: float
    cores: int
    rng: np.random.Generator
    copies: int = 9
    now_s: float = 1.0  # its own start
    programs: dict[int, Program] = field(default_factory=dict)
    left_s: dict[int, float] = field(default_factory=dict)  # of the work that a stage still needs
    blocks: list[TimedBlock] = field(default_factory=list)
    outcomes: dict[Keys, Outcome] = field(default_factory=dict)
    confirmed: dict[Keys, float] = field(default_factory=dict)
    confirmed_s: dict[Keys, float] = field(default_factory=dict)
    checked: set[Keys] = field(default_factory=set)
    refused: Keys = PLAIN
    compiled: bool = False
    wrong_share: float = 0.0
    slower: bool = False  # each lever makes the step slower
    equal: dict[Keys, bool] = field(default_factory=dict)
    intervals: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.host = min(1.7, max(1.0, float(np.exp(rng.normal(0.2, 0.2)))))
        self.wrong = (
            frozenset(name for name in self.kind.levers if rng.random() < self.wrong_share)
            | self.kind.refused
        )
        self.space = space_of(self.kind)
        size = len(self.space.factors)
        self.interactions = np.triu(rng.normal(0, INTERACTION_SD / size, (size, size)), 1)
        self.luck: dict[int, float] = {}
        self.ready_s: dict[int, float] = {}
        self.replica_s = float(np.clip(rng.normal(6, 2), 3, 12))
        self.compile_s = float(np.clip(np.exp(rng.normal(math.log(36), 0.3)), 25, 60))
        self.import_s = self.host * (
            float(rng.normal(3.0, 0.3)) + float(np.exp(rng.normal(math.log(3.0), 0.3)))
        )

    # -- the truth

    def step_ms(self, on: Keys) -> float:
        part = {
            name: ms * (1.0 if name in ("device", "loader") else self.host)
            for name, ms in self.kind.parts.items()
        }
        self.kind.change(part, on)
        if self.slower:
            part = {name: ms * (1 + 0.05 * len(on)) for name, ms in self.kind.parts.items()}
        busy = max(part.pop("launch"), part.pop("device"))
        loader = part.pop("loader", 0.0)
        row = self.space.rows([on])[0].astype(float)
        return max(busy + sum(part.values()), loader) * math.exp(float(row @ self.interactions @ row))

    @property
    def best_ms(self) -> float:
        """The step of the best plan: coordinate descent over all sound levers."""
        on = frozenset(self.kind.levers) - self.wrong
        while True:
            options = [on ^ {name} for name in self.kind.levers if name not in self.wrong]
            best = min(options, key=self.step_ms)
            if self.step_ms(best) >= self.step_ms(on):
                return self.step_ms(on)
            on = best

    # -- the search's view

    @property
    def bundle(self) -> Keys:
        return frozenset(name for name in self.kind.levers if name not in self.kind.slow)

    def state(self) -> State:
        plain_ms = self.step_ms(PLAIN)
        return State(
            self.now_s,
            self.budget_s,
            0.1 * self.budget_s,
            self.cores,
            self.copies,
            9,
            Costs(
                self.import_s,
                2.4,
                warm_up_steps(plain_ms),
                plain_ms / 1000,
                self.replica_s,
                0.0 if self.compiled else 36.0,
            ),
            self.space,
            self.bundle,
            PROCESS,
            frozenset(self.kind.levers) - self.kind.fixed,
            frozenset(self.kind.levers) - self.kind.exact,
            self.kind.slow,
            frozenset({"graphs"}),
            tuple(self.programs.values()),
            tuple(self.blocks),
            frozenset(self.checked),
            self.refused,
            dict(self.equal),
            dict(self.outcomes),
        )

    # -- actions

    def start(self, seed: int, plan: Keys = PLAIN) -> None:
        number = len(self.luck)
        self.luck[number] = float(self.rng.normal(0, 0.045))
        self.programs[number] = Program(number, seed, Stage.IMPORTING, plan)
        self.left_s[number] = self.import_s * float(self.rng.normal(1, 0.05))

    def release(self, number: int, plan: Keys) -> None:
        program = self.programs[number]
        self.programs[number] = replace(program, stage=Stage.WARMING, plan=plan)
        seconds = (
            float(np.clip(self.rng.normal(2.0, 0.5), 1, 4))
            + 0.4
            + warm_up_steps(self.step_ms(plan)) * self.step_ms(plan) / 1000
        )
        seconds += 1.5 * ("graphs" in plan)
        if "cudnn_benchmark" in plan:
            seconds += float(self.rng.uniform(11, 23))
        if "compile" in plan:
            seconds += float(np.clip(self.rng.normal(5, 1.5), 2, 9)) if self.compiled else self.compile_s
        self.left_s[number] = seconds

    def pass_time(
        self, seconds: float, until: Callable[[], bool] = lambda: False, paused: bool = False
    ) -> None:
        """Let time pass; processes that start make progress, unless they are stopped."""
        step, end_s = 0.1, self.now_s + seconds
        while self.now_s < end_s and not until():
            self.now_s += step
            if paused:
                continue
            importing = [n for n, p in self.programs.items() if p.stage is Stage.IMPORTING]
            crowd = max(1.0, len(importing) / self.cores) * (1 + 0.05 * (len(self.programs) - 1))
            warming = [n for n, p in self.programs.items() if p.stage is Stage.WARMING]
            for n in importing:
                self.left_s[n] -= step / crowd
            for n in warming:
                self.left_s[n] -= step / max(1.0, (len(warming) + len(importing)) / self.cores)
            for n in (*importing, *warming):
                program = self.programs[n]
                if self.left_s[n] <= 0 and program.stage is Stage.IMPORTING:
                    self.programs[n] = replace(program, stage=Stage.HELD)
                elif self.left_s[n] <= 0:
                    self.programs[n] = replace(program, stage=Stage.READY)
                    self.ready_s[n] = self.now_s
                    if program.plan:
                        exact = program.plan & self.kind.exact
                        self.equal[exact] = not exact & self.wrong
                    self.compiled = self.compiled or "compile" in program.plan

    def carry_out(self, action: Action) -> None:
        match action:
            case Start(seed, plan):
                self.start(seed, plan)
            case Release(number, plan):
                self.release(number, plan)
            case End(number):
                self.programs[number] = replace(self.programs[number], stage=Stage.ENDED)
                self.pass_time(0.5)
            case Measure(numbers, rows, alone):
                self.measure(numbers, rows, alone)
            case Replay(_, keys):
                refused = keys & self.wrong
                self.pass_time(self.replica_s + 1.5 * len(refused))
                self.checked.add(keys - refused)
                self.refused |= refused
            case Confirm(plan, pairs):
                self.confirm(plan, pairs)
            case _:
                stages = {n: p.stage for n, p in self.programs.items()}
                self.pass_time(300.0, lambda: {n: p.stage for n, p in self.programs.items()} != stages)

    def measure(self, numbers: tuple[int, ...], rows: tuple[tuple[Keys, ...], ...], alone: bool) -> None:
        for turn in range(max(map(len, rows))):
            order = list(zip(numbers, rows, strict=True))[:: 1 if turn % 2 == 0 else -1]
            for number, sets in order:
                if turn >= len(sets):
                    continue
                program = self.programs[number]
                if self.step_ms(PLAIN) < 300 and not any(b.process == number for b in self.blocks):
                    self.pass_time(block_s(self.step_ms(program.plan) / 1000), paused=alone)
                on = sets[turn] | (program.plan & self.kind.fixed)
                ms = self.step_ms(on)
                device_bound = self.kind.parts["device"] > self.kind.parts["launch"]
                noise = 0.025 if device_bound else 0.12 * self.rng.standard_t(3)
                if not device_bound:
                    noise += 0.5 * math.exp(-(self.now_s - self.ready_s[number]) / 0.8)
                else:
                    noise *= self.rng.standard_normal()
                noise += (self.rng.random() < 0.04) * self.rng.uniform(0.2, 0.8)
                took_s = block_s(self.step_ms(on) / 1000)
                at_s = self.now_s
                self.pass_time(took_s, paused=alone)
                value = ms * math.exp(self.luck[number] + noise * math.sqrt(0.2 / max(took_s, 0.2)))
                window = program.seed * 10**6 + len([b for b in self.blocks if b.process == number])
                self.blocks.append(TimedBlock(number, on, at_s, window, value))

    def confirm(self, plan: Keys, pairs: tuple[tuple[int, int], ...]) -> None:
        self.pass_time(0.8)
        plain, planned = {p for p, _ in pairs}, {p for _, p in pairs}
        fresh = [b for b in self.blocks if b.process in plain and not b.active]
        fresh += [
            replace(b, active=frozenset({PLAN}))
            for b in self.blocks
            if b.process in planned and b.active == plan
        ]
        ratio = plan_speed(fresh)
        truth = self.step_ms(PLAIN) / self.step_ms(plan)
        self.intervals.append(ratio.low <= truth <= ratio.high)
        culprits = plan & self.wrong & self.kind.exact  # equal bits are compared; the guard names the lever
        self.refused |= culprits
        if culprits:
            self.outcomes[plan] = Outcome.REJECTED
        elif ratio.low >= MIN_RATIO_LOW and ratio.median >= max(MIN_SPEEDUP, *self.confirmed.values(), 0.0):
            self.outcomes.pop(plan, None)
            self.outcomes[plan] = Outcome.KEPT
            self.confirmed[plan], self.confirmed_s[plan] = ratio.median, self.now_s
        elif ratio.median > MIN_SPEEDUP and not self.confirmed:
            self.outcomes[plan] = Outcome.UNDECIDED
        else:
            self.outcomes[plan] = Outcome.REJECTED


def start_session(world: Simulation) -> None:
    """Bring the plain program to its steady state; others import meanwhile."""
    world.start(0)
    for start in first_starts(world.cores, PROCESS):
        world.carry_out(start)
    world.pass_time(60.0, lambda: world.programs[0].stage is Stage.HELD)
    world.release(0, PLAIN)
    world.pass_time(60.0, lambda: world.programs[0].stage is Stage.READY)


def session(
    name: str, budget_s: float, cores: int, copies: int | None, wrong_share: float, number: int
) -> dict[str, Any]:
    kind = KINDS[name]
    rng = np.random.default_rng([number, int(budget_s), cores])
    world = Simulation(kind, budget_s, cores, rng, wrong_share=wrong_share)
    world.copies = copies or kind.copies
    start_session(world)
    while not isinstance(action := next_action(world.state()), Stop):
        world.carry_out(action)
        if len(world.blocks) > 3000:
            raise RuntimeError(f"the policy does not end: {action}")
    kept = world.state().kept
    first = min(world.confirmed_s.values(), default=math.inf)
    return {
        "share": world.best_ms / world.step_ms(kept),
        "speed": world.step_ms(PLAIN) / world.step_ms(kept),
        "best": world.step_ms(PLAIN) / world.best_ms,
        "first_s": first if first < math.inf else None,
        "false_accept": bool(kept & world.wrong),
        "end_s": world.now_s,
        "covered": sum(world.intervals),
        "intervals": len(world.intervals),
        "plan": sorted(kept),
    }


def earlier_search(name: str, budget_s: float, number: int) -> float:
    """The speed that the search of the first sessions on a card reached: its order of work, with these clocks.

    Plain program, blocks, a wave of two programs with cudnn_benchmark, then the rule that dropped all levers that
    need the guard if its replica and two pairs did not fit.
    """
    world = Simulation(KINDS[name], budget_s, 16, np.random.default_rng(number))
    start_s = world.import_s + 2.0 + 8 * world.step_ms(PLAIN) / 1000
    tried = "cudnn_benchmark" if "cudnn_benchmark" in world.kind.levers else ""
    algorithms_s = float(world.rng.uniform(11, 23)) if tried else 0.0
    wave_s = 1.35 * start_s + algorithms_s + 1.5
    world.now_s += start_s + 6 * 0.4 + wave_s + 3 * 3 * 0.3
    pair_s = 1.35 * 0.5 * (start_s + wave_s / 1.35) + 4.0
    plan = (world.bundle | {tried} - {""}) - world.wrong
    if world.replica_s + 2 * pair_s > 1.15 * budget_s - world.now_s:
        plan = frozenset(key for key in plan if key in world.kind.exact)
    return world.step_ms(PLAIN) / world.step_ms(plan)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=500, help="of each program and budget")
    parser.add_argument("--only", default=None, help="these programs, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made, rows = stamp(), []
    earlier = [earlier_search("tutorial", 80.0, number) for number in range(args.sessions)]
    for name in args.only.split(",") if args.only else KINDS:
        for budget_s in GOALS[name]:
            for cores, copies, wrong in VARIANTS:
                if copies == KINDS[name].copies:
                    continue
                run = partial(session, name, float(budget_s), cores, copies, wrong)
                with ProcessPoolExecutor(args.jobs) as pool:
                    found = list(pool.map(run, range(args.sessions), chunksize=8))
                rows.append(summary(name, budget_s, cores, copies or KINDS[name].copies, wrong, found))
                print(rows[-1], file=sys.stderr, flush=True)
    quantiles = [round(float(np.quantile(earlier, q)), 2) for q in (0.05, 0.5, 0.95)]
    raw = {"rows": rows, "earlier": quantiles}
    print(*write_result("simulated_card", made, page(rows, quantiles), raw, folder=args.out), sep="\n")
    return 0


def page(rows: list[dict[str, Any]], earlier: list[float]) -> str:
    header = (
        "program", "budget", "cores", "copies", "wrong levers", "sessions", "share of the best speed, median",
        "5th percentile", "goal", "speed", "best", "first plan after", "by 45 s", "no plan", "wrong levers kept",
        "intervals cover",
    )  # fmt: skip
    lines = []
    for row in rows:
        goal = GOALS[row["program"]][row["budget_s"]]
        lines.append(
            (
                row["program"],
                f"{row['budget_s']} s",
                row["cores"],
                "enough" if row["copies"] > 4 else row["copies"],
                f"{row['wrong']:.0%}",
                row["sessions"],
                row["median"],
                row["p5"],
                f"{goal[0]} / {goal[1]}",
                f"{row['speed']}x",
                f"{row['best']}x",
                f"{row['first_s']} s",
                f"{row['by_45_s']:.1%}",
                row["no_plan"],
                row["false_accepts"],
                f"{row['covered']:.1%}",
            )
        )
    low, middle, high = earlier
    return "\n".join(
        [
            "# The search on a GPU, simulated\n",
            "The policy of `flatout tune` on a GPU (`flatout.tune.card_policy`), driven by simulated programs and clocks. Their parts",
            "were recorded on one H100 or are assumptions (`bench/simulated_card.py`): no figure here was measured on a GPU.\n",
            markdown_table(header, lines),
            f"\nCalibration: the earlier order of work reaches {middle}x on the tutorial in 80 s ({low} to {high}, 5th to 95th",
            "percentile); recorded on the H100: 3.33x (2.72 to 4.07). *first plan after*: median until a plan is confirmed. *wrong",
            "levers*: each lever computes something wrong with this chance.",
        ]
    )


def summary(
    name: str, budget_s: int, cores: int, copies: int, wrong: float, found: list[dict[str, Any]]
) -> dict[str, Any]:
    shares = [run["share"] for run in found]
    firsts = [run["first_s"] or math.inf for run in found]
    return {
        "program": name,
        "budget_s": budget_s,
        "cores": cores,
        "copies": copies,
        "wrong": wrong,
        "sessions": len(found),
        "median": round(float(np.median(shares)), 3),
        "p5": round(float(np.quantile(shares, 0.05)), 3),
        "speed": round(float(np.median([run["speed"] for run in found])), 2),
        "best": round(float(np.median([run["best"] for run in found])), 2),
        "first_s": round(float(np.median(firsts)), 1),
        "by_45_s": round(float(np.mean([at <= 45 for at in firsts])), 3),
        "no_plan": sum(at == math.inf for at in firsts),
        "false_accepts": sum(run["false_accept"] for run in found),
        "covered": round(sum(r["covered"] for r in found) / max(1, sum(r["intervals"] for r in found)), 3),
        "end_s": round(float(np.median([run["end_s"] for run in found])), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
