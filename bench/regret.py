"""Measures how much slower flatout's chosen plan is than the best one: regret = best / chosen - 1, in speed.

For each program, `flatout tune` with a moderate budget gives the chosen plan. Independently, the bench tries
every combination of the values that the program allows (threads, malloc, fused_optimizer, channels_last,
gc_pause, loader: off, or the most likely value; two values of malloc). Each combination is a fresh program; a
few at a time run interleaved with the plain one. Fresh pairs of processes then compare the fastest few (the
plain program counts as 1.00) with the chosen plan, three pairs each, block by block.

Reported: speed over the chosen plan's, the median over pairs with a 95 % interval (bootstrap over pairs and
rounds). The fastest of several noisy finalists looks faster than it is. So a finalist that beats the chosen
plan runs against it once more, in twice as many fresh pairs, and only this comparison counts: the regret is
its ratio minus 1. The regret is 0 if no finalist was faster. Goal: at most 5 %. Programs: the examples of the
repository and those in bench/programs; baseline of the speeds: the plain program. A program has 12 to 96
combinations of about eight seconds each: an hour or more in total. A restart skips the finished programs.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from open_set import tune
from pairs import TIMEOUT_S, enter, fresh_pairs, last_line, spell, standing_in
from provenance import RESULTS, ROOT, markdown_table, read_result, stamp, write_result

from flatout.cli.options.arguments import Duration
from flatout.job.folder import JobFolder
from flatout.launch.command import Command, parse_command
from flatout.levers import TABLE
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, compare
from flatout.probe.machine import look
from flatout.schema.enums import Origin
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import ProgramGone
from flatout.tune.comparison import Member, ProgramResult, take_turns
from flatout.tune.interleaver import Interleaver, RunningCandidate, ask_options
from flatout.tune.session import plan_of

# Long enough never to end by itself during a measurement.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "linear": ("examples/linear.py", "--steps", "100000000"),
    "mlp": ("examples/mlp.py", "--epochs", "1000000"),
    "lstm": ("examples/lstm.py", "--steps", "1000000"),
    "gpt": ("examples/gpt.py", "--steps", "1000000"),
    "cnn": ("examples/cnn.py", "--epochs", "10000"),
    "resnet18": ("examples/resnet18.py", "--epochs", "10000"),
    "wide_mlp": ("bench/programs/wide_mlp.py",),
    "many_small": ("bench/programs/many_small.py",),
    "unet": ("bench/programs/unet.py",),
}
# The number of values of each, the most likely first.
SEARCHED = {"threads": 1, "malloc": 2, "fused_optimizer": 1, "channels_last": 1, "gc_pause": 1, "loader": 1}
FINALISTS = 3
TOGETHER = 6  # programs kept ready at once
RACE_S, TURNS = 3.0, 1000  # for each program of a group; the clock ends them
GOAL = 0.05


def space(answers: dict[str, Any], searched: Mapping[str, int]) -> list[Plan]:
    """Returns every combination of the searched levers that apply, including the plain program."""
    axes: list[list[Choice | None]] = []
    for lever in TABLE:
        answer = answers.get(lever.name, {})
        if lever.name in searched and "values" in answer:
            axes.append(
                [
                    None,
                    *(
                        Choice(lever.name, value, Origin.TUNER)
                        for value in answer["values"][: searched[lever.name]]
                    ),
                ]
            )
    return [
        Plan(tuple(choice for choice in picked if choice is not None)) for picked in itertools.product(*axes)
    ]


def options_of(command: Command, job: JobFolder, facts: Facts) -> dict[str, Any]:
    interleaver = Interleaver(command, job, facts)
    try:
        answers: dict[str, Any] = ask_options(interleaver.start_paused(Plan(), 0, TIMEOUT_S).trial)["options"]
        return answers
    finally:
        interleaver.close()


def groups(plans: Sequence[Plan]) -> Iterable[Sequence[Plan]]:
    for at in range(0, len(plans), TOGETHER):
        yield plans[at : at + TOGETHER]


def screen(command: Command, plans: Sequence[Plan], job: JobFolder, facts: Facts) -> list[dict[str, Any]]:
    """Compares each plan with a plain program of the same group, interleaved. A failed plan gets a reason."""
    found: list[dict[str, Any]] = []
    for group in groups(plans):
        interleaver = Interleaver(command, job, facts)
        try:
            plain = enter(interleaver, Plan(), 0)
            candidates: list[RunningCandidate] = []
            for plan in group:
                try:
                    candidates.append(interleaver.start_paused(plan, 0, TIMEOUT_S))
                except ProgramGone as gone:
                    found.append(
                        {
                            "plan": plan.describe(),
                            "ratio": None,
                            "why": last_line(gone.record),
                            "digest": plan.digest,
                        }
                    )
            if candidates:
                first, *others = (
                    Member(candidate.trial, (None,) * TURNS, ProgramResult())
                    for candidate in (plain, *candidates)
                )
                take_turns(interleaver, [first, *others], seconds() + RACE_S * len(candidates))
                for candidate, member in zip(candidates, others, strict=True):
                    entry: dict[str, Any] = {
                        "plan": candidate.plan.describe(),
                        "digest": candidate.plan.digest,
                    }
                    rounds = [
                        Round(a.ms, b.ms)
                        for a, b in zip(first.result.blocks, member.result.blocks, strict=False)
                    ]
                    gone = last_line(member.result.end_record) if member.result.end_record is not None else ""
                    found.append(
                        {**entry, "ratio": None, "why": gone}
                        if gone or not rounds
                        else {**entry, "ratio": compare([rounds]).to_json()}
                    )
        finally:
            interleaver.close()
        print(f"    {len(found)} of {len(plans)} combinations", file=sys.stderr, flush=True)
    return found


def speed(entry: dict[str, Any]) -> float:
    """Returns the speed of a screened combination; 0 if it failed."""
    return float(entry["ratio"]["median"]) if entry["ratio"] else 0.0


def measure_program(
    name: str, budget_s: float, facts: Facts, pairs: int, finalists: int, searched: Mapping[str, int]
) -> dict[str, Any]:
    script, *arguments = PROGRAMS[name]
    argv = ["python", str(ROOT / script), *arguments]
    place = Path(tempfile.mkdtemp(prefix="regret-"))
    found: dict[str, Any] = {"made": stamp(facts), "budget_s": budget_s}
    try:
        with standing_in(place):
            command, job = parse_command(argv), JobFolder(place / "again").make()
            session, failure = tune(argv, budget_s, place / "tune")
            if failure or session is None:
                return {**found, "status": "failed", "why": failure}
            chosen = plan_of(session)
            found |= {
                "chosen": chosen.describe(),
                "chosen_ratio": session.speedup.to_json() if session.speedup else None,
                "spent_s": round(session.spent_s, 1),
                "guard": session.guard.verdict,
                "levers": [lever.to_json() for lever in session.levers],
            }
            plans = space(options_of(command, job, facts), searched)
            print(
                f"    chosen: {found['chosen']} {spell(session.speedup)}; {len(plans)} combinations",
                file=sys.stderr,
                flush=True,
            )
            found["screened"] = screen(command, [plan for plan in plans if len(plan)], job, facts)
            found["screened"].append(
                {
                    "plan": "plain",
                    "digest": Plan().digest,
                    "ratio": {"median": 1.0, "low": 1.0, "high": 1.0, "n": 0},
                }
            )
            found["screened"].sort(key=speed, reverse=True)
            by_digest = {plan.digest: plan for plan in plans}
            rivals = [
                entry for entry in found["screened"] if entry["ratio"] and entry["digest"] != chosen.digest
            ][:finalists]

            def meet(rival: dict[str, Any], pairs: int) -> dict[str, Any]:
                met = fresh_pairs(command, chosen, by_digest[rival["digest"]], job, facts, pairs)
                print(
                    f"    final: {rival['plan']}: {spell(met.ratio)} of the chosen plan's speed {met.failure}",
                    file=sys.stderr,
                    flush=True,
                )
                return {"plan": rival["plan"], "digest": rival["digest"], **met.to_json()}

            found["finals"] = [{**meet(rival, pairs), "screened": rival["ratio"]} for rival in rivals]
            best = fastest(found["finals"])
            found["last"] = meet(best, 2 * pairs) if best else None
        return {
            **found,
            "status": "measured",
            "combinations": len(plans),
            **regret_of(found["finals"], found["last"]),
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)


def fastest(finals: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the finalist that beat the chosen plan by the most; None if none did."""
    faster = [final for final in finals if final["ratio"] and final["ratio"]["median"] > 1]
    return max(faster, key=lambda final: final["ratio"]["median"], default=None)


def regret_of(finals: Sequence[dict[str, Any]], last: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the regret from the last comparison of the fastest finalist with the chosen plan, or None."""
    if not any(final["ratio"] for final in finals) or (last and not last["ratio"]):
        return {
            "regret": None,
            "regret_low": None,
            "regret_high": None,
            "best": "all other combinations failed",
        }
    low, middle, high = (last["ratio"][key] - 1 if last else 0.0 for key in ("low", "median", "high"))
    return {
        "regret": max(0.0, middle),
        "regret_low": max(0.0, low),
        "regret_high": max(0.0, high),
        "best": last["plan"] if last and middle > 0 else "the chosen plan",
    }


def verdict(entry: dict[str, Any]) -> str:
    if entry["regret"] is None:
        return "not measured"
    if entry["regret_high"] <= GOAL:
        return "met"
    return (
        "missed"
        if entry["regret_low"] > GOAL
        else "met by the median"
        if entry["regret"] <= GOAL
        else "missed by the median"
    )


def percent(entry: dict[str, Any]) -> str:
    return (
        "-"
        if entry["regret"] is None
        else f"{entry['regret']:.1%} [{entry['regret_low']:.1%}, {entry['regret_high']:.1%}]"
    )


def page(programs: dict[str, dict[str, Any]]) -> str:
    rows, finals = [], []
    for name, entry in programs.items():
        if entry["status"] == "failed":
            rows.append((name, "failed: " + entry["why"].splitlines()[0][:160], "-", "-", "-", "-", "-"))
            continue
        rows.append(
            (
                name,
                entry["chosen"],
                spell(entry["chosen_ratio"]) if entry["chosen_ratio"] else "plain stays",
                entry["combinations"],
                entry["best"],
                percent(entry),
                verdict(entry),
            )
        )
        finals += [
            (name, final["plan"], spell(final["screened"]), spell(final["ratio"]), final["failure"])
            for final in entry["finals"]
        ]
        if entry["last"]:
            finals.append(
                (
                    name,
                    entry["last"]["plan"],
                    "-",
                    spell(entry["last"]["ratio"]),
                    f"repeated {entry['last']['failure']}",
                )
            )
    measured = [
        entry for entry in programs.values() if entry["status"] == "measured" and entry["regret"] is not None
    ]
    parts = [
        "# Regret of the chosen plan\n",
        "Regret = speed of the best combination over the chosen plan's, minus 1; fresh pairs of processes, interleaved; 95 % intervals.\n",
        markdown_table(
            (
                "program",
                "chosen plan",
                "relative to plain, in the session",
                "combinations tried",
                "best combination",
                "regret",
                f"goal of at most {GOAL:.0%}",
            ),
            rows,
        ),
    ]
    if measured:
        worst = max(measured, key=lambda entry: entry["regret"])
        mean = sum(entry["regret"] for entry in measured) / len(measured)
        budgets = ", ".join(sorted({f"{entry['budget_s']:g} s" for entry in measured}))
        parts.append(
            f"\nPrograms measured: {len(measured)}. Mean regret {mean:.1%}, largest {worst['regret']:.1%}. Budget for tuning: {budgets}."
        )
    header = (
        "program",
        "combination",
        "relative to plain, screened",
        "relative to the chosen plan, fresh pairs",
        "remark",
    )
    parts += ["\n## The finalists\n", markdown_table(header, finals)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="3m", help="time to tune each program (default 3m)")
    parser.add_argument(
        "--only", default="", help=f"only these programs, separated by commas: {', '.join(PROGRAMS)}"
    )
    parser.add_argument("--pairs", type=int, default=3, help="fresh pairs for each finalist (default 3)")
    parser.add_argument(
        "--finalists",
        type=int,
        default=FINALISTS,
        help="number of combinations to compare with the chosen plan again (default 3)",
    )
    parser.add_argument(
        "--levers", default=",".join(SEARCHED), help="search only these, of " + ", ".join(SEARCHED)
    )
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    budget_s = Duration().convert(args.budget, None, None)
    wanted = [word for word in args.only.split(",") if word] or list(PROGRAMS)
    if unknown := set(wanted) - set(PROGRAMS):
        parser.error(f"unknown program {', '.join(sorted(unknown))}")
    searched = {lever: SEARCHED[lever] for lever in args.levers.split(",") if lever in SEARCHED}
    if len(searched) < len(args.levers.split(",")):
        parser.error(f"--levers accepts some of {', '.join(SEARCHED)}")
    facts = look()
    made = stamp(facts)
    done = read_result("regret", made, args.out).get("programs", {})
    for name in wanted:
        if not (ROOT / PROGRAMS[name][0]).is_file():
            print(f"{name}: skipped, because {PROGRAMS[name][0]} does not exist", flush=True)
            continue
        if name in done and not args.again and done[name]["status"] != "failed":
            continue
        print(f"{name} ...", flush=True)
        done[name] = measure_program(name, budget_s, facts, args.pairs, args.finalists, searched)
        done = {known: done[known] for known in PROGRAMS if known in done}
        write_result(
            "regret",
            made,
            page(done),
            {"programs": done, "searched": searched, "goal": GOAL},
            folder=args.out,
        )
    if done:
        paths = write_result(
            "regret",
            made,
            page(done),
            {"programs": done, "searched": searched, "goal": GOAL},
            folder=args.out,
        )
        print(f"\n{page(done)}\n\nwritten: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main()
