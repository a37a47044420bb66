"""A check of a machine: a function of a machine snapshot, with a documentation page and its inputs.

The docstring's first line says what must hold, the others why it matters. docs/doctor_page.py says how to fix it.
If the snapshot lacks an input of the check, the result is *not checked* and the check does not
run: missing data never counts as fine.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding
from flatout.schema.machine_snapshot import CheckResult, MachineSnapshot, Verdict


@dataclass(frozen=True)
class CheckOutcome:
    verdict: Verdict
    observed: str
    fix: str = ""
    evidence: Sequence[str] = ()


ok = partial(CheckOutcome, Verdict.OK)
not_checked = partial(CheckOutcome, Verdict.NOT_CHECKED)
note = partial(CheckOutcome, Verdict.NOTE)
warning = partial(CheckOutcome, Verdict.WARNING)
problem = partial(CheckOutcome, Verdict.PROBLEM)


@dataclass(frozen=True)
class MachineCheck:
    """A check of a machine. ``needs`` lists inputs: ``file /proc/meminfo``, ``disk /dev/shm`` or a field."""

    code: str
    name: str
    theme: str
    page: str
    function: Callable[[MachineSnapshot], CheckOutcome]
    needs: tuple[str, ...] = ()
    gpu: bool = False  # runs only if there is a GPU

    title = Rule.title

    @property
    def why(self) -> str:
        return " ".join(self.page.partition("\n")[2].split())

    def run(self, snapshot: MachineSnapshot) -> CheckResult:
        missing = [need for need in self.needs if not has_input(snapshot, need)]
        outcome = (
            not_checked(f"{_input_names(missing)} could not be read") if missing else self.function(snapshot)
        )
        fix = outcome.fix.replace("sudo ", "") if snapshot.python.get("root") is True else outcome.fix
        notable = outcome.verdict not in (Verdict.OK, Verdict.NOT_CHECKED)
        return CheckResult(
            self.code,
            self.name,
            self.theme,
            outcome.verdict.value,
            outcome.observed,
            self.why if notable else "",
            fix,
            list(outcome.evidence),
        )


def machine_check(
    code: str, theme: str, needs: Iterable[str] = (), gpu: bool = False
) -> Callable[[Callable[[MachineSnapshot], CheckOutcome]], MachineCheck]:
    """Turns a function into a check with the function's name."""

    def make(function: Callable[[MachineSnapshot], CheckOutcome]) -> MachineCheck:
        page = inspect.cleandoc(function.__doc__ or "")
        return MachineCheck(code, function.__name__, theme, page, function, tuple(needs), gpu)

    return make


def has_input(snapshot: MachineSnapshot, need: str) -> bool:
    kind, _, name = need.partition(" ")
    if kind == "run":
        return name in snapshot.command_results
    if kind == "torch":
        return isinstance(snapshot.torch.get(name), dict)
    fields = {"file": "files", "folder": "folders", "disk": "disks", "python": "python"}
    if kind in fields:
        return getattr(snapshot, fields[kind]).get(name) is not None
    return getattr(snapshot, need) not in (None, "")  # an empty environment is valid


def _input_names(needs: Sequence[str]) -> str:
    texts = {
        "run": "the output of {}",
        "torch": "torch's {} information",
        "folder": "the folder {}",
        "disk": "the disk of {}",
        "python": "Python's {}",
    }
    parts = (need.partition(" ") for need in needs)
    return " and ".join(
        texts.get(kind, "{}").format(name) if name else kind.replace("_", " ") for kind, _, name in parts
    )


def first_command(finding: Finding) -> str:
    """The first command of a fix, without its comment."""
    return finding.fix.split("\n")[0].partition("   #")[0].strip()


def version(text: object) -> tuple[int, ...] | None:
    """``(2, 14, 1)`` for "2.14.1+cu130"; None if the text does not begin with a number."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", text if isinstance(text, str) else "")
    return tuple(int(part) for part in match[1].split(".")) if match else None


def dotted(numbers: Sequence[int]) -> str:
    return ".".join(str(number) for number in numbers)
