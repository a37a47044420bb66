"""Applies `flatout fix` to public code, and runs the scripts that can run here before and after.

    python bench/fix.py --mirrors DIR [--scripts DIR]      everything
    python bench/fix.py --scripts DIR                      the runs only; the rows of the files are kept

--mirrors: a folder of git directories named owner+name. Each Python file and notebook of the newest commit that
trains or loads something is read as a program of its own. Where it has findings with edits, `flatout fix
--apply` edits it, without and with `--all`, and is then checked: the files still compile, no byte outside the
edits changed, the findings are gone, and no new one appeared. No public code is kept.

The runs are the small programs of zoo/, of pull_requests/ (half A), trainers/ and ../examples/, and with
--scripts the public scripts of DIR/set.json. Those with findings that carry edits run before and after, with
the recorder of losses that transparency.py uses. Losses must be equal bit for bit without `--all`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from fix_checks import CHANGES, repository
from provenance import HERE, RESULTS, ROOT, markdown_table, read_result, stamp, write_result
from pull_requests import load_cases
from specimens import ZOO, read_specimen
from transparency import Run, fresh_copy, losses_difference, plainly

from flatout.cli.main import flatout
from flatout.diagnose.rules import TABLE

PULLS = HERE / "pull_requests"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
NAMES = {rule.code: rule.name for rule in TABLE}


# -- runs ----------------------------------------------------------------------------------------------------


def programs(place: Path, scripts: Path | None) -> list[dict[str, Any]]:
    """Returns the programs to run: name, folder, command and environment. Small ones are written to ``place``."""
    found = []
    half = {name for name, case in load_cases().items() if case["half"] == "A"}
    small = [*sorted(ZOO.glob("*.py")), *(path for path in sorted(PULLS.glob("*.py")) if path.stem in half)]
    for path in small:
        folder = place / f"{path.parent.name}-{path.stem}"
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(read_specimen(path).ill, encoding="utf-8")
        found.append({"name": folder.name, "cwd": folder, "argv": ["python", "train.py"]})
    for source in (HERE / "trainers", ROOT / "examples"):
        folder = place / source.name
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for path in sorted(folder.glob("*.py")):
            found.append({"name": f"{folder.name}-{path.stem}", "cwd": folder, "argv": ["python", path.name]})
    for script in json.loads((scripts / "set.json").read_text()) if scripts is not None else ():
        found.append({**script, "name": f"open-{script['name']}", "cwd": scripts / script["cwd"]})
    return found


def fix(folder: Path, argv: list[str], every: bool, apply: bool) -> dict[str, Any]:
    """Returns the record of `flatout fix`, run in a folder."""
    words = ["fix", "--json", "--apply" if apply else "--diff", *(["--all"] if every else []), *argv]
    here = os.getcwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(flatout, words, standalone_mode=False)
    finally:
        os.chdir(here)
    if done.exception is not None:
        raise RuntimeError(f"flatout {shlex.join(words)}: {done.exception}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def rules_of(record: dict[str, Any]) -> list[str]:
    return sorted(finding["rule"] for file in record["files"] for finding in file["fixed"])


def measure(program: dict[str, Any], steps: int, limit: float) -> dict[str, Any]:
    """Runs one program before and after its edits. ``same``: losses bit for bit; ``differs``: not so."""
    found: dict[str, Any] = {"name": program["name"]}
    folder, argv = program["cwd"], program["argv"]
    environment = {**os.environ, **ENVIRONMENT, **program.get("env", {})}
    kept, whole = (rules_of(fix(folder, argv, every, False)) for every in (False, True))
    if not whole:
        return {**found, "verdict": "no edits"}
    with fresh_copy(folder) as copy:
        before = plainly(argv, copy, environment, steps, limit)
    if not before.losses:
        return {**found, "rules": whole, "verdict": "does not run", "why": before.stderr_tail.strip()[-200:]}
    for name, every, rules in (("kept", False, kept), ("all", True, whole if whole != kept else [])):
        if not rules:
            continue
        with fresh_copy(folder) as copy:
            fix(copy, argv, every, True)
            after = plainly(argv, copy, environment, steps, limit)
        different = difference(before, after)
        found[name] = {
            "rules": rules,
            "losses": min(len(before.losses), len(after.losses)),
            "verdict": "failed" if not after.losses else "differs" if different else "same",
            "why": different or (after.stderr_tail.strip()[-200:] if not after.losses else ""),
        }
        if different and not every:
            with fresh_copy(folder) as copy:
                again = plainly(argv, copy, environment, len(before.losses), limit)
            if difference(before, again):
                found[name]["verdict"] = "not repeatable"
    return {**found, "verdict": "ran"}


def difference(before: Run, after: Run) -> str:
    """Returns where the losses of two runs first differ. A run that met the time limit has fewer of them."""
    most = max(len(before.losses), len(after.losses))
    stopped = [len(run.losses) for run in (before, after) if run.exit_code is None and run.losses]
    count = min(stopped, default=most)
    return losses_difference(before.losses[:count], after.losses[:count])


def run_all(place: Path, scripts: Path | None, steps: int, limit: float) -> list[dict[str, Any]]:
    rows = []
    for program in programs(place, scripts):
        try:
            row = measure(program, steps, limit)
        except (RuntimeError, OSError) as error:
            row = {"name": program["name"], "verdict": "failed", "why": str(error)[:300]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


# -- the page ------------------------------------------------------------------------------------------------


def bad(row: dict[str, Any]) -> bool:
    return any(row.get(name) for name in ("failed", "broken", "other bytes", "not gone", "new"))


def files_table(read: list[dict[str, Any]]) -> str:
    rows = []
    for every in (False, True):
        edited = [(each, row) for each in read for row in each["edited"] if row["all"] is every]
        done = [row for _, row in edited if "failed" not in row]
        named = "`--apply --all`" if every else "`--apply`"
        counts = [
            sum(bool(row.get(name)) for row in done) for name in ("broken", "other bytes", "not gone", "new")
        ]
        fixed = len({(each["repository"], text) for each, row in edited for text in row.get("fixed", ())})
        rows.append(
            (named, len(edited), fixed, len(edited) - len(done), *counts, sum(row["overlap"] for row in done))
        )
    header = (
        "command",
        "programs edited",
        "findings fixed",
        "failed",
        "no longer compile",
        "other bytes changed",
        "finding not gone",
        "new finding",
        "left for the next time",
    )
    return markdown_table(header, rows)


def rules_table(read: list[dict[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    for each in read:
        counts.update(each.get("findings", {}))
    codes = sorted(
        {key.split()[0] for key in counts},
        key=lambda code: -counts[f"{code} advice"] - counts[f"{code} edits"],
    )
    rows = [
        (
            code,
            NAMES[code],
            counts[f"{code} edits"] + counts[f"{code} advice"],
            counts[f"{code} edits"],
            effect(code),
        )
        for code in codes
    ]
    return markdown_table(("rule", "name", "findings", "with edits", "what the edits change"), rows)


def effect(code: str) -> str:
    changes = CHANGES[code]
    return "no edits" if changes is None else changes or "nothing: losses bit for bit"


def runs_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        for name, word in (("kept", "`--apply`"), ("all", "`--apply --all`")):
            if name in row:
                one = row[name]
                codes = ", ".join(f"{code} ({count})" for code, count in Counter(one["rules"]).items())
                lines.append((row["name"], word, codes, one["losses"], one["verdict"], one["why"][:120]))
        if row["verdict"] in ("does not run", "failed"):
            lines.append(
                (row["name"], "", ", ".join(row.get("rules", ())), 0, row["verdict"], row["why"][-120:])
            )
    return markdown_table(
        ("program", "edits", "rules", "losses", "losses compared", "where they differ"), lines
    )


def page(read: list[dict[str, Any]], runs: list[dict[str, Any]], steps: int) -> str:
    late = sum(len(each["late"]) for each in read)
    without = [each["repository"] for each in read if "why" in each]
    wrong = [f"{each['repository']}: {row['file']}" for each in read for row in each["edited"] if bad(row)]
    verdicts = Counter(row["kept"]["verdict"] for row in runs if "kept" in row)
    lines = [
        "# `flatout fix` on public code",
        "",
        f"{sum(each['files'] for each in read)} files of {len(read) - len(without)} public repositories that train or load "
        f"something, each read as a program of its own; {late} took too long. The files are edited and checked, not run.",
        "",
        files_table(read),
        "",
        *([f"Wrong: {', '.join(wrong)}.", ""] if wrong else []),
        *([f"Not checked out: {', '.join(without)}.", ""] if without else []),
        "## Findings",
        "",
        "Of the file itself, in all these files. Some edits are left out where they are not certain: see each rule's page.",
        "",
        rules_table(read),
        "",
        "## Runs before and after",
        "",
        f"{len(runs)} programs, of which {sum(row['verdict'] != 'no edits' for row in runs)} have edits. Up to {steps} backward "
        f"passes on one thread, without a GPU. Without `--all`: {', '.join(f'{n} {word}' for word, n in verdicts.items())}. With "
        "`--all` losses may differ, as the rule says.",
        "",
        runs_table(runs),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mirrors", type=Path, metavar="DIR", help="git directories, named owner+name")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help="the folder that holds set.json")
    parser.add_argument("--only", default="", help="only these repositories, owner+name, separated by commas")
    parser.add_argument("--no-runs", action="store_true", help="keep the earlier rows of the runs")
    parser.add_argument("--steps", type=int, default=30, help="backward passes of a run (default 30)")
    parser.add_argument("--limit", type=float, default=120.0, help="longest run in seconds (default 120)")
    parser.add_argument("--jobs", type=int, default=2, help="repositories checked at a time (default 2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the results to this folder instead")
    args = parser.parse_args()
    made = stamp()
    known = read_result("fix", made, args.out)
    read, runs = known.get("read", []), known.get("runs", [])
    if args.mirrors is not None:
        only = set(filter(None, args.only.split(",")))
        folders = [each for each in sorted(args.mirrors.iterdir()) if each.is_dir() and "+" in each.name]
        folders = [each for each in folders if not only or each.name in only]
        with ProcessPoolExecutor(args.jobs) as pool:
            read = [] if not only else read
            for each in pool.map(repository, folders):
                read = [*(row for row in read if row["repository"] != each["repository"]), each]
                print(each["repository"], each["files"], len(each["edited"]), each.get("why", ""), flush=True)
    if not args.no_runs:
        with tempfile.TemporaryDirectory(prefix="fix-runs-") as place:
            runs = run_all(Path(place), args.scripts, args.steps, args.limit)
    write_result("fix", made, page(read, runs, args.steps), {"read": read, "runs": runs}, folder=args.out)
    failed = [row for row in runs if row.get("kept", {}).get("verdict") in ("differs", "failed")]
    return int(bool(failed) or any(bad(row) for each in read for row in each["edited"]))


if __name__ == "__main__":
    sys.exit(main())
