"""A process that has imported torch and becomes programs: a start takes 40 ms in place of 2 to 8 s.

`Warm` starts a program as `subprocess.Popen` does: in its own process, with its own pid, files and environment, as
/proc shows them. The process is forked, not started, and `import torch` finds what is already there. Programs that it
starts in turn, or becomes, are forked likewise. A start that this cannot give in full is a real one: another
interpreter, options of Python, variables that act before Python runs.

What differs from a real start: addresses, the seed of hashes, the libraries' own threads and caches, and frames of
flatout below those of a program that flatout started. A test of these uses a real start.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

NAME = "<warm>"  # of its code: a name of no file, so that its frames are not the program's
START = f"import sys; exec(compile(open(sys.argv[1]).read(), {NAME!r}, 'exec'))"
# They act at the start of a process, or of a library, and would be without effect.
EARLY = (
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "CUDA_",
    "PYTORCH_",
    "NCCL_",
    "TRITON_",
)
LATE = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_CACHE_DIR", "PYTHON"}
STAYS = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
GROUPS = ("torch", "torch.utils.data", "torch._dynamo")
OF_FLATOUT = (
    "cli.main",
    "cli.run",
    "cli.tune",
    "agent.bootstrap",
    "agent.entry",
    "agent.run_listener",
    "checkpoint.attach",
    "checkpoint.rescue",
    "checkpoint.resume.session",
    "trial.worker",
    "trial.parent",
    "levers",
)
PR_SET_MM, PR_SET_MM_MAP = 35, 14  # source: prctl(2)
MADE_FOR = (3, 11)  # `fork_exec` is private to subprocess, and other in each version
READY = b"ready"


# -- the side of the tests


class Server:
    """The warm process, started at the first use."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **STAYS},
            cwd="/",
        )
        theirs.close()
        self.ready = self.socket.recv(64) == READY

    def close(self) -> None:
        self.socket.close()
        self.process.wait(30)


@functools.cache
def server() -> Server:
    made = Server()
    atexit.register(made.close)
    return made


def starts_warm(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether `Warm` can start this command. The names in /proc need a call of Linux that a kernel may lack."""
    return sys.version_info[:2] == MADE_FOR and can_become(argv, env) and server().ready


class Warm(subprocess.Popen):
    """A program in a fork of the warm process. The arguments are those of Popen."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        theirs_of_pipes = [rest[number] for number in (3, 6, 8)]  # p2cread, c2pwrite, errwrite
        handles = [number if handle == -1 else handle for number, handle in enumerate(theirs_of_pipes)]
        self._exit, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = {
            "argv": [os.fspath(word) for word in args],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(env),
            "umask": os.umask(0o77),
        }
        os.umask(asked["umask"])
        socket.send_fds(server().socket, [json.dumps(asked).encode()], [*handles, theirs.fileno()])
        theirs.close()
        self.pid = int(self._exit.recv(64))
        self._close_pipe_fds(*(rest[number] for number in (3, 4, 5, 6, 7, 8)))
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._exit], [], [], 0)[0]:
            return 0, 0
        status = int(self._exit.recv(64) or signal.SIGKILL)
        self._exit.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: object) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def start_program(
    argv: Sequence[str], env: Mapping[str, str], real: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """Start a program with text pipes for its output: warm where that can be, unless a ``real`` start is asked for."""
    kind = Warm if not real and starts_warm(argv, env) else subprocess.Popen
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return kind(argv, env=env, **{**pipes, **options})


def early_variables(env: Mapping[str, str]) -> list[str]:
    """Variables with which a program cannot start warm."""
    early = {k: v for k, v in env.items() if k.startswith(EARLY) and k not in LATE}
    return [name for name, value in early.items() if STAYS.get(name) != value]


def can_become(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a start of this command is one of a script, or of flatout, in this interpreter."""
    if early_variables(env) or len(argv) < 2:
        return False
    python = shutil.which(os.fsdecode(argv[0]), path=env.get("PATH"))
    if python is None or not Path(python).name.startswith("python"):
        return False
    here = Path(sys.executable)
    return (
        Path(python).parent == here.parent
        and Path(python).resolve() == here.resolve()
        and (argv[1].endswith(".py") or list(argv[1:3]) == ["-m", "flatout"])
    )


# -- the warm process

GROUPS_OF: dict[str, dict[str, types.ModuleType]] = {}  # root -> the modules that its import brought
STARTED_WITH: list[str] = []  # sys.path of a Python without a script


def preload() -> None:
    for root in (*GROUPS, *(f"flatout.{name}" for name in OF_FLATOUT)):
        before = set(sys.modules)
        importlib.import_module(root)
        GROUPS_OF[root] = {name: module for name, module in sys.modules.items() if name not in before}
    ours: dict[str, types.ModuleType] = {}
    for group in GROUPS_OF.values():
        ours |= {name: group.pop(name) for name in list(group) if is_flatouts(name)}
    GROUPS_OF["flatout"] = ours
    # torch brings numpy; a program may import numpy alone
    GROUPS_OF["numpy"] = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "numpy"
    }


def is_flatouts(name: str) -> bool:
    return name.partition(".")[0] == "flatout"


class Preloaded:
    """Finds modules that are in memory, and only once a program imports them."""

    def __init__(self, groups: Mapping[str, dict[str, types.ModuleType]]) -> None:
        self._group_of = {
            # flatout's modules need one another by name; of a library's parts, one may be imported without the whole
            name: group if name in groups or is_flatouts(name) else {name: module}
            for group in groups.values()
            for name, module in group.items()
        }

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if (group := self._group_of.get(name)) is None or name in sys.modules:
            return None
        return ModuleSpec(name, Restored(group, name), is_package=hasattr(group[name], "__path__"))


class Restored:
    """Loads a module that is in memory, with those that came with it."""

    def __init__(self, group: dict[str, types.ModuleType], name: str) -> None:
        self._group, self._module = group, group[name]
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        if self._spec is not None and self._spec.submodule_search_locations is not None:
            spec.submodule_search_locations = self._spec.submodule_search_locations
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
        for name, other in self._group.items():
            sys.modules.setdefault(name, other)


def serve(control: socket.socket) -> None:
    """Fork a program for each request. Returns in the forks alone."""
    try:
        show_in_proc(sys.orig_argv, os.environ)
    except OSError as error:
        control.send(str(error).encode())
        os._exit(0)
    preload()
    control.send(READY)
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid and where its exit is reported
    while True:
        ready, _, _ = select.select([control, *running], [], [])
        for end in ready:
            if end is not control:
                pid, report = running.pop(end)
                report.send(str(os.waitpid(pid, 0)[1]).encode())
                report.close()
                os.close(end)
                continue
            text, handles, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not text:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                start(json.loads(text), handles[:3])
                return
            report = socket.socket(fileno=handles.pop())
            for handle in handles:
                os.close(handle)
            running[os.pidfd_open(pid)] = pid, report
            report.send(str(pid).encode())


def start(asked: dict[str, Any], handles: Sequence[int]) -> None:
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
    close_all_but(())
    os.chdir(asked["cwd"])
    os.umask(asked["umask"])
    settle(asked["argv"], asked["env"])


def close_all_but(kept: Sequence[int], closes_inheritable: bool = True) -> None:
    """Close what an exec closes, or what a start through Popen closes."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            if number > 2 and number not in kept and (closes_inheritable or not os.get_inheritable(number)):
                os.close(number)


def settle(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Make this process one that has just started with this command."""
    os.environ.clear()
    os.environ.update(env)
    show_in_proc(argv, env)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, stream(number, mode))
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    sys.orig_argv, sys.argv = list(argv), list(argv[1:])
    sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *STARTED_WITH]
    sys.path_importer_cache.clear()
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in env
    random.seed()
    if numpy := GROUPS_OF["numpy"].get("numpy"):
        numpy.random.seed()
    hidden = {name for group in GROUPS_OF.values() for name in group}
    for name in [name for name in sys.modules if name in hidden or is_flatouts(name)]:
        del sys.modules[name]
    sys.modules.pop("sitecustomize", None)
    sys.meta_path[:] = [
        Preloaded(GROUPS_OF),
        *(finder for finder in sys.meta_path if isinstance(finder, type)),
    ]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    multiprocessing.process._children.clear()
    multiprocessing.process.current_process()._config.pop("tempdir", None)
    multiprocessing.util._finalizer_registry.clear()
    multiprocessing.util._run_after_forkers()
    tempfile.tempdir = None
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")


def stream(number: int, mode: str) -> io.TextIOWrapper | None:
    try:
        raw = open(number, mode + "b", -1, closefd=False)  # noqa: SIM115
    except OSError:
        return None
    lines = number == 2 or os.isatty(number)
    made = io.TextIOWrapper(
        raw,
        "utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=lines,
        write_through="PYTHONUNBUFFERED" in os.environ,
    )
    made.mode = mode
    return made


def show_in_proc(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Let /proc/<pid>/cmdline and environ show this command."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    words, variables = (
        b"".join(os.fsencode(text) + b"\0" for text in texts)
        for texts in (argv, (f"{name}={value}" for name, value in env.items()))
    )
    show_in_proc.kept = memory = ctypes.create_string_buffer(words + variables, len(words + variables))
    begin, middle = ctypes.addressof(memory), ctypes.addressof(memory) + len(words)
    code, data, brk, stack = (
        [int(fields[number - 3]) for number in numbers] for numbers in ((26, 27), (45, 46), (47,), (28,))
    )
    table = struct.pack(
        "=11QQIi",
        *code,
        *data,
        *brk,
        libc.sbrk(0),
        *stack,
        begin,
        middle,
        middle,
        middle + len(variables),
        0,
        0,
        -1,
    )
    held = ctypes.create_string_buffer(table, len(table))
    words_of_call = (ctypes.c_ulong(number) for number in (ctypes.addressof(held), len(table), 0))
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, *words_of_call):
        raise OSError(ctypes.get_errno(), "this kernel does not let a process name itself")


# -- starts of a program that runs here

_execve, _fork_exec = os.execve, getattr(subprocess, "_fork_exec", None)


def execve(path: Any, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """os.execve of a program that this process becomes."""
    argv = [os.fsdecode(word) for word in argv]
    if threading.current_thread() is not threading.main_thread() or not can_become([path, *argv[1:]], env):
        _execve(path, argv, env)
    close_all_but((), closes_inheritable=False)
    run_at_depth(argv, env)


def fork_exec(args, executables, close_fds, pass_fds, cwd, env_list, *rest) -> int:
    """What Popen calls: fork, and become the program in the child. Source: Modules/_posixsubprocess.c, Python 3.11."""
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, errpipe_read, errpipe_write = rest[:8]
    new_session, process_group, gid, groups, uid, umask, preexec_fn = rest[9:16]
    env = (
        dict(os.fsdecode(line).split("=", 1) for line in env_list)
        if env_list is not None
        else dict(os.environ)
    )
    argv = [os.fsdecode(word) for word in args]
    unusual = (gid, groups, uid) != (None, None, None) or umask >= 0 or process_group >= 0
    if unusual or not can_become(argv, env) or (cwd is not None and not os.path.isdir(cwd)):
        return _fork_exec(args, executables, close_fds, pass_fds, cwd, env_list, *rest)
    for kind in (sys.stdout, sys.stderr):
        if kind is not None:
            kind.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        for handle in {p2cwrite, c2pread, errread, errpipe_read} - {-1}:
            os.close(handle)
        ends = [os.dup(handle) if handle in (0, 1, 2) else handle for handle in (p2cread, c2pwrite, errwrite)]
        for number, handle in enumerate(ends):
            if handle != -1:
                os.dup2(handle, number)
        if cwd is not None:
            os.chdir(cwd)
        if new_session:
            os.setsid()
        if preexec_fn is not None:
            preexec_fn()
        os.close(errpipe_write)
        for handle in pass_fds:
            if handle != errpipe_write:
                os.set_inheritable(handle, True)
        close_all_but(pass_fds, closes_inheritable=close_fds)
        run_at_depth(argv, env)
    finally:
        os._exit(255)


def run_at_depth(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run the program above the frames of the one that started it, which never go on."""
    atexit._clear()
    weakref.finalize._registry.clear()
    gc.freeze()
    settle(argv, env)
    code = 255
    try:
        code = run()
        threading._shutdown()
        atexit._run_exitfuncs()
        for kind in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                kind.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 255)


def run() -> int:
    """Run the program that this process has become; return its exit code."""
    subprocess._fork_exec, os.execve = fork_exec, execve
    try:
        if sys.argv[0] == "-m":
            sys.path.insert(0, os.getcwd())
            del sys.argv[0]
            runpy._run_module_as_main(sys.argv[0])
        else:
            path = os.path.join(os.getcwd(), sys.argv[0].removeprefix("./"))
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            vars(main).update(
                __file__=path, __loader__=SourceFileLoader("__main__", path), __builtins__=__builtins__
            )
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec")
            exec(code, vars(main))
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (NAME, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    STARTED_WITH[:] = [
        path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ]
    sys.modules["warm"] = sys.modules["__main__"]
    serve(socket.socket(fileno=int(sys.argv[2])))
    code = run()
    if code == -signal.SIGINT:
        threading._shutdown()
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(code)
