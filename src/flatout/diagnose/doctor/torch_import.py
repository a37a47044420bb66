"""Checks whether torch can be imported, and explains failures from the loader's or Python's message."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    machine_check,
    not_seen,
    note,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.check import ok as fine
from flatout.diagnose.doctor.packages import install, manager
from flatout.diagnose.doctor.versions import versions
from flatout.schema.facts import TESTED_TORCH, untested
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "torch"
SLOW_IMPORT_S = 15.0


@dataclass(frozen=True)
class ImportFailure:
    """One kind of import failure. ``said`` and ``fix`` use the parts of the message."""

    pattern: re.Pattern[str]
    said: Callable[[re.Match[str], MachineSnapshot], str]
    fix: Callable[[re.Match[str], MachineSnapshot], str]


def reinstall(snapshot: MachineSnapshot) -> str:
    """The command that reinstalls the same torch with its libraries."""
    wanted = version(snapshot.distribution("torch"))
    return (
        f"pip install --force-reinstall torch=={dotted(wanted)}"
        if wanted
        else "pip install --force-reinstall torch"
    )


def _wheel_of(library: str) -> str:
    """The wheel that contains a CUDA library, by the name of the library."""
    noun = re.match(r"lib([a-zA-Z]+)", library)
    names = {
        "cudart": "nvidia-cuda-runtime",
        "cublas": "nvidia-cublas",
        "cublasLt": "nvidia-cublas",
        "cudnn": "nvidia-cudnn",
        "nccl": "nvidia-nccl",
        "nvrtc": "nvidia-cuda-nvrtc",
        "cupti": "nvidia-cuda-cupti",
        "cufft": "nvidia-cufft",
        "curand": "nvidia-curand",
        "cusolver": "nvidia-cusolver",
        "cusparse": "nvidia-cusparse",
        "cusparseLt": "nvidia-cusparselt",
        "nvJitLink": "nvidia-nvjitlink",
        "cufile": "nvidia-cufile",
        "nvshmem": "nvidia-nvshmem",
    }
    return names.get(noun[1], "") if noun else ""


def _missing(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    library = found["library"]
    if wheel := _wheel_of(library):
        have = [
            f"{name} {number} in {folder}"
            for name, number, folder in snapshot.packages or ()
            if name.startswith(wheel.replace("-", "_"))
        ]
        where = (
            f"{wheel} is installed ({have[0]}), but this library is not on torch's search path"
            if have
            else f"{wheel} is not installed"
        )
        return f"{library}, which torch needs, was not found: {where}"
    if library.startswith(("libtorch", "libc10", "libshm")):
        return f"{library} is a part of torch itself and was not found: the installation is incomplete, or a module was built for another torch"
    return f"{library}, which torch needs from the system, was not found"


def _fix_missing(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    library = found["library"]
    system = {
        "libgomp.so.1": install(snapshot, "libgomp1", "libgomp", "libgomp"),
        "libcuda.so.1": "nvidia-smi",
        "libstdc++.so.6": install(snapshot, "libstdc++6", "libstdc++", "libstdcxx-ng"),
    }
    if library in system:
        return system[library]
    if _wheel_of(library) or library.startswith(("libtorch", "libc10", "libshm")):
        return reinstall(snapshot)
    return (
        f"apt-file search {library}"
        if manager(snapshot) == "apt-get"
        else f"{manager(snapshot)} provides '*/{library}'"
    )


def _too_old(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    have = (snapshot.python.get("libc") or ["", ""])[1] or "older"
    return f"{found['needs']} needs glibc {found['version']}; this system has {have}"


def _newer_glibc(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    return 'docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch bash'


def _symbol(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    return f"{found['where']} needs the symbol {found['symbol']}, which the loaded library does not have: two versions are mixed"


def _mixed_path(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    return "unset LD_LIBRARY_PATH" if any((snapshot.libraries or {}).values()) else reinstall(snapshot)


def _no_compiled_part(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    """Explains a missing compiled module, named after its Python: _C.cpython-311-x86_64-linux-gnu.so."""
    seen = snapshot.torch.get("found") or {}
    compiled, here = (
        [str(name) for name in seen.get("compiled") or ()],
        str(snapshot.python.get("soabi") or "this Python"),
    )
    where = ", ".join(map(str, seen.get("places") or ["a folder"]))
    if compiled and not any(here in name for name in compiled):
        return f"torch in {where} was built for another Python ({', '.join(name.split('.')[1] for name in compiled)}); this one is {here}"
    return f"torch in {where} has no compiled part: it is torch's source code, not an installation"


def _fix_compiled_part(found: re.Match[str], snapshot: MachineSnapshot) -> str:
    seen = snapshot.torch.get("found") or {}
    on_path = any(
        str(place).startswith(part)
        for place in seen.get("places") or ()
        for part in (snapshot.variable("PYTHONPATH") or "").split(":")
        if part
    )
    return "unset PYTHONPATH" if on_path else reinstall(snapshot)


FAMILIES = (
    ImportFailure(
        re.compile(r"(?P<library>lib[\w+.-]+\.so[.\d]*): cannot open shared object file"),
        _missing,
        _fix_missing,
    ),
    ImportFailure(
        re.compile(
            r"version [`'](?P<kind>GLIBC)_(?P<version>[\d.]+)' not found \(required by (?P<needs>[^)]+)\)"
        ),
        _too_old,
        _newer_glibc,
    ),
    ImportFailure(
        re.compile(
            r"version [`'](?P<kind>GLIBCXX|CXXABI)_(?P<version>[\d.]+)' not found \(required by (?P<needs>[^)]+)\)"
        ),
        lambda m, s: (
            f"{m['needs']} needs {m['kind']} {m['version']}: the loaded libstdc++ is older than torch needs"
        ),
        lambda m, s: (
            "conda install -c conda-forge libstdcxx-ng"
            if s.variable("CONDA_PREFIX")
            else "unset LD_LIBRARY_PATH"
        ),
    ),
    ImportFailure(
        re.compile(r"(?P<where>\S+): (?:undefined symbol|symbol lookup error)[: ]+(?P<symbol>[^\s,]+)"),
        _symbol,
        _mixed_path,
    ),
    ImportFailure(
        re.compile(
            r"(?P<where>\S+): (?P<why>file too short|invalid ELF header|ELF load command[\w ]*|cannot read file data[^\n]*|wrong ELF class[^\n]*)"
        ),
        lambda m, s: f"{m['where']} is not a complete library ({m['why'].strip()})",
        lambda m, s: (
            "unset LD_LIBRARY_PATH"
            if s.libraries and any(m["where"].startswith(folder) for folder in s.libraries)
            else reinstall(s)
        ),
    ),
    ImportFailure(
        re.compile(
            r"cannot enable executable stack|failed to map segment from shared object|cannot allocate memory in static TLS block"
        ),
        lambda m, s: f"the loader rejected a library of torch ({m[0]})",
        lambda m, s: "mount | grep noexec",
    ),
    ImportFailure(
        re.compile(
            r"compiled using NumPy 1\.x cannot be run in|numpy\.core\.multiarray failed to import|_ARRAY_API not found|numpy\.dtype size changed"
        ),
        lambda m, s: (
            f"a module was built against another NumPy than {s.distribution('numpy') or 'the one'} that is installed"
        ),
        lambda m, s: "pip install --upgrade --force-reinstall numpy torch",
    ),
    ImportFailure(
        re.compile(r"partially initialized module ['\"]?(?P<module>[\w.]+)"),
        lambda m, s: f"a file in {s.working_folder} shadows {m['module'].split('.')[0]} during its import",
        lambda m, s: f"ls {s.working_folder}",
    ),
    ImportFailure(
        re.compile(r"No module named ['\"]torch\._C[\w.]*|Failed to load PyTorch C extensions"),
        _no_compiled_part,
        _fix_compiled_part,
    ),
    ImportFailure(
        re.compile(r"No module named ['\"](?P<module>[\w.]+)"),
        lambda m, s: f"torch needs the module {m['module']}, which is not installed",
        lambda m, s: f"pip install {m['module'].split('.')[0].replace('_', '-')}",
    ),
)


@machine_check("FD010", THEME, ["run import torch"])
def torch_imports(snapshot: MachineSnapshot) -> CheckOutcome:
    """`import torch` works.

    Why it matters:
        No training runs without torch. The import runs in a child process with a time limit, so that a crash
        or a hang is told apart from a missing torch.
    How to fix it:
        The command depends on the cause and is given with it; usually `pip install --force-reinstall torch`.
    """
    run = snapshot.runs["import torch"]
    found, done, failed = (
        snapshot.torch.get("found"),
        snapshot.torch.get("imported"),
        snapshot.torch.get("import failed"),
    )
    tail = [line for line in run.said.splitlines() if line.strip()][-4:]
    if isinstance(failed, dict):
        return _failed(failed, snapshot)
    if isinstance(found, dict) and not found.get("origin") and not found.get("places"):
        if snapshot.distribution("torch"):
            return problem("torch is listed as installed, but its files are missing", reinstall(snapshot))
        return problem("torch is not installed for this Python", "pip install torch")
    if isinstance(done, dict):
        file, took = done.get("file"), done.get("import_s")
        if file is None:
            places = (found or {}).get("places") if isinstance(found, dict) else None
            return problem(
                f"`import torch` found an empty folder ({', '.join(map(str, places or ['no file']))}) instead of torch",
                "pip install --force-reinstall torch",
            )
        strange = (snapshot.torch.get("build") or {}).get("raised")
        if strange:
            return problem(
                f"the module that `import torch` found at {file} is not torch: {strange}", reinstall(snapshot)
            )
        if not isinstance(took, (int, float)):
            return not_seen("the import time was not recorded")
        if took > SLOW_IMPORT_S:
            return warning(
                f"`import torch` took {took:.0f} s from {file}: its folder is on a slow disk",
                "python -m venv /tmp/venv && /tmp/venv/bin/pip install torch",
            )
        return fine(f"imported from {file} in {took:.1f} s")
    if run.timed_out:
        return problem(
            "`import torch` did not finish within the time limit: a slow disk, or a driver that does not answer",
            "python -X faulthandler -c 'import torch'",
            tail,
        )
    if run.code is not None and run.code < 0:
        name = signal.Signals(-run.code).name if -run.code in set(signal.Signals) else f"signal {-run.code}"
        return problem(
            f"`import torch` was ended by {name}"
            + (": the processor lacks an instruction of this build" if name == "SIGILL" else ""),
            reinstall(snapshot),
            tail,
        )
    if run.code:
        return problem(
            f"the child process that imports torch ended before the import: {tail[-1] if tail else f'exit code {run.code}'}",
            "python -c 'import torch'",
            tail,
        )
    return not_seen("the child process that imports torch wrote nothing")


def _failed(failed: dict[str, object], snapshot: MachineSnapshot) -> CheckOutcome:
    """The cause according to the message, first of the loader, then of Python."""
    message, kind = str(failed.get("message", "")), str(failed.get("kind", ""))
    trace = str(failed.get("traceback", ""))
    evidence = _where(trace)
    for family in FAMILIES:
        found = family.pattern.search(message) or family.pattern.search(trace)
        if found:
            return problem(family.said(found, snapshot), family.fix(found, snapshot), evidence)
    return problem(
        f"`import torch` raised {kind or 'an error'}: {_first(message)}", reinstall(snapshot), evidence
    )


def _where(trace: str) -> list[str]:
    """The innermost frame of a traceback and the exception."""
    lines = [line for line in trace.splitlines() if line.strip() and set(line.strip()) != {"^"}]
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    return lines[frames[-1] :][:6] if frames else lines[-6:]


def _first(message: str) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "no message").rstrip(":.")


@machine_check("FD011", THEME, ["packages"])
def torch_version(snapshot: MachineSnapshot) -> CheckOutcome:
    """flatout supports this torch release.

    Why it matters:
        flatout hooks into the installed torch. It is tested with torch 2.11 to 2.14. An older torch lacks the
        hooks. A newer one is used as it is, and the version table has no data on it.
    How to fix it:
        `pip install "torch>=2.11"`.
    """
    seen = snapshot.torch.get("build")
    text = seen.get("version") if isinstance(seen, dict) else snapshot.distribution("torch")
    here, table = version(text), versions()
    if here is None:
        return not_seen("torch's version could not be read" if text else "torch is not installed")
    if sentence := untested(str(text)):
        return note(sentence, "pip install --upgrade flatout")
    if here[:2] < table.torch_min:
        return warning(
            f"torch {text}; flatout is tested with {dotted(table.torch_min)} to {dotted(TESTED_TORCH)}",
            f'pip install "torch>={dotted(table.torch_min)}"',
        )
    return fine(f"torch {text}")


QUESTIONS = (torch_imports, torch_version)
