"""The environment of a program, which loads flatout into each of its Python processes."""

import getpass
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flatout.job.trust import distrusted, user_cache
from flatout.schema.errors import FlatoutError

SITE = Path(__file__).resolve().parent.parent / "agent" / "site"
ENTERED = "FLATOUT_ENTERED"  # names the file to which the processes of a program report (command.py)

# A trial must not report to an experiment tracker.
OFFLINE_TRACKERS = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "COMET_OFFLINE": "1",
    "MLFLOW_TRACKING_URI": "",
    "CLEARML_OFFLINE_MODE": "1",
}
EXPLAIN = "flatout.diagnose.explain:explain_crash"


def job_environment(
    job: Path, extra: Mapping[str, str], replaces_process: bool = False, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment ``base`` plus the job and our site folder first on PYTHONPATH; ``extra`` wins.

    ``replaces_process``: the program replaces this process instead of running as its child. ``base``: ours by default."""
    base = os.environ if base is None else base
    return {
        **crash_environment(Path(f"{job}.explained"), replaces_process, base),
        **private_caches(base)[0],
        "FLATOUT_JOB": str(job),
        ENTERED: f"{job}.entered",
        **extra,
    }


def crash_environment(
    info: Path, replaces_process: bool, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """An environment with our site folder first on PYTHONPATH, only to explain tracebacks.

    The one process of the program that explains its crash creates ``info``."""
    return {
        **with_crash_reports(base),
        "FLATOUT_CRASH_REPORTS": str(info),
        "FLATOUT_FIRST": str(os.getpid()) if replaces_process else "",
    }


def with_crash_reports(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that loads flatout, so that crashes are reported.

    Raises FlatoutError if its start-up hook is not installed."""
    if not (SITE / "sitecustomize.py").is_file():
        raise FlatoutError(
            f"this installation of flatout is incomplete: there is no {SITE / 'sitecustomize.py'}, so it cannot enter a program. "
            "Install it again: pip install --force-reinstall --no-deps flatout"
        )
    return {"FLATOUT_EXPLAIN": EXPLAIN, **with_hook(environment)}


def with_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with our site folder first on PYTHONPATH."""
    path = environment.get("PYTHONPATH", "")  # kept unchanged: an empty part means the current folder
    if path.split(os.pathsep)[0] != str(SITE):
        path = f"{SITE}{os.pathsep}{path}" if path else str(SITE)
    return {**environment, "PYTHONPATH": path}


def module_command(python: str, module: str, *words: str) -> list[str]:
    """The command that runs a module of flatout in ``python``, which need not have flatout."""
    finder = f"sys.meta_path.append(runpy.run_path({str(SITE / 'sitecustomize.py')!r})['_FlatoutFinder']())"
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [python, "-c", f"import runpy, sys; {finder}; {run}", *words]


# Protect the compiler caches, whose contents run in the program.
#
# torch's cache is a folder with a predictable name in the temporary folder, and torch does not check its owner
# (codecache.py). If such a folder belongs to another user, or others can write to it, the program gets a
# private one. The user's own folder stays: its warm cache is worth minutes. Folders named in the environment
# are left unchanged.


def private_caches(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment variables for the program, and a sentence about each."""
    variables, messages = {}, []
    for variable, folder in _default_folders(environment).items():
        why = "" if variable in environment else distrusted(folder, group=True)
        if why:
            variables[variable] = str(user_cache(variable.lower().removesuffix("_dir"), environment))
            messages.append(f"ignoring the compiler cache in {folder}: {why}. Using {variables[variable]}")
    return variables, messages


def compiler_cache() -> str:
    """The folder of torch's compiler, which by default follows TMPDIR."""
    return _default_folders(os.environ)["TORCHINDUCTOR_CACHE_DIR"]


def _default_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """The default folders.

    Sources: torch/_inductor/runtime/cache_dir_utils.py, triton/knobs.py, torch/utils/cpp_extension.py."""
    home = os.path.expanduser("~")
    inductor = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", _user())
    user_caches = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), inductor),
        "TRITON_CACHE_DIR": os.path.join(environment.get("TRITON_HOME", home), ".triton", "cache"),
        "TORCH_EXTENSIONS_DIR": os.path.join(user_caches, "torch_extensions"),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"
