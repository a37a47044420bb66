"""The guard's test bed: how often does it accept a broken lever, and how often does it refuse a sound one?

For each program and lever the tuner's own way is gone. The plain program runs with seeds 0, 1 and 2, and with seed 0 once more.
In the running plain program the step replica is asked about every lever that can be switched and claims less than EXACT.
What it refuses is refused, as in a search; what passes gets fresh processes with the same three seeds, and `judge` compares the
records. An EXACT claim that fails with the first seed is not run with the others: one differing bit is enough.

    python bench/guard.py                       all of it: about 35 minutes on two quiet cores
    python bench/guard.py --programs mlp,cnn --levers autocast,label_smoothing
    python bench/guard.py --records DIR         keep the records there; what is there already is judged again, not run again
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import HERE, ROOT, markdown_table, stamp, write_result

os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])  # the programs import the bed's levers

from guard_levers import BAD, TABLE

from flatout.engine.guard import SHAKE, judge, wants_shaken
from flatout.launch.command import understand
from flatout.measure.clock import seconds
from flatout.plan.facts import Facts
from flatout.plan.folder import TrialFolder, read_json, write_json
from flatout.plan.lever import Lever
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import GuardRecord, TrialRecord
from flatout.plan.words import Effect
from flatout.probe.machine import look
from flatout.trial.parent import ProgramGone, Trial, measure

SEEDS = (0, 1, 2)
PATIENCE_S = 600.0
# Arguments that keep the program going, and the ticks measured after its warm-up: about two seconds of training.
PROGRAMS = {
    "mlp": (("--epochs", "1000"), 200),
    "linear": (("--steps", "100000"), 400),
    "gpt": (("--steps", "5000"), 50),
    "lstm": (("--steps", "5000"), 50),
    "cnn": (("--epochs", "1000"), 40),
    "resnet18": (("--epochs", "1000"), 20),
}
DEFAULT = ("mlp", "linear", "gpt", "lstm", "cnn")
P_VALUES = ("distribution", "shift", "draws")
BROKEN = {lever.name for lever in BAD}


@dataclass
class Bed:
    """One program, with the folder that holds its records."""

    name: str
    folder: Path
    facts: Facts

    def __post_init__(self) -> None:
        arguments, self.ticks = PROGRAMS[self.name]
        self.command = understand(("python", str(ROOT / "examples" / f"{self.name}.py"), *arguments))

    def trial(self, title: str, plan: Plan, seed: int, shake: float = 0.0) -> Trial:
        folder = self.folder / title
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "claim").unlink(missing_ok=True)
        return Trial(self.command, TrialFolder(folder), plan, self.facts, seed, reseed=True, table="guard_levers:TABLE", shake=shake)

    def record(self, title: str, plan: Plan, seed: int, shake: float = 0.0) -> TrialRecord:
        """The record of a run, taken from the folder where it lies there already."""
        known = read_json(self.folder / f"{title}.json")
        if known is None:
            with self.trial(title, plan, seed, shake) as trial:
                record = measure(trial, self.ticks, seconds() + PATIENCE_S, draws=True)
            if record.status != "finished":
                raise SystemExit(f"guard: {self.name}, {title}: {record.status}: {record.reason[-400:]}\n{record.log_tail[-800:]}")
            known = record.to_json()
            write_json(self.folder / f"{title}.json", known)
        return TrialRecord.from_json(known)

    @contextlib.contextmanager
    def running(self) -> Iterator[Trial]:
        with self.trial("observed", Plan(), 0) as trial:
            trial.wait_ready(seconds() + PATIENCE_S)
            yield trial

    def observe(self, levers: list[Lever]) -> dict[str, Any]:
        """What each lever says of this program, and the replica's answer for those that it can be asked about."""
        path = self.folder / "observed.json"
        seen: dict[str, Any] = read_json(path) or {"options": {}, "replicas": {}}
        todo = [lever for lever in levers if lever.name not in seen["options"]]
        if not todo:
            return seen
        with self.running() as trial:
            answers = trial.ask({"do": "options"}, seconds() + PATIENCE_S)["options"]
            for lever in todo:
                seen["options"][lever.name] = answer = answers[lever.name]
                effect = Effect(answer.get("effect") or lever.effect)
                if "skip" not in answer and lever.live and effect is not Effect.EXACT:
                    say(f"{self.name}: replica of {lever.name}")
                    choice = Choice(lever.name, answer["values"][0])
                    try:
                        seen["replicas"][lever.name] = trial.ask({"do": "replica", "choices": [choice.to_json()]}, seconds() + PATIENCE_S)["replica"]
                    except ProgramGone as gone:
                        raise SystemExit(f"guard: {self.name} did not survive the replica of {lever.name}: {gone.record.reason[-400:]}") from None
            trial.finish()
        write_json(path, seen)
        return seen


def verdict_of(bed: Bed, lever: Lever, seen: dict[str, Any]) -> GuardRecord | str:
    """The guard's word on one lever, or the reason why the lever does not apply."""
    answer = seen["options"][lever.name]
    if "skip" in answer:
        return str(answer["skip"])
    effect = Effect(answer.get("effect") or lever.effect)
    replica = seen["replicas"].get(lever.name)
    wrong = [c for c in (replica or {}).get("checks", ()) if not c["passed"]]
    if wrong:
        return GuardRecord.from_json({"verdict": "failed", "why": wrong[0]["why"], "checks": replica["checks"]})
    plan = Plan((Choice(lever.name, answer["values"][0]),))
    again, plain, tuned = bed.record("plain-again", Plan(), 0), [], []
    for seed in SEEDS:
        plain.append(bed.record(f"plain-{seed}", Plan(), seed))
        tuned.append(bed.record(f"{lever.name}-{seed}", plan, seed))
        if tuned[-1].skipped:
            return f"not applied: {tuned[-1].skipped[0]['reason']}"
        if effect is Effect.EXACT and seed == SEEDS[0]:
            first = judge(effect, plain, tuned, replica, again)
            if first.verdict == "failed":
                return first
    found = judge(effect, plain, tuned, replica, again)
    if wants_shaken(found):
        shaken = [bed.record(f"shaken-{seed}", Plan(), seed, SHAKE) for seed in SEEDS[:2]]
        found = judge(effect, plain, tuned, replica, again, shaken)
    return found


def rows_of(beds: list[Bed], levers: list[Lever]) -> list[dict[str, Any]]:
    rows = []
    for bed in beds:
        seen = bed.observe(levers)
        for lever in levers:
            start = seconds()
            found = verdict_of(bed, lever, seen)
            effect = Effect(seen["options"][lever.name].get("effect") or lever.effect)
            row = {"program": bed.name, "lever": lever.name, "broken": lever.name in BROKEN, "claim": effect.value}
            if isinstance(found, str):
                row |= {"outcome": "not applicable", "why": found}
            else:
                row |= {"outcome": "rejected" if found.verdict == "failed" else "accepted", "verdict": found.verdict, "why": found.why,
                        "checks": [c.to_json() for c in found.checks], **nearest(found)}
            say(f"{bed.name}: {lever.name} {row['outcome']}{mark(row)} ({seconds() - start:.0f} s)")
            rows.append(row)
    return rows


def nearest(found: GuardRecord) -> dict[str, Any]:
    """The check that decided: the first that failed, else the one that came nearest to its limit."""
    failed = [c for c in found.checks if not c.passed]
    measured = [c for c in found.checks if c.value is not None and c.limit]
    one = failed[0] if failed else max(measured, key=share, default=None)
    return {"check": one.name if one else "bitwise", "value": one.value if one else None, "limit": one.limit if one else None}


def share(check: Any) -> float:
    """How much of its limit a check has used up; a p-value must stay above its limit."""
    return float(check.limit / max(check.value, 1e-300) if check.name in P_VALUES else check.value / check.limit)


def mark(row: dict[str, Any]) -> str:
    return {(True, "accepted"): " (FALSE ACCEPT)", (False, "rejected"): " (FALSE REJECT)"}.get((row["broken"], row["outcome"]), "")


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    judged = [row for row in rows if row["outcome"] != "not applicable"]
    return {"broken": sum(r["broken"] for r in judged), "false_accepts": sum(r["broken"] and r["outcome"] == "accepted" for r in judged),
            "sound": sum(not r["broken"] for r in judged), "false_rejects": sum(not r["broken"] and r["outcome"] == "rejected" for r in judged)}


def page(rows: list[dict[str, Any]]) -> str:
    found = counts(rows)
    parts = ["# The guard's test bed\n",
             f"Broken levers accepted: **{found['false_accepts']} of {found['broken']}**. "
             f"Sound levers refused: **{found['false_rejects']} of {found['sound']}**.",
             f"One case is a lever in a program; {len(SEEDS)} seeds each.\n",
             "*check* is the comparison that decided: the first that failed, else the one that came nearest to its limit. A p-value (distribution,",
             "shift, draws) must stay above its limit, every other value at or below it; a bitwise comparison has neither. A deviation rarer than",
             "the steps that were run is beyond any such test.\n"]
    for title, broken in (("Broken levers (to be rejected)", True), ("Sound levers (to be accepted)", False)):
        table = [(row["lever"], row["program"], row["claim"], f"{row['outcome']}{mark(row)}", row["check"], number(row["value"]), number(row["limit"]))
                 for row in sorted(rows, key=lambda r: r["lever"]) if row["broken"] is broken and row["outcome"] != "not applicable"]
        parts.append(f"\n## {title}\n\n" + markdown_table(("lever", "program", "claim", "outcome", "check", "value", "limit"), table))
    left = sorted({f"{row['lever']} in {row['program']} ({row['why']})" for row in rows if row["outcome"] == "not applicable"})
    return "\n".join([*parts, f"\nNot applicable: {'; '.join(left) or 'nothing'}."])


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(DEFAULT), help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--levers", default="", help="names of the bed's levers; all of them where none is given")
    parser.add_argument("--records", type=Path, help="folder for the records of all runs; a temporary one where none is given")
    parser.add_argument("--out", type=Path, help="write the results to this folder instead of bench/results")
    args = parser.parse_args()
    programs, names = args.programs.split(","), set(filter(None, args.levers.split(",")))
    unknown = [*(p for p in programs if p not in PROGRAMS), *(names - {lever.name for lever in TABLE})]
    if unknown:
        parser.error(f"not in the test bed: {', '.join(unknown)}")
    made, facts = stamp(), look()
    with tempfile.TemporaryDirectory(prefix="flatout-guard-") as temporary:
        folder = args.records or Path(temporary)
        rows = rows_of([Bed(name, folder / name, facts) for name in programs], [lever for lever in TABLE if not names or lever.name in names])
    found = counts(rows)
    text, data = write_result("guard", made, page(rows), {"rows": rows, "counts": found, "seeds": SEEDS},
                              **({"folder": args.out} if args.out else {}))
    print(f"broken levers accepted: {found['false_accepts']} of {found['broken']}")
    print(f"sound levers refused: {found['false_rejects']} of {found['sound']}\n{text}\n{data}")
    return 1 if found["false_accepts"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
