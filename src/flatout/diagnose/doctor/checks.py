"""The table of checks, with one file per theme.

To add a check, write a function with the decorator `machine_check`. Each theme begins with a code FD0x0. Codes never change and are never reused.
"""

from flatout.diagnose.doctor import driver, limits, python, system, torch_import
from flatout.diagnose.doctor.check import MachineCheck
from flatout.diagnose.doctor.nvidia_smi import has_gpu
from flatout.schema.machine_snapshot import CheckResult, MachineSnapshot, Verdict

TABLE: tuple[MachineCheck, ...] = tuple(
    dict.fromkeys(
        check
        for theme in (python, torch_import, driver, system, limits)
        for check in vars(theme).values()
        if isinstance(check, MachineCheck)
    )
)


def run_checks(snapshot: MachineSnapshot) -> list[CheckResult]:
    """The result of every check, in table order. Checks of GPUs are left out if there is no GPU."""
    no_gpu = has_gpu(snapshot) is False
    return [_result(check, snapshot) for check in TABLE if not (check.gpu and no_gpu)]


def _result(check: MachineCheck, snapshot: MachineSnapshot) -> CheckResult:
    """A check that raises must neither stop the others nor count as fine."""
    try:
        return check.run(snapshot)
    except Exception as error:
        bug = f"bug in flatout: {type(error).__name__}: {error}"
        return CheckResult(check.code, check.name, check.theme, Verdict.NOT_CHECKED, bug)
