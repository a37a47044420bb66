"""The table of checks, with one file per theme.

To add a check, write a function and add it to its file's QUESTIONS.

Each theme begins with a code FD0x0. Codes never change and are never reused.
"""

from flatout.diagnose.doctor import (
    compilers,
    disks,
    driver,
    gpus,
    memory,
    processor,
    python,
    resources,
    switches,
    system,
    torch_build,
    torch_import,
)
from flatout.diagnose.doctor.check import MachineCheck
from flatout.diagnose.doctor.nvidia_smi import gpu_is_here
from flatout.schema.machine_snapshot import CheckResult, MachineSnapshot, Verdict

TABLE: tuple[MachineCheck, ...] = tuple(
    question
    for theme in (
        python,
        torch_import,
        torch_build,
        driver,
        gpus,
        compilers,
        system,
        processor,
        memory,
        resources,
        disks,
        switches,
    )
    for question in theme.QUESTIONS
)
THEMES = tuple(dict.fromkeys(question.theme for question in TABLE))


def examine(snapshot: MachineSnapshot) -> list[CheckResult]:
    """The result of every check, in table order. Checks of GPUs are left out if there is no GPU."""
    none_here = gpu_is_here(snapshot) is False
    return [_checked(question, snapshot) for question in TABLE if not (question.gpu and none_here)]


def _checked(question: MachineCheck, snapshot: MachineSnapshot) -> CheckResult:
    """A check that raises must neither stop the others nor count as fine."""
    try:
        return question.answer(snapshot)
    except Exception as error:
        return CheckResult(
            question.code,
            question.name,
            question.theme,
            Verdict.UNSEEN,
            f"bug in flatout: {type(error).__name__}: {error}",
        )
