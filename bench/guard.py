"""Runs the guard's test bed: how often does it accept a broken lever, or refuse a sound one?

Each program and lever is judged as the tuner does it (flatout.tune.narrow and confirm). The plain program
runs with seeds 0, 1 and 2, and with seed 0 once more. In the running plain program, the step replica checks
every lever that can be switched and claims less than EXACT: once after the warm-up, and once more after a
stretch of training. If a replica rejects a lever, the lever is rejected. If the first replica could not be
made, the lever is left out. The others run in fresh processes with the same three seeds, and `judge` compares
the records, first of two seeds and then of three. If an EXACT claim fails with the first seed, the other
seeds do not run: one differing bit is enough. The programs of bench/programs are for half precision: levers
that claim EXACT do not run on them.

A case is accepted, rejected (the verdict is "failed") or left out ("not checked"). Only an accepted lever
would be in a plan. So a broken lever may be rejected or left out, and a sound one must be accepted.
bench/guard_records.py adds edited records of plain runs: none of them may be judged "bit for bit". The exit
code is 1 if the guard accepts a broken case or refuses a sound one.

    python bench/guard.py                       everything: about 90 minutes on two idle cores
    python bench/guard.py --programs mlp,cnn --levers autocast,label_smoothing --out DIR
                                                a part: its result replaces none in bench/results
    python bench/guard.py --records DIR         keep the records there; judge existing ones again without
                                                running them, if the same source and torch made them
    python bench/guard.py --to-the-end          also train the programs of bench/programs to their end, plain
                                                and in half precision
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import HERE, ROOT, markdown_table, stamp, write_result

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), os.environ["PYTHONPATH"]]
)  # the programs import the bed's levers

# Threads that wait give up their core: on a busy machine a run is then up to five times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from guard_end import end_section, rows_of_the_end
from guard_levers import BAD, TABLE
from guard_records import record_rows, records_section

from flatout.guard.loss_curves import START_STEPS
from flatout.guard.verdict import (
    judge,
    needs_perturbed_runs,
    perturbation_for,
    repeats_itself,
    start_agrees,
)
from flatout.job.folder import TrialFolder, read_json, write_json
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.enums import Effect
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardCheck, GuardRecord
from flatout.trial.parent import ProgramGone, Trial, measure
from flatout.trial.spec import TrialOptions
from flatout.tune.limits import MIN_PAIRS

SEEDS = (0, 1, 2)
TIMEOUT_S = 600.0
# Arguments that keep the program running, the steps measured after its warm-up (about two seconds), and the
# steps before the late replica.
PROGRAMS = {
    "mlp": (("--epochs", "1000"), 200, 800),
    "linear": (("--steps", "100000"), 400, 800),
    "gpt": (("--steps", "5000"), 50, 300),
    "lstm": (("--steps", "5000"), 50, 300),
    "cnn": (("--epochs", "1000"), 40, 300),
    "resnet18": (("--epochs", "1000"), 20, 60),
    "adadelta_cnn": (("--epochs", "1000"), 60, 700),
    "residual": (("--epochs", "1000"), 50, 300),
    "smoothed_task": (("--steps", "100000"), 100, 700),
    "vae": (("--epochs", "1000"), 120, 700),
    "gan": (("--epochs", "1000"), 50, 300),
    "warm_gan": (("--steps", "100000"), 100, 300),
}
OF_EXAMPLES = ("mlp", "linear", "gpt", "lstm", "cnn")
OF_HALF_PRECISION = ("adadelta_cnn", "residual", "smoothed_task", "vae", "gan", "warm_gan")
DEFAULT = (*OF_EXAMPLES, *OF_HALF_PRECISION)
COMPILERS = {"compile"}  # minutes of compiling, and no additional rounding here
MADE_BY = "made_by.json"  # in the folder of the records
# What makes a record. The judge (guard/verdict.py) may change: the records are kept to be judged again.
MAKERS = (
    *(f"src/flatout/{name}" for name in ("agent", "data", "guard", "kernels", "levers", "trial")),
    "bench/programs",
    "examples",
)
BED = ("guard_data", "guard_half", "guard_hidden", "guard_levers", "guard_tools")
P_VALUES = ("distribution", "shift", "draws")
RULE_OF_THREE = 3.0  # no error in n independent cases: at most 3/n with 95 % confidence
OUTCOMES = {"failed": "rejected", "not checked": "left out"}  # of a verdict; any other one is accepted
WRONG = ("false_accepts", "false_refusals")
BROKEN = {lever.name for lever in BAD}


class ProgramDied(SystemExit):
    """The program failed. Under a lever, that rejects the lever; the plain program's failure ends the bench."""


@dataclass
class Bed:
    """A program, with the folder that holds its records."""

    name: str
    folder: Path
    facts: Facts

    def __post_init__(self) -> None:
        arguments, self.ticks, self.late_ticks = PROGRAMS[self.name]
        self.script = (
            HERE / "programs" if self.name in OF_HALF_PRECISION else ROOT / "examples"
        ) / f"{self.name}.py"
        self.command = parse_command(("python", str(self.script), *arguments))

    def tries(self, lever: Lever) -> bool:
        return self.name in OF_EXAMPLES or (lever.effect is not Effect.EXACT and lever.name not in COMPILERS)

    def trial(self, title: str, plan: Plan, seed: int, perturbation: float = 0.0) -> Trial:
        folder = self.folder / title
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "claim").unlink(missing_ok=True)
        return Trial(
            self.command,
            TrialFolder(folder),
            plan,
            self.facts,
            TrialOptions(seed, reseed=True, table="guard_levers:TABLE", perturbation=perturbation),
        )

    def record(
        self, title: str, plan: Plan, seed: int, perturbation: float = 0.0, fetch_samples: bool = False
    ) -> TrialRecord:
        """Returns the record of a run, from the folder if it exists there.

        A perturbed run needs only the first losses. ``fetch_samples``: as for `measure`.
        """
        known = read_json(self.folder / f"{title}.json")
        if known is None:
            with self.trial(title, plan, seed, perturbation) as trial:
                record = measure(
                    trial, START_STEPS if perturbation else self.ticks, seconds() + TIMEOUT_S, fetch_samples
                )
            if record.status != "finished":
                raise (ProgramDied if record.status in ("failed", "hung") else SystemExit)(
                    f"guard: {self.name}, {title}: {record.status}: {record.reason[-400:]}\n{record.log_tail[-800:]}"
                )
            known = record.to_json()
            write_json(self.folder / f"{title}.json", known)
        return TrialRecord.from_json(known)

    @contextlib.contextmanager
    def running(self) -> Iterator[Trial]:
        with self.trial("observed", Plan(), 0) as trial:
            trial.wait_ready(seconds() + TIMEOUT_S)
            yield trial

    def perturbed(self, effect: Effect) -> list[TrialRecord]:
        share = perturbation_for(effect)
        return [self.record(f"shaken-{share.hex()}-{seed}", Plan(), seed, share) for seed in SEEDS[:2]]

    def observe(self, levers: list[Lever]) -> dict[str, Any]:
        """Returns the applicability of each lever to this program, and the verdicts of its replicas."""
        path = self.folder / "observed.json"
        seen: dict[str, Any] = read_json(path) or {"options": {}, "replicas": {}, "late": {}}
        todo = [lever for lever in levers if lever.name not in seen["options"]]
        if not todo:
            return seen
        with self.running() as trial:
            answers = trial.ask({"do": "options"}, seconds() + TIMEOUT_S)["options"]
            seen["options"] |= {lever.name: answers[lever.name] for lever in todo}
            asked = [
                lever
                for lever in todo
                if "skip" not in answers[lever.name]
                and lever.live
                and effect_of(lever, seen) is not Effect.EXACT
            ]
            for lever in asked:
                seen["replicas"][lever.name] = self.replica(trial, lever, answers)
            trial.run_ticks(self.late_ticks, seconds() + TIMEOUT_S)
            for lever in asked:
                if "failure" not in seen["replicas"][lever.name] and not failed(seen["replicas"][lever.name]):
                    seen["late"][lever.name] = self.replica(trial, lever, answers)
            trial.finish()
        write_json(path, seen)
        return seen

    def replica(self, trial: Trial, lever: Lever, answers: dict[str, Any]) -> dict[str, Any]:
        say(f"{self.name}: replica of {lever.name}")
        choice = Choice(lever.name, answers[lever.name]["values"][0])
        try:
            metadata: dict[str, Any] = trial.ask(
                {"do": "replica", "choices": [choice.to_json()]}, seconds() + TIMEOUT_S
            )["replica"]
        except ProgramGone as gone:
            raise SystemExit(
                f"guard: {self.name} failed during the replica of {lever.name}: {gone.record.reason[-400:]}"
            ) from None
        return metadata


def effect_of(lever: Lever, seen: dict[str, Any]) -> Effect:
    return Effect(seen["options"][lever.name].get("effect") or lever.effect)


def failed(replica: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [check for check in (replica or {}).get("checks", ()) if not check["passed"]]


def verdict_of(bed: Bed, lever: Lever, seen: dict[str, Any]) -> GuardRecord | str:
    """Returns the guard's verdict on a lever, or the reason why the lever does not apply."""
    answer = seen["options"][lever.name]
    if "skip" in answer:
        return str(answer["skip"])
    effect = effect_of(lever, seen)
    replica, late = seen["replicas"].get(lever.name), seen["late"].get(lever.name)
    for metadata, prefix in ((replica, ""), (late, "late ")):
        if failed(metadata):
            checks = [{**check, "name": prefix + check["name"]} for check in (metadata or {})["checks"]]
            return GuardRecord.from_json(
                {"verdict": "failed", "why": failed(metadata)[0]["why"], "checks": checks}
            )
    if "failure" in (replica or {}):
        check = GuardCheck("replica", None, replica["failure"])
        return GuardRecord("not checked", f"its gradient could not be checked: {check.why}", [check])
    plan, fetch_samples = Plan((Choice(lever.name, answer["values"][0]),)), effect is Effect.RESAMPLED
    plain, tuned = [], []
    for seed in SEEDS:
        plain.append(bed.record(f"plain-{seed}", Plan(), seed, fetch_samples=True))
        try:
            tuned.append(bed.record(f"{lever.name}-{seed}", plan, seed, fetch_samples=fetch_samples))
        except ProgramDied as died:
            why = str(died).strip().splitlines()[-1]
            return GuardRecord.from_json(
                {"verdict": "failed", "why": f"the program fails: {why}", "checks": []}
            )
        if tuned[-1].skipped:
            return f"not applied: {tuned[-1].skipped[0]['reason']}"
        if len(plain) >= MIN_PAIRS or effect is Effect.EXACT:
            found = judged(bed, effect, plain, tuned, replica, late if len(plain) == len(SEEDS) else None)
            if found.verdict == "failed":
                return found
    return found


def judged(
    bed: Bed,
    effect: Effect,
    plain: list[TrialRecord],
    tuned: list[TrialRecord],
    replica: dict[str, Any] | None,
    late: dict[str, Any] | None,
) -> GuardRecord:
    """Returns the verdict on these pairs, as `flatout.tune.confirm.judge_pairs` does."""
    again = [bed.record("plain-again", Plan(), SEEDS[0])]
    found = judge(effect, plain, tuned, replica, again, late_replica=late)
    if effect is Effect.EXACT and found.verdict == "failed":
        unlike = next((p for p, t in zip(plain, tuned, strict=True) if not repeats_itself(p, t)), plain[0])
        if unlike.seed != SEEDS[0]:
            again.append(bed.record(f"plain-again-{unlike.seed}", Plan(), unlike.seed or 0))
            found = judge(effect, plain, tuned, replica, again, late_replica=late)
    if needs_perturbed_runs(found):
        found = judge(effect, plain, tuned, replica, again, bed.perturbed(effect), late)
    return found


def alone(bed: Bed, lever: Lever, effect: Effect) -> bool | None:
    """Returns whether `start_agrees` accepts the lever, from the run with the first seed; None if unknown."""
    known = read_json(bed.folder / f"{lever.name}-{SEEDS[0]}.json")
    if known is None or effect in (Effect.EXACT, Effect.RESAMPLED):
        return None
    agrees = start_agrees(
        effect,
        bed.record(f"plain-{SEEDS[0]}", Plan(), SEEDS[0], fetch_samples=True),
        TrialRecord.from_json(known),
        bed.perturbed(effect),
    )
    return None if agrees is None else agrees.passed


def rows_of(beds: list[Bed], levers: list[Lever]) -> list[dict[str, Any]]:
    rows = []
    for bed in beds:
        tried = [lever for lever in levers if bed.tries(lever)]
        seen = bed.observe(tried)
        for lever in tried:
            start = seconds()
            found = verdict_of(bed, lever, seen)
            effect = effect_of(lever, seen)
            row = {
                "program": bed.name,
                "lever": lever.name,
                "broken": lever.name in BROKEN,
                "claim": effect.value,
            }
            if isinstance(found, str):
                row |= {"outcome": "not applicable", "why": found}
            else:
                row |= {
                    "outcome": outcome_of(found),
                    "verdict": found.verdict,
                    "why": found.why,
                    "checks": [c.to_json() for c in found.checks],
                    "alone": alone(bed, lever, effect),
                    **nearest(found),
                }
            say(f"{bed.name}: {lever.name} {row['outcome']}{mark(row)} ({seconds() - start:.0f} s)")
            rows.append(row)
    return rows


def outcome_of(found: GuardRecord) -> str:
    return OUTCOMES.get(found.verdict, "accepted")


def nearest(found: GuardRecord) -> dict[str, Any]:
    """Returns the deciding check: one that failed, else one not made, else the one closest to its limit."""
    failed = [c for c in found.checks if c.passed is False] or [c for c in found.checks if c.passed is None]
    measured = [c for c in found.checks if c.value is not None and c.limit]
    one = failed[0] if failed else max(measured, key=share, default=None)
    name = one.name if one else "bitwise" if outcome_of(found) == "accepted" else "program"
    return {"check": name, "value": one.value if one else None, "limit": one.limit if one else None}


def share(check: Any) -> float:
    """Returns the used share of a check's limit; a p-value must stay above its limit."""
    return float(
        check.limit / max(check.value, 1e-300) if check.name in P_VALUES else check.value / check.limit
    )


def mark(row: dict[str, Any]) -> str:
    if row["outcome"] == "not applicable" or row["broken"] != (row["outcome"] == "accepted"):
        return ""
    return " (FALSE ACCEPT)" if row["broken"] else " (FALSE REFUSAL)"


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    judged = [row for row in rows if row["outcome"] != "not applicable"]
    found = {}
    for kind, wrong in (("broken", "accepts"), ("sound", "refusals")):
        of_kind = [row for row in judged if row["broken"] is (kind == "broken")]
        compared = [row for row in of_kind if row.get("alone") is not None]
        found |= {
            kind: len(of_kind),
            f"false_{wrong}": sum(bool(mark(row)) for row in of_kind),
            f"{kind}_alone": len(compared),
            f"{kind}_blamed": sum(not row["alone"] for row in compared),
        }
    return found


def bound(wrong: int, cases: int, name: str) -> str:
    """Returns the count, and without errors a bound: ``0 of 300 false accepts: at most 3/300 = 1.0% ...``."""
    share = f"3/{cases} = {RULE_OF_THREE / cases:.1%}" if cases else ""
    limit = f": at most {share} with 95 % confidence" if share and not wrong else ""
    return f"**{wrong} of {cases} {name}**{limit}"


def page(
    rows: list[dict[str, Any]], records: list[dict[str, Any]], end: list[dict[str, Any]], notes: list[str]
) -> str:
    found = counts(rows)
    parts = [
        "# The guard's test bed\n",
        f"Broken levers: {bound(found['false_accepts'], found['broken'], 'false accepts')}.  ",
        f"Sound levers: {bound(found['false_refusals'], found['sound'], 'false refusals')}.\n",
        *(f"{note}\n" for note in notes),
        f"One case is a lever in a program; {len(SEEDS)} seeds each. A case is accepted, rejected, or left out because a check could",
        "not be made; only an accepted lever would be in a plan. The bounds are those of the rule of three, 3/n. They hold for",
        "levers and programs like these: the cases are chosen, and several share a program or a fault.\n",
        f"The first losses of one seed (`start_agrees`) reject {found['broken_blamed']} of the {found['broken_alone']} broken levers that the",
        f"replica accepts, and {found['sound_blamed']} of {found['sound_alone']} sound ones.\n",
        "*late* is the replica after a stretch of training; *later* is the step that a replica repeats after its updates. A replica does not",
        "repeat the script's work outside its root modules: only the losses show a late error in a loss computed there.\n",
        "*check* is the deciding comparison: the first that failed or could not be made, otherwise the one closest to its limit. A p-value (distribution,",
        "shift, draws) must stay above its limit, every other value at or below it; a bitwise comparison has neither. No such test",
        "finds a deviation that is rarer than the number of steps.\n",
    ]
    for title, broken in (
        ("Broken levers (to be rejected or left out)", True),
        ("Sound levers (to be accepted)", False),
    ):
        table = [
            (
                row["lever"],
                row["program"],
                row["claim"],
                f"{row['outcome']}{mark(row)}",
                row["check"],
                number(row["value"]),
                number(row["limit"]),
            )
            for row in sorted(rows, key=lambda r: r["lever"])
            if row["broken"] is broken and row["outcome"] != "not applicable"
        ]
        parts.append(
            f"\n## {title}\n\n"
            + markdown_table(("lever", "program", "claim", "outcome", "check", "value", "limit"), table)
        )
    left = sorted(
        {
            f"{row['lever']} in {row['program']} ({row['why']})"
            for row in rows
            if row["outcome"] == "not applicable"
        }
    )
    return "\n".join(
        [
            *parts,
            *records_section(records),
            *end_section(end),
            f"\nNot applicable: {'; '.join(left) or 'nothing'}.",
        ]
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def made_by(facts: Facts) -> dict[str, str]:
    """Returns the digest of the source that makes the records, and the version of torch."""
    files = [path for folder in MAKERS for path in (ROOT / folder).rglob("*.py") if path.name != "guard.py"]
    digest = hashlib.sha256()
    bed = [*(HERE / f"{name}.py" for name in BED), ROOT / "tests" / "known_bad_levers.py"]
    for path in sorted([*files, *bed]):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return {"source": digest.hexdigest()[:16], "torch": facts.versions.get("torch", "")}


def why_not_reused(folder: Path, now: dict[str, str]) -> str:
    """Returns why the records of a folder may not be judged with new ones. Marks an empty folder as ours."""
    if not folder.is_dir() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MADE_BY, now)
    before = read_json(folder / MADE_BY)
    if before is None:
        return f"{folder} has no {MADE_BY}, so nothing says which source and torch made its records"
    apart = [
        f"{name} {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value
    ]
    return f"the records in {folder} were made by {' and '.join(apart)}" if apart else ""


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", default=",".join(DEFAULT), help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--levers", default="", help="only these levers of the test bed (default: all)")
    parser.add_argument(
        "--records", type=Path, help="folder for the records of all runs (default: a temporary folder)"
    )
    parser.add_argument(
        "--trust-records", action="store_true", help="reuse records of another source or torch"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write the results to this folder instead of bench/results; a part of the test bed needs it",
    )
    parser.add_argument(
        "--to-the-end", action="store_true", help="also train the programs of bench/programs to their end"
    )
    args = parser.parse_args()
    programs, names = args.programs.split(","), set(filter(None, args.levers.split(",")))
    unknown = [*(p for p in programs if p not in PROGRAMS), *(names - {lever.name for lever in TABLE})]
    if unknown:
        parser.error(f"not in the test bed: {', '.join(unknown)}")
    if args.out is None and (names or not set(DEFAULT) <= set(programs)):
        parser.error(
            "a part of the test bed would replace the result of all of it in bench/results; give a folder with --out"
        )
    made, facts = stamp(), look()
    why = why_not_reused(args.records, made_by(facts)) if args.records else ""
    if why and not args.trust_records:
        parser.error(f"{why}; give an empty folder, or --trust-records")
    with tempfile.TemporaryDirectory(prefix="flatout-guard-") as temporary:
        folder = args.records or Path(temporary)
        beds = [Bed(name, folder / name, facts) for name in programs]
        rows = rows_of(beds, [lever for lever in TABLE if not names or lever.name in names])
        records = record_rows(beds)
        end = (
            rows_of_the_end([bed for bed in beds if bed.name in OF_HALF_PRECISION], SEEDS)
            if args.to_the_end
            else []
        )
    found, edited = counts(rows), counts(records)
    missing = [name for name in DEFAULT if name not in programs]
    notes = [f"Programs that did not run: {', '.join(missing)}."] if missing else []
    notes += [
        "Another source or torch made some of the records, which were judged again (`--trust-records`)."
    ] * bool(why)
    text, data = write_result(
        "guard",
        made,
        page(rows, records, end, notes),
        {
            "rows": rows,
            "counts": found,
            "records": records,
            "records_counts": edited,
            "end": end,
            "seeds": SEEDS,
        },
        **({"folder": args.out} if args.out else {}),
    )
    print(f"broken levers accepted: {found['false_accepts']} of {found['broken']}")
    print(f"sound levers refused: {found['false_refusals']} of {found['sound']}")
    print(
        f"edited records accepted: {edited['false_accepts']} of {edited['broken']}; "
        f"plain ones refused: {edited['false_refusals']} of {edited['sound']}\n{text}\n{data}"
    )
    return 1 if any(each[wrong] for each in (found, edited) for wrong in WRONG) else 0


if __name__ == "__main__":
    raise SystemExit(main())
