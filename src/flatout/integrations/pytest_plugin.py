"""pytest plugin: a test fails if a training program became slower, or needs more memory, than its baseline.

    @pytest.mark.flatout(max_slowdown="3%", max_memory="2GB", baseline="main")
    def test_training_speed(flatout_compare):
        flatout_compare("python train.py --steps 500")

`pytest --flatout-save` stores the baselines. Every start of pytest loads this file: it imports only pytest and
the standard library.
"""

import hashlib
import json
import re
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SAVE = "--flatout-save"
OPTIONS = {  # of the marker, and of `flatout compare`
    "max_slowdown": "--gate",
    "max_memory": "--gate-memory",
    "losses": "--gate-loss",
    "budget": "--budget",
    "pairs": "--pairs",
}
GATES = ("max_slowdown", "max_memory", "losses")
FOLDER = Path(".flatout") / "tests"
STORED_LINES = pytest.StashKey[list[str]]()


class CannotTell(pytest.PytestWarning):
    """A gate could not be decided within the budget."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("flatout").addoption(
        SAVE, action="store_true", help="Store the baselines of tests marked `flatout`, and compare nothing."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STORED_LINES] = []
    config.addinivalue_line(
        "markers",
        "flatout(max_slowdown='3%', max_memory='2GB', losses='bits', baseline='main', budget='5m', pairs=6, "
        "any_machine=False): limits for the program that the fixture flatout_compare compares with its baseline",
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash[STORED_LINES]:
        terminalreporter.write_line(line)


@pytest.fixture
def flatout_compare(request: pytest.FixtureRequest) -> Callable[[str | Sequence[str]], dict[str, Any]]:
    """``flatout_compare(command)`` compares a command with the baseline of this test, within the marker's limits.

    It returns the record of the comparison (compare.json) as a dictionary. The command runs in pytest's root
    folder."""
    return _Comparison(request).run


class _Comparison:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.config, self.nodeid = request.config, request.node.nodeid
        marker = request.node.get_closest_marker("flatout")
        self.limits: Mapping[str, Any] = marker.kwargs if marker is not None else {}
        accepted = {*OPTIONS, "baseline", "any_machine"}
        if marker is not None and (marker.args or not accepted.issuperset(self.limits)):
            pytest.fail(f"the marker flatout takes only the keywords {', '.join(sorted(accepted))}.", False)
        if not set(GATES) & set(self.limits):
            pytest.fail(
                f"{self.nodeid} has no limit, so it cannot fail. Add @pytest.mark.flatout(max_slowdown='3%').",
                False,
            )
        name = re.sub(r"\W+", "-", self.nodeid.rpartition("::")[2])[:40].strip("-")
        digest = hashlib.sha256(self.nodeid.encode()).hexdigest()[:8]
        self.name = f"{name}-{digest}"
        self.baseline = f"{self.limits.get('baseline', 'main')}-{self.name}"
        self.done = False

    def run(self, command: str | Sequence[str]) -> dict[str, Any]:
        words = shlex.split(command) if isinstance(command, str) else list(map(str, command))
        if self.done:
            pytest.fail("flatout_compare was called twice in one test. Write a test for each command.", False)
        self.done = True
        options = ["--json", "--job", str(FOLDER / self.name)]
        if self.config.getoption(SAVE):
            record = self._record(
                [*options, *self._options("budget", "pairs"), "--save", self.baseline], words
            )
            self.config.stash[STORED_LINES].append(
                f"flatout: stored baseline {self.baseline} of {self.nodeid}"
            )
            return record
        machine = ["--any-machine"] if self.limits.get("any_machine") else []
        record = self._record(
            [*options, *machine, *self._options(*OPTIONS), "--baseline", self.baseline], words
        )
        self._check_gates(record)
        return record

    def _options(self, *names: str) -> list[str]:
        return [
            word for name in names if name in self.limits for word in (OPTIONS[name], str(self.limits[name]))
        ]

    def _record(self, options: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
        """Run `flatout compare` and return its record.

        The test is skipped without a baseline, and fails if there is no record for another reason."""
        from flatout.integrations.flatout_command import run_flatout
        from flatout.schema.errors import NoBaseline

        result = run_flatout(["compare", *options, *words], self.config.rootpath)
        if result.code == NoBaseline.exit_code:
            why = result.err.strip().removeprefix("flatout: ").partition(". ")[0]
            pytest.skip(f"{why}. `pytest {SAVE} {shlex.quote(self.nodeid)}` stores one.")
        if not result.out.startswith("{"):
            pytest.fail(f"`flatout compare` failed (exit code {result.code}).\n{result.err.strip()}", False)
        record: dict[str, Any] = json.loads(result.out)
        return record

    def _check_gates(self, record: Mapping[str, Any]) -> None:
        gates = [
            (gate["verdict"], f"gate on {gate['name']}: {gate['verdict']}: {gate['why']}.")
            for gate in record["gates"]
        ]
        if any(verdict == "failed" for verdict, _ in gates):
            page = self.config.rootpath / FOLDER / self.name / "compare.html"
            notes = [f"note: {note}." for note in record["notes"]]
            lines = [*(message for _, message in gates), *notes, f"chart: {page}"]
            pytest.fail("\n".join(lines), False)
        for verdict, message in gates:
            if verdict == "cannot tell":
                warnings.warn(CannotTell(f"{self.nodeid}: {message}"), stacklevel=3)
