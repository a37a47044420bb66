"""Checks whether torch can be imported. Its errors are explained as `flatout explain` explains them."""

import signal
from typing import Any

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    first_command,
    machine_check,
    not_checked,
    note,
    ok,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.versions import versions
from flatout.diagnose.explain import explain_text
from flatout.schema.facts import TESTED_TORCH, untested_torch
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "torch"
SLOW_IMPORT_S = 15.0


def reinstall(snapshot: MachineSnapshot) -> str:
    """The command that reinstalls the same torch with its libraries."""
    installed = version(snapshot.distribution("torch"))
    return f"pip install --force-reinstall torch{f'=={dotted(installed)}' if installed else ''}"


@machine_check("FD010", THEME, ["run import torch"])
def torch_imports(snapshot: MachineSnapshot) -> CheckOutcome:
    """`import torch` works.

    Why it matters:
        No training runs without torch. The import runs in a child process with a time limit, so that a crash
        or a hang is told apart from a missing torch.
    How to fix it:
        The command depends on the cause and is given with it; usually `pip install --force-reinstall torch`.
    """
    run, stages = snapshot.command_results["import torch"], snapshot.torch
    found, imported, failed = stages.get("found"), stages.get("imported"), stages.get("import failed")
    tail = [line for line in run.output.splitlines() if line.strip()][-4:]
    if isinstance(failed, dict):
        return _failed(failed, snapshot)
    if isinstance(found, dict) and not found.get("origin") and not found.get("places"):
        if snapshot.distribution("torch"):
            return problem("torch is listed as installed, but its files are missing", reinstall(snapshot))
        return problem("torch is not installed for this Python", "pip install torch")
    if isinstance(imported, dict):
        return _imported(imported, snapshot)
    if run.timed_out:
        return problem(
            "`import torch` did not finish within the time limit: a slow disk, or a driver that does not answer",
            "python -X faulthandler -c 'import torch'",
            tail,
        )
    if run.code is not None and run.code < 0:
        name = signal.Signals(-run.code).name if -run.code in set(signal.Signals) else f"signal {-run.code}"
        why = ": the processor lacks an instruction of this build" if name == "SIGILL" else ""
        return problem(f"`import torch` was ended by {name}{why}", reinstall(snapshot), tail)
    if run.code:
        return problem(
            f"the child process that imports torch ended before the import: {tail[-1] if tail else f'exit code {run.code}'}",
            "python -c 'import torch'",
            tail,
        )
    return not_checked("the child process that imports torch wrote nothing")


def _imported(imported: dict[str, Any], snapshot: MachineSnapshot) -> CheckOutcome:
    file, took_s = imported.get("file"), imported.get("import_s")
    if file is None:
        return problem(
            "`import torch` found an empty folder named torch instead of torch",
            "pip install --force-reinstall torch",
        )
    build_error = (snapshot.torch.get("build") or {}).get("raised")
    if build_error:
        return problem(
            f"the module that `import torch` found at {file} is not torch: {build_error}", reinstall(snapshot)
        )
    if not isinstance(took_s, (int, float)):
        return not_checked("the import time was not recorded")
    if took_s > SLOW_IMPORT_S:
        return warning(
            f"`import torch` took {took_s:.0f} s from {file}: its folder is on a slow disk",
            "python -m venv /tmp/venv && /tmp/venv/bin/pip install torch",
        )
    return ok(f"imported from {file} in {took_s:.1f} s")


def _failed(failed: dict[str, Any], snapshot: MachineSnapshot) -> CheckOutcome:
    """The cause according to the message, first of the loader, then of Python."""
    message, kind = str(failed.get("message", "")), str(failed.get("kind", ""))
    trace = str(failed.get("traceback", ""))
    lines = [line for line in trace.splitlines() if line.strip() and set(line.strip()) != {"^"}]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    evidence = lines[frames[-1] :][:6] if frames else lines[-6:]  # the innermost frame and the exception
    for explanation in explain_text(trace):
        command = first_command(explanation.finding)
        if command.startswith("pip install --force-reinstall torch"):
            command = reinstall(snapshot)  # of the same version
        return problem(explanation.finding.message, command, evidence)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no message").rstrip(":.")
    return problem(f"`import torch` raised {kind or 'an error'}: {first}", reinstall(snapshot), evidence)


@machine_check("FD011", THEME, ["packages"])
def torch_version(snapshot: MachineSnapshot) -> CheckOutcome:
    """flatout supports this torch release.

    Why it matters:
        flatout hooks into the installed torch. It is tested with torch 2.11 to 2.14. An older torch lacks the
        hooks. A newer one is used as it is, and the version table has no data on it.
    How to fix it:
        `pip install "torch>=2.11"`.
    """
    build = snapshot.torch.get("build")
    text = build.get("version") if isinstance(build, dict) else snapshot.distribution("torch")
    installed, table = version(text), versions()
    if installed is None:
        return not_checked("torch's version could not be read" if text else "torch is not installed")
    if warning_text := untested_torch(str(text)):
        return note(warning_text, "pip install --upgrade flatout")
    if installed[:2] < table.torch_min:
        return warning(
            f"torch {text}; flatout is tested with {dotted(table.torch_min)} to {dotted(TESTED_TORCH)}",
            f'pip install "torch>={dotted(table.torch_min)}"',
        )
    return ok(f"torch {text}")


CHECKS = (torch_imports, torch_version)
