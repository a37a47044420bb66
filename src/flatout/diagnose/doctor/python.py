"""Checks of the Python interpreter and the packages on its path."""

import sys

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    machine_check,
    not_checked,
    note,
    ok,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.versions import versions
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "Python"


@machine_check("FD001", THEME, ["python version"])
def python_version(snapshot: MachineSnapshot) -> CheckOutcome:
    """flatout and this torch support this Python.

    A torch wheel is built for specific versions of Python. For other versions pip finds no wheel, or an old
    one, or builds for hours.
    """
    text = str(snapshot.python["version"])
    running, table = version(text), versions()
    if running is None:
        return not_checked(f"{text!r} is not a version of Python")
    free_threaded = ", free-threaded" if snapshot.python.get("free_threaded") else ""
    this_python = f"{snapshot.python.get('implementation') or 'Python'} {text}{free_threaded}"
    if running[:2] < table.python_min:
        return problem(
            f"{this_python}; flatout needs {dotted(table.python_min)}",
            f"python{dotted(table.releases[0].python_max)} -m venv .venv",
        )
    torch = snapshot.distribution("torch")
    release = table.release(torch)
    if torch is None:
        return ok(this_python)
    if release is None:
        return note(
            f"{this_python}; flatout's version table does not list torch {torch}, so compatibility is unknown"
        )
    if running[:2] == release.python_experimental:
        return note(
            f"{this_python}; torch {release.torch} has only experimental wheels for it",
            f"python{dotted(release.python_max)} -m venv .venv",
        )
    if not release.python_min <= running[:2] <= release.python_max:
        supported = f"{dotted(release.python_min)} to {dotted(release.python_max)}"
        return warning(
            f"{this_python}; wheels of torch {release.torch} are for {supported}",
            f"python{dotted(release.python_max)} -m venv .venv",
        )
    return ok(f"{this_python}, which torch {release.torch} supports")


@machine_check("FD003", THEME, ["folder .", "working_folder"])
def nothing_hidden(snapshot: MachineSnapshot) -> CheckOutcome:
    """No file in the working folder hides a module.

    Python looks for modules next to the script first. A file torch.py, random.py or types.py there is
    imported instead of the real module, and the error that follows names something else.
    """
    libraries = {"torch", "torchvision", "torchaudio", "numpy", "triton", "lightning"}
    builtin = set(sys.stdlib_module_names) - {"__main__", "test", "this", "antigravity"}
    local_files = {
        name.removesuffix(".py").removesuffix("/"): name.removesuffix("/")
        for name in snapshot.folders["."] or ()
    }
    names = sorted(set(local_files) & (libraries | builtin))
    hidden = [name for name in names if name in libraries]
    if hidden:
        return problem(
            f"{snapshot.working_folder} contains {', '.join(hidden)}, which hides the installed module of that name",
            f"mv {local_files[hidden[0]]} my_{local_files[hidden[0]]}",
        )
    if names:
        return warning(
            f"{snapshot.working_folder} contains {', '.join(names)}, which hides the standard library module of that name",
            f"mv {local_files[names[0]]} my_{local_files[names[0]]}",
        )
    return ok(f"nothing in {snapshot.working_folder} hides a module")


@machine_check("FD005", THEME, ["run start-up hook"])
def enters_programs(snapshot: MachineSnapshot) -> CheckOutcome:
    """flatout enters a program of this Python.

    flatout acts inside the program: its start-up hook runs before the first line of a script. If the hook is
    missing or fails, `tune` measures nothing and `run` applies nothing.
    """
    hook_run = snapshot.command_results["start-up hook"]
    report = hook_run.out.strip().partition(" ")[2]
    if report == "ok":
        return ok(f"flatout enters programs of {hook_run.command[0]}")
    why = report or hook_run.err.strip()[-200:] or "its start-up hook was not loaded"
    return problem(
        f"flatout does not enter programs of {hook_run.command[0]}: {why}",
        "pip install --force-reinstall --no-deps flatout",
    )
