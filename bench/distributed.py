"""Runs public single-process scripts on several ranks: can they be parallelised, and do they learn the same?

DIR holds ``set.json``: a list of {"name", "cwd", "argv", "env"}; a relative ``cwd`` is relative to DIR. The
scripts are not edited.

For each script, the rehearsal of `flatout run --procs N` reports how it splits the work, or why it cannot. A
script that can be parallelised then runs twice on N ranks for more steps. The first run uses the random
numbers and batch statistics of one process. The second uses each rank's own, as a real job does. The script
also runs as one process with the same seed and with two other seeds. The comparison uses the losses that the
script computes, step by step. A distance is the mean of their differences over the mean loss:

    exact     N ranks with the random numbers and batch statistics of one process, compared with one process
              with the same seed
    own       N ranks as in a real job, compared with one process with the same seed
    spread    between processes with different seeds: the effect of chance alone
    speed     N ranks compared with one process, interleaved block by block in one session (`flatout tune
              --procs N` does the same), with a 95 % interval: one process uses all cores for its threads,
              each rank its share of them
    verdict   *the same* where `own` is rounding, *other random numbers* where it is at most 1.5 times the
              difference between seeds, otherwise **other**. One run each: `exact` is the stricter test; `own`
              shows that the real job loses nothing compared with it
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from pairs import standing_in
from provenance import RESULTS, markdown_table, read_result, stamp, write_result

from flatout.job.folder import JobFolder
from flatout.launch.command import Command, parse_command
from flatout.launch.local_launcher import launcher_of
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.errors import FlatoutError
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.session import RanksRecord, SessionRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.reference_run import ENTRY
from flatout.trial.spec import TrialOptions
from flatout.tune.goal import Goal
from flatout.tune.ranks import BUDGET_SHARE, compare_with_one_process
from flatout.tune.rehearsal import LEVER, Rehearsal, RehearsalResult
from flatout.tune.search import observe
from flatout.tune.tuning import Tuning

ROUNDING, SPREADS = 1e-4, 1.5
HOW = {
    "index": "as a {}, by index",
    "cut": "as a {}, cut after fetching",
    "input": "as a {}, at the model's input",
    "whole": "the model only",
}
STEPS, SECONDS = 30, 60.0
TIMEOUT_S = 900.0
SPEED_S = 40.0  # of interleaved blocks


def course(command: Command, plan: Plan, job: JobFolder, facts: Facts, seed: int) -> list[float]:
    """Returns the losses of the first steps. Raises ProgramGone."""
    with Trial(
        command,
        job.new_trial(),
        plan,
        facts,
        TrialOptions(seed=seed, reseed=True, entry=ENTRY, requested={"steps": STEPS, "seconds": SECONDS}),
    ) as trial:
        return [float.fromhex(loss) for loss in trial.wait_ready(seconds() + TIMEOUT_S)["losses"]]


def speed(
    command: Command, division: dict[str, Any], procs: int, job: JobFolder, facts: Facts
) -> dict[str, Any]:
    """Returns the speed-up of the ranks and the pace of each. Raises ProgramGone, FlatoutError."""
    session = SessionRecord(list(command.typed), str(Path.cwd()), {}, ranks=RanksRecord(procs, division))
    base = Plan((Choice(LEVER, division),))
    tuning = Tuning(
        launcher_of(command, procs, cores=facts.cores),
        job,
        facts,
        session,
        Goal(SPEED_S / BUDGET_SHARE),
        base=base,
        single_command=command,
    )
    try:
        observe(tuning)
        compare_with_one_process(tuning)
    finally:
        tuning.interleaver.close()
    assert session.ranks is not None
    return session.ranks.to_json()


def apart(a: list[float], b: list[float]) -> float:
    """Returns the mean difference over the mean loss, for the steps that both have."""
    pairs = list(zip(a, b, strict=False))
    return sum(abs(x - y) for x, y in pairs) / max(sum(abs(y) for _, y in pairs), 1e-300)


def run(script: dict[str, Any], folder: Path, procs: int, facts: Facts) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(prefix="distributed-"))
    try:
        with standing_in(folder / script["cwd"], script.get("env")):
            job, command = JobFolder(place / "job").make(), parse_command(script["argv"])
            found = Rehearsal(
                command,
                lambda one: launcher_of(one, procs),
                procs,
                job,
                facts,
                stage=lambda name, what: print(f"    {what}", flush=True),
            ).run()
            entry: dict[str, Any] = {"rehearsed": found.to_json()}
            if found.division is not None:
                at = "cut" if found.division["batches"] == "index" else found.division["batches"]
                alike = {**found.division, "batchnorm": "all", "draws": "all", "batches": at}
                for name, division in (("exact", alike), ("ranks", found.division)):
                    entry[name] = course(
                        launcher_of(command, procs), Plan((Choice(LEVER, division),)), job, facts, 0
                    )
                entry["speed"] = speed(command, found.division, procs, job, facts)
                entry["one"] = [course(command, Plan(), job, facts, seed) for seed in (0, 1, 2)]
            return entry
    except ProgramGone as gone:
        return {**entry, "failed": gone.record.error_line}
    except FlatoutError as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in entry:
        return (name, "**failed**", "", "", "", "", "", "", "", entry["failed"])
    found = RehearsalResult.from_json(entry["rehearsed"])
    error = "-" if found.gradient_error is None else f"{found.gradient_error:.1e}"
    if found.division is None:
        return (name, "refused", error, "", "", "", "", "", "", found.why_not)
    one = entry["one"]
    exact, own = apart(entry["exact"], one[0]), apart(entry["ranks"], one[0])
    spread = max(apart(one[a], one[b]) for a, b in ((1, 0), (2, 0), (2, 1)))
    verdict = (
        "the same" if own <= ROUNDING else "other random numbers" if own <= SPREADS * spread else "**other**"
    )
    how = HOW[found.division["batches"]].format(found.division["reduction"])
    fast = speed_column(entry.get("speed"))
    return (
        name,
        how,
        error,
        f"{exact:.1e}",
        f"{own:.1e}",
        f"{spread:.1e}",
        verdict,
        fast,
        "; ".join(found.notes),
    )


def speed_column(metadata: dict[str, Any] | None) -> str:
    """Returns the column *speed*."""
    found = RanksRecord.from_json(metadata) if metadata else None
    if found is None or found.ratio is None:
        return "*not run*" if found is None else found.why_not
    ratio = found.ratio
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def page(entries: dict[str, dict[str, Any]], procs: int) -> str:
    header = (
        "script",
        "split",
        "error of the first gradient",
        "exact",
        "own",
        "spread",
        "verdict",
        "speed",
        "why, notes",
    )
    steps = [len(entry["ranks"]) for entry in entries.values() if "ranks" in entry]
    return "\n".join(
        [
            f"# Single-process scripts on {procs} ranks\n\n{(__doc__ or '').split(chr(10), 2)[2].strip()}\n",
            f"Losses of {min(steps, default=0)} to {max(steps, default=0)} backward passes; gloo, {procs} processes with one thread each.\n",
            markdown_table(header, [row(name, entry) for name, entry in entries.items()]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--only", default="", help="run only these scripts, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    scripts, made, facts = json.loads((args.folder / "set.json").read_text()), stamp(), look()
    known = read_result("distributed", made, args.out)
    entries = dict(known.get("scripts", {})) if known.get("procs") == args.procs else {}
    for script in scripts:
        if args.only and script["name"] not in args.only.split(","):
            continue
        print(script["name"], file=sys.stderr, flush=True)
        entries[script["name"]] = run(script, args.folder.resolve(), args.procs, facts)
        print(row(script["name"], entries[script["name"]]), flush=True)
        ordered = {each["name"]: entries[each["name"]] for each in scripts if each["name"] in entries}
        text = page(ordered, args.procs)
        write_result("distributed", made, text, {"procs": args.procs, "scripts": ordered}, folder=args.out)
    print(text)


if __name__ == "__main__":
    main()
