"""Tests whether `flatout check` and `flatout profile` name what maintainers of public trainers found and fixed.

    python bench/pull_requests.py --mirrors DIR            every case
    python bench/pull_requests.py --only ncsn-2,ssd-98     only these; the rows of the others are kept
    python bench/pull_requests.py --half A --no-profile    only half A, and without the small programs

pull_requests.toml lists the cases: pull requests and fixed issues, chosen before any rule was run on them. For
each one, `flatout check FILE` runs in a checkout of the commit before the fix, and again after the fix. A case
is named first if the first finding is one that counts and lies within 3 lines of a changed line. It is named if
any finding does. Halves A and B were read when rules were written. Sets C and D were chosen
later, without a look at the rules; pull_requests_verdicts.json keeps the first figures of each, before a rule was
changed for it. After the fix, the finding must be gone. All other findings are alarms. pull_requests_verdicts.json
rates each of them: *true* (a maintainer would fix it), *opinion* (right, but they may leave it) or *false*.

Where a CPU can show the fault, pull_requests/ has a small program of ours with the same fault, which
`flatout profile` measures, and its fixed version. This repository keeps none of the public code. DIR holds a git
directory for each repository, named owner+name; without it, the two commits are fetched from GitHub.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from provenance import HERE, RESULTS, look, read_result, stamp, write_result
from pull_requests_page import HALVES, page
from specimens import read_specimen
from zoo import brief, findings_of, verdict

from flatout.schema.plan import read_toml

CASES, VERDICTS, PROGRAMS = (
    HERE / "pull_requests.toml",
    HERE / "pull_requests_verdicts.json",
    HERE / "pull_requests",
)
NEAR = 3  # lines
RANKS = ("named first", "named", "not named")


def load_cases() -> dict[str, dict[str, Any]]:
    """Returns the cases by id. Ends with an error if halves A and B are not the split with seed 0."""
    cases = {case["id"]: case for case in read_toml(CASES.read_text(encoding="utf-8"))["case"]}
    order = sorted(name for name in cases if cases[name]["half"] in "AB")
    random.Random(0).shuffle(order)
    half = set(order[: (len(order) + 1) // 2])
    if wrong := [name for name in order if (cases[name]["half"] == "A") != (name in half)]:
        raise SystemExit(f"{CASES.name}: {', '.join(wrong)}: not in the half that seed 0 gives")
    return cases


def git_folder(mirrors: Path | None, case: dict[str, Any], fetched: Path) -> Path:
    """Returns a git directory with both commits of a case. Without mirrors, it fetches only these two."""
    if mirrors is not None:
        base = mirrors / case["repository"].replace("/", "+")
        for folder in (base, base / "repo", base / "repo" / ".git", base / ".git"):
            if (folder / "HEAD").is_file():
                return folder
        raise SystemExit(f"{mirrors} has no git directory {base.name}; clone it there, or omit --mirrors")
    folder = fetched / case["repository"].replace("/", "+")
    subprocess.run(["git", "init", "-q", "--bare", str(folder)], check=True)
    address = f"https://github.com/{case['repository']}"
    for commit in (case["parent"], case["fix"]):
        subprocess.run(
            ["git", "--git-dir", str(folder), "fetch", "-q", "--depth", "1", address, commit], check=True
        )
    return folder


def check_out(git: Path, commit: str, folder: Path) -> None:
    """Writes the Python files of a commit to a folder."""
    packed = subprocess.run(
        ["git", "--git-dir", str(git), "archive", commit, "--", "*.py"], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")


def checked(git: Path, commit: str, files: list[str]) -> dict[str, Any]:
    """Returns what `flatout check` says about each file that exists in a checkout of a commit."""
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pull-request-") as home:
        check_out(git, commit, Path(home))
        for file in files:
            if not (Path(home) / file).is_file():
                continue
            findings, why = findings_of(["check", "--json", file], Path(home))
            said[file] = {
                "findings": None if findings is None else [located(f, Path(home)) for f in findings],
                "why": why,
            }
    return said


def located(finding: dict[str, Any], home: Path) -> dict[str, Any]:
    """Returns the parts of a finding that judge() needs, with files relative to the checkout."""
    places = [finding.get("place"), *(finding.get("others") or ())]
    spots = [
        [(home / place["file"]).resolve().relative_to(home.resolve()).as_posix(), place["line"]]
        for place in places
        if place
    ]
    return {
        "rule": finding["rule"],
        "name": finding["name"],
        "severity": finding["severity"],
        "spots": spots,
        "text": (finding.get("place") or {}).get("text", ""),
    }


def counts(case: dict[str, Any], finding: dict[str, Any]) -> bool:
    """Whether a finding names the case: a rule that counts, near a line of the fault."""
    ranges = {case["file"]: [*case["lines"], *case.get("anchors", ())], **case.get("also", {})}
    return finding["rule"] in case["rules"] and any(
        low - NEAR <= line <= high + NEAR
        for file, line in finding["spots"]
        for low, high in ranges.get(file, ())
    )


def judge(case: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the rank of the case, whether the finding is gone after the fix, and the alarms."""
    rank, failed = len(RANKS) - 1, [f"{file}: {said['why']}" for file, said in before.items() if said["why"]]
    right, others = {}, {}
    for said in before.values():
        for at, finding in enumerate(said["findings"] or ()):
            key = (finding["rule"], *finding["spots"][0]) if finding["spots"] else (finding["rule"], "", 0)
            if counts(case, finding):
                rank = min(rank, int(at > 0))
                right[key] = finding
            else:
                others[key] = finding
    left = []
    for rule, file, line in right:
        same = {"rule": rule, "text": right[rule, file, line]["text"]}
        if occurrences(after, file, same) >= occurrences(before, file, same):
            left.append(f"{rule} {file}:{line}")
    return {
        "check": RANKS[rank],
        "by": sorted(f"{rule} {file}:{line}" for rule, file, line in right),
        "after the fix": ("still there: " + ", ".join(left) if left else "gone") if right else "-",
        "alarms": [
            {"rule": rule, "name": others[rule, file, line]["name"], "file": file, "line": line}
            for rule, file, line in sorted(others)
        ],
        "failed": failed,
    }


def occurrences(said: dict[str, Any], file: str, same: dict[str, str]) -> int:
    """Returns how many findings a file has with a rule and a text of the line, in the command that has most."""
    return max(
        (
            sum(
                all(finding[key] == value for key, value in same.items())
                and any(spot[0] == file for spot in finding["spots"])
                for finding in answer["findings"] or ()
            )
            for answer in said.values()
        ),
        default=0,
    )


def rate(entry: dict[str, Any], name: str, verdicts: list[dict[str, Any]]) -> None:
    """Adds the verdict and its reason to each alarm. A verdict without lines applies to the whole file."""
    table = {
        (each["case"], each["file"], each["rule"], line): each
        for each in verdicts
        for line in each.get("lines", [0])
    }
    for alarm in entry["alarms"]:
        key = (name, alarm["file"], alarm["rule"])
        found = table.get((*key, alarm["line"])) or table.get((*key, 0)) or {}
        alarm["verdict"], alarm["why"] = found.get("verdict", "not judged"), found.get("why", "")


def profiled(name: str, steps: int, budget: str) -> dict[str, Any]:
    """Returns what `flatout profile` says about both versions of the small program of a case."""
    specimen, said = read_specimen(PROGRAMS / f"{name}.py"), {}
    for kind, text in (("ill", specimen.ill), ("well", specimen.well)):
        with tempfile.TemporaryDirectory(prefix="pull-request-") as home:
            (Path(home) / "train.py").write_text(text, encoding="utf-8")
            command = ["profile", "--json", "--steps", str(steps), "--budget", budget, "python", "train.py"]
            findings, why = findings_of(command, Path(home))
        said[kind] = {"findings": None if findings is None else [brief(f) for f in findings], "why": why}
    return {**said, "verdict": verdict(specimen, {"profile": said["ill"]})["profile"]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mirrors", type=Path, metavar="DIR", help="git directories, named owner+name")
    parser.add_argument("--half", choices=HALVES, help="only these cases")
    parser.add_argument("--only", default="", help="only these cases, separated by commas")
    parser.add_argument("--no-profile", action="store_true", help="keep the earlier results of `profile`")
    parser.add_argument("--steps", type=int, default=40, help="undisturbed steps of a profile (default 40)")
    parser.add_argument("--budget", default="40s", help="time budget of a profile (default 40s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the results to this folder instead")
    return parser.parse_args()


def main() -> int:
    args, cases = arguments(), load_cases()
    asked = set(filter(None, args.only.split(",")))
    if unknown := asked - set(cases):
        raise SystemExit(f"there is no case {', '.join(sorted(unknown))} in {CASES.name}")
    made, known = stamp(look()), json.loads(VERDICTS.read_text(encoding="utf-8"))
    done: dict[str, dict[str, Any]] = read_result("pull_requests", made, args.out).get("cases", {})
    with tempfile.TemporaryDirectory(prefix="pull-requests-") as fetched:
        for name, case in cases.items():
            if (asked and name not in asked) or args.half not in (None, case["half"]):
                continue
            git = git_folder(args.mirrors, case, Path(fetched))
            before, after = (checked(git, case[commit], case["check"]) for commit in ("parent", "fix"))
            entry = {**judge(case, before, after), "flatout": made["versions"]["flatout"]}
            if "profile" in case["judged"]:
                entry["profile"] = (
                    done.get(name, {}).get("profile")
                    if args.no_profile
                    else {**profiled(name, args.steps, args.budget), "flatout": made["versions"]["flatout"]}
                )
            done[name] = entry
            said = (entry.get("profile") or {}).get("verdict", "-")
            print(
                f"{case['half']} {name}: check {entry['check']} {', '.join(entry['by'])}; after the fix "
                f"{entry['after the fix']}; {len(entry['alarms'])} other findings; profile {said}",
                *entry["failed"],
                flush=True,
            )
    done = {name: done[name] for name in cases if name in done}
    for name, entry in done.items():
        rate(entry, name, known["verdicts"])
    unjudged = Counter(alarm["verdict"] for entry in done.values() for alarm in entry["alarms"])["not judged"]
    text = page(cases, done, known["first_looks"])
    write_result("pull_requests", made, text, {"cases": done}, folder=args.out)
    print(f"\n{text}\n\n{unjudged} alarms without a verdict")
    return bool(unjudged)


if __name__ == "__main__":
    sys.exit(main())
