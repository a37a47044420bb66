"""Does the test suite notice a mistake? Deliberate breaks of the source, one at a time, each with the tests that must fail.

mutants.toml lists the breaks: a file below src/flatout, the exact text, what it becomes, and test files. A break is applied in a copy of the
repository, its tests run there until the first failure, and the text is put back. A break whose tests stay green has *survived*: either a test
is missing, or the line is not needed. A text that is not in its file, or is there twice, is an error of the list.

    python bench/mutants.py                    all of them: about 15 minutes on two cores
    python bench/mutants.py --only guard,tune  breaks of these packages
    python bench/mutants.py --check            only look whether each text is in its file once

The result counts breaks that turned a test red. It is no measure of speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from provenance import HERE, RESULTS, ROOT, markdown_table, stamp, write_result

from flatout.schema.plan import read_toml

LIST = HERE / "mutants.toml"
LIMIT_S = 600  # of one break's tests; a break that makes them hang counts as noticed


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    def applied(self, source: str) -> str:
        """The broken source. Raises ValueError where the text is not there exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.file}: the text is there {count} times: {self.old!r}")
        return source.replace(self.old, self.new)


def read() -> list[Mutant]:
    return [
        Mutant(**{**row, "tests": tuple(row["tests"])})
        for row in read_toml(LIST.read_text(encoding="utf-8"))["mutant"]
    ]


def errors(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the list itself."""
    found = []
    for mutant in mutants:
        try:
            compile(
                mutant.applied((ROOT / "src" / "flatout" / mutant.file).read_text(encoding="utf-8")),
                mutant.file,
                "exec",
            )
        except (OSError, ValueError, SyntaxError) as error:
            found.append(str(error))
        found += [f"{mutant.file}: there is no {test}" for test in mutant.tests if not _exists(test)]
    return found


def _exists(test: str) -> bool:
    name, _, function = test.partition("::")
    path = ROOT / name
    return path.exists() and (
        not function or f"def {function.partition('[')[0]}(" in path.read_text(encoding="utf-8")
    )


def copy_of_repository(place: Path) -> Path:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in tracked:
        if (ROOT / name).is_file() and not name.startswith("bench/results/"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def outcome(mutant: Mutant | None, tests: tuple[str, ...], place: Path) -> tuple[str, str]:
    """How the tests end in a copy: red, green, hung or broken; and the last line of what pytest said."""
    path = place / "src" / "flatout" / mutant.file if mutant is not None else None
    before = path.read_text(encoding="utf-8") if path is not None else ""
    environment = {
        **os.environ,
        "PYTHONPATH": str(place / "src"),
        "FLATOUT_SOURCE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        if path is not None and mutant is not None:
            path.write_text(mutant.applied(before), encoding="utf-8")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider"),
                *("-m", "not full", *tests),  # as `make test` does
            ],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hung", f"not done after {LIMIT_S} s"
    finally:
        if path is not None:
            path.write_text(before, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    said = (failed or done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1][:160]
    return {0: "green", 1: "red"}.get(done.returncode, "broken"), said  # 2: the tests could not be collected


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="only breaks of these packages or files, separated by commas"
    )
    parser.add_argument(
        "--check", action="store_true", help="only look whether each text is in its file once"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="breaks at once (default: one a core)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    only = [word for word in args.only.split(",") if word]
    mutants = [mutant for mutant in read() if not only or mutant.package in only or mutant.file in only]
    if wrong := errors(mutants):
        sys.exit("\n".join(wrong))
    if args.check:
        print(
            f"{len(mutants)} breaks of {len({mutant.package for mutant in mutants})} packages; each text is in its file once"
        )
        return
    made, found = stamp(), {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        places: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            places.put(copy_of_repository(Path(folder) / str(number)))

        def tried(mutant: Mutant | None, tests: tuple[str, ...]) -> tuple[str, str]:
            place = places.get()
            try:
                return outcome(mutant, tests, place)
            finally:
                places.put(place)

        with ThreadPoolExecutor(args.jobs) as pool:
            plain = {
                tests: pool.submit(tried, None, tests)
                for tests in sorted({mutant.tests for mutant in mutants})
            }
            broken = {mutant: pool.submit(tried, mutant, mutant.tests) for mutant in mutants}
            for tests, future in plain.items():
                if future.result()[0] != "green":
                    sys.exit(f"without a break, {' '.join(tests)} fails: {future.result()[1]}")
            for mutant, future in broken.items():
                found[mutant] = future.result()
                print(f"{found[mutant][0]:6} {mutant.file}: {mutant.why}", flush=True)
    noticed = sum(how in ("red", "hung") for how, _ in found.values())
    rows = [(mutant.file, mutant.why, how, said) for mutant, (how, said) in found.items()]
    text = "\n".join(
        [
            "# Deliberate breaks of the source\n",
            f"Noticed by a test: **{noticed} of {len(found)}**.\n",
            markdown_table(("file", "the break", "tests", "first failure"), rows),
        ]
    )
    write_result(
        "mutants",
        made,
        text,
        {"mutants": [dict(zip(("file", "why", "outcome", "said"), row, strict=True)) for row in rows]},
        {},
        args.out,
    )
    print(f"noticed by a test: {noticed} of {len(found)}")
    sys.exit(noticed != len(found))


if __name__ == "__main__":
    main()
