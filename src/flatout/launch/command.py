"""Parse the command after `flatout run`: its program, its script, and Python options that disable flatout."""

import hashlib
import os
import select
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from flatout.job.interpreter import program_python
from flatout.job.sanitize import masked, portable
from flatout.job.temporary import owner
from flatout.job.trust import file_digest
from flatout.launch.environment import ENTERED, SITE
from flatout.measure.clock import seconds
from flatout.schema.errors import NothingMeasured, ProgramNotFound, UsageError

FLAG_LETTERS = "bBdEiIOPqRsStuvx"  # options of the interpreter without an argument that run something


@dataclass(frozen=True)
class PythonLine:
    """A command line as the interpreter reads it: ``words`` are the code, module or script, and its arguments.

    ``kind`` is "code", "module", "script" or "stdin"; "" is help, the version, or a line that it rejects."""

    kind: str = ""
    words: tuple[str, ...] = ()
    disables: str | None = None  # the first option that disables flatout: -I, -E or -S


MAX_SCRIPT_BYTES = 1 << 20  # larger files are data


@dataclass(frozen=True)
class Command:
    """A parsed command.

    ``argv`` is what will be executed; ``script`` is the Python file it runs, if known."""

    typed: tuple[str, ...]
    argv: tuple[str, ...]
    script: Path | None = None
    module: str | None = None
    disabled_by: str | None = None  # the Python option that disables flatout (-I, -E, -S)
    folder: Path | None = None  # working directory; None: the current one
    environment: tuple[tuple[str, str], ...] = ()  # variables that differ from ours
    piped: bool = False  # the program itself comes through a pipe, which one process alone can read

    @property
    def title(self) -> str:
        """A short name for folders: that of the script, the module or the program."""
        name = self.script.stem if self.script else self.module or Path(self.argv[0]).name
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40] or "job"

    @property
    def shown(self) -> tuple[str, ...]:
        """The typed command without its secrets, safe to store and show."""
        return tuple(masked(self.typed))

    @property
    def portable(self) -> list[str]:
        """The same without absolute paths. Python elsewhere is ``python``."""
        first, *words = map(portable, self.shown)
        return ["python" if first[0] in "~*" and is_python(self.typed[0]) else first, *words]

    @property
    def digest(self) -> str:
        """A digest of the current folder and the command without its secrets, which may change each time."""
        return hashlib.sha256(
            "\0".join((*self.shown, os.getcwd())).encode(errors="surrogateescape")
        ).hexdigest()[:8]

    @property
    def script_digest(self) -> str:
        """A digest of the script, or of files in another command (`bash train.sh`)."""
        folder = self.folder or Path()
        words = [self.script] if self.script else [folder / word for word in self.typed[1:]]
        return " ".join(filter(None, (file_digest(word, MAX_SCRIPT_BYTES) for word in words)))


def parse_command(typed: Sequence[str], folder: Path | None = None) -> Command:
    """Parse a command line that will run in ``folder``; None is the current one.

    Raises UsageError if it is empty, ProgramNotFound if the program or script is missing."""
    return replace(_parse(typed, folder or Path()), folder=folder)


def check_measurable(command: Command) -> Command:
    """The command. Raises NothingMeasured if no trial of it can be measured."""
    if command.disabled_by:
        raise NothingMeasured(
            f"nothing can be measured: `python {command.disabled_by}` disables flatout; remove {command.disabled_by}"
        )
    if command.piped:
        raise NothingMeasured(
            f"nothing can be measured: `{shlex.join(command.shown)}` reads its program from a pipe, which can be read "
            "only once. Save the program in a file and give that: python train.py"
        )
    return command


def is_python(program: str) -> bool:
    return Path(program).name.startswith(("python", "pypy"))


def parse_python(argv: Sequence[str]) -> PythonLine:
    """Parse a command line of Python as the interpreter does (Python/getopt.c)."""
    words, disables = list(argv[1:]), None
    while words and words[0].startswith("-") and words[0] != "-":
        letters = words.pop(0)[1:]
        if letters == "-":
            break
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cmWX" or f"{letter}{letters}" == "-check-hash-based-pycs":
                if letter == "-":
                    letters = ""
                if not (letters or words):
                    return PythonLine()
                argument, letters = letters or words.pop(0), ""
                if letter == "-" and argument not in ("default", "always", "never"):
                    return PythonLine()
                if letter in "cm":
                    return PythonLine("code" if letter == "c" else "module", (argument, *words), disables)
            elif letter not in FLAG_LETTERS:
                return PythonLine()
            elif letter in "IES":
                disables = disables or f"-{letter}"
    return PythonLine("stdin" if words[:1] in ([], ["-"]) else "script", tuple(words), disables)


def _parse(typed: Sequence[str], cwd: Path) -> Command:
    if not typed:
        raise UsageError(
            "no program was given: the command line is empty. Give a script (train.py) or a command (python train.py)."
        )
    first = typed[0]
    if first.endswith(".py") and not (len(typed) == 1 and _words_in(first)):
        must_exist(cwd / first)
        return Command(tuple(typed), (program_python(), *typed), Path(first))
    if not shutil.which(first):
        is_folder = (cwd / first).is_dir()
        problem = f"{first!r} is a folder" if is_folder else f"there is no program {first!r} on the PATH"
        raise ProgramNotFound(
            f"{problem}.{_suggestion(cwd / first)} Give a script (train.py) or a command (python train.py)."
        )
    if is_python(first):
        return _python(typed, cwd)
    script = next((cwd / word for word in typed[1:] if word.endswith(".py") and (cwd / word).is_file()), None)
    if script is None and (cwd / first).is_file():
        script = cwd / first
    return Command(tuple(typed), tuple(typed), script)


def _python(typed: Sequence[str], cwd: Path) -> Command:
    line = parse_python(typed)
    command = Command(tuple(typed), tuple(typed), disabled_by=line.disables)
    if line.kind == "module":
        name = line.words[0]
        return replace(command, script=_module_file(name, line.words, cwd), module=name)
    if line.kind != "script":
        return replace(command, piped=line.kind == "stdin")
    script = cwd / line.words[0]
    if script.is_fifo() or script.is_char_device() or script.parts[:2] == ("/", "dev"):
        return replace(command, piped=True)
    must_exist(script)
    return replace(command, script=script)


def _module_file(module: str, rest: Sequence[str], cwd: Path) -> Path | None:
    parts = Path(*module.split("."))
    if not parts.name:  # `python -m ""`
        return None
    for candidate in (cwd / parts.with_suffix(".py"), cwd / parts / "__main__.py"):
        if candidate.is_file():
            return candidate
    return next((cwd / word for word in rest[1:] if word.endswith(".py") and (cwd / word).is_file()), None)


def must_exist(script: Path) -> None:
    """Raise ProgramNotFound, with what was probably meant, if Python cannot run this file or folder."""
    if script.is_dir() and (script / "__main__.py").is_file():
        return
    if not script.is_file():
        name = repr(str(script))
        problem = f"{name} is a folder" if script.is_dir() else f"there is no script {name} in {os.getcwd()}"
        raise ProgramNotFound(
            f"{problem}.{_suggestion(script)} Check the path, or change to the script's folder."
        )


def _words_in(word: str) -> list[str]:
    """The words of a command line that was given as one word, whose first names a program; [] for others."""
    try:
        words = shlex.split(word)
    except ValueError:
        return []
    is_line = len(words) > 1 and not Path(word).exists()
    return words if is_line and (shutil.which(words[0]) or Path(words[0]).is_file()) else []


def _suggestion(missing: Path) -> str:
    word = str(missing)
    if words := _words_in(word):
        return f" The quotes make one word of a command line; did you mean {shlex.join(words)}?"
    if (missing / "__main__.py").is_file():
        return f" Did you mean `python {shlex.quote(word)}` (its __main__.py)?"
    folder = missing if missing.is_dir() else missing.parent
    try:
        scripts = sorted(missing.name for missing in folder.glob("*.py"))
    except OSError:
        scripts = []
    if missing.is_dir():
        matches = get_close_matches("train.py", scripts, 1) or scripts[:1]
    else:
        matches = get_close_matches(missing.name, [*scripts, "python", "torchrun"], 1)
    if not matches:
        return ""
    suggestion = str(folder / matches[0]) if matches[0] in scripts else matches[0]
    return f" Did you mean `{shlex.quote(suggestion)}`?"


# Watches whether flatout enters a program, and says why if it does not.
#
# Python reads flatout's start-up hook before the first line of a script (agent/site/sitecustomize.py). The hook
# reports its process in the file FLATOUT_ENTERED. A Python process that is not reported, and starts no other
# Python process, shows in its arguments and its environment what disables the hook.

# how long a Python process may take to report: with, and without a known cause
KNOWN_CAUSE_S, UNKNOWN_CAUSE_S = (3.0, 9.0)
SCAN_S = 0.5  # looking through the process table takes milliseconds
POLL_S = 0.02
MAX_REPORT_BYTES = 1 << 16
NO_REPORT = (
    "no Python process of this command loaded flatout (a container, env -i, python -I, -E or -S prevent it)"
)


@dataclass(frozen=True)
class PythonProcess:
    """``environment`` is None if the process belongs to another user."""

    pid: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] | None

    @property
    def name(self) -> str:
        return Path(self.argv[0]).name if self.argv else "python"


def why_not_entered(process: PythonProcess) -> str:
    """Why flatout cannot enter a Python process, with the next command; "" if nothing is found."""
    option, environment = parse_python(process.argv).disables, process.environment
    if option:
        return f"`{process.name} {option}` disables flatout; remove {option}"
    if environment is None:
        return (
            "its Python runs as another user (sudo, su), whose environment has nothing of flatout. "
            "Start flatout as that user: sudo flatout ..."
        )
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    if ENTERED not in environment:
        return (
            "its environment was cleared before Python started (env -i, sudo, a container). "
            "Keep PYTHONPATH and all variables that begin with FLATOUT_, or start flatout inside"
        )
    if str(SITE) not in path:
        return (
            f"a launcher replaced PYTHONPATH by {environment.get('PYTHONPATH', '')!r}. "
            "Let it add its folders instead: PYTHONPATH=folder:$PYTHONPATH"
        )
    for folder in path[: path.index(str(SITE))]:
        if (hiding := Path(folder, "sitecustomize.py")).is_file():
            return f"{hiding} hides flatout's own sitecustomize. Move {folder} behind the other folders of PYTHONPATH"
    return ""


class EntryWatch:
    """Finds out whether a process of a program reports to the file ``entered``, which this makes.

    ``cause`` is empty until a cause is certain."""

    def __init__(self, entered: Path) -> None:
        self.path = entered
        # held open, because a short program removes the folder at its end
        self._handle = os.open(entered, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self.cause = ""
        self._processes: dict[int, tuple[float, PythonProcess]] = {}
        self._scanned_s = seconds()  # a program that is entered never needs a look

    @property
    def reports(self) -> dict[int, str]:
        """What each process reported last: "ok", "old 3.8.18", or an error."""
        lines = os.pread(self._handle, MAX_REPORT_BYTES, 0).decode(errors="replace").splitlines()
        parts = (line.partition(" ") for line in lines)
        return {int(pid): report for pid, _, report in parts if pid.isdigit() and report}

    def is_decided(self, root: int) -> bool:
        """Whether it is decided: flatout is in the program of process ``root``, or ``cause`` says why not."""
        reports = self.reports
        if "ok" in reports.values():
            return True
        now = seconds()
        if now - self._scanned_s < SCAN_S:
            return False
        self._scanned_s = now
        running, parents = python_processes(root)
        for process in running:
            if any("from flatout.launch." in word for word in process.argv):
                continue  # a supervisor, whose child is the program
            first_s, _ = self._processes.setdefault(process.pid, (now, process))
            if process.pid in parents:
                continue
            cause = self._cause(process, reports)
            if now - first_s > (KNOWN_CAUSE_S if cause else UNKNOWN_CAUSE_S):
                self.cause = cause or (
                    f"{' '.join(process.argv[:3])} (pid {process.pid}) did not load {SITE / 'sitecustomize.py'}. "
                    "`flatout doctor` checks this installation"
                )
        return bool(self.cause)

    def cause_at_end(self) -> str:
        """Why flatout was in no process of a program that has ended; "" if it was in one."""
        reports = self.reports
        if "ok" in reports.values():
            return ""
        causes = [self._cause(process, reports) for _, process in self._processes.values()]
        if reports:
            causes.append(_reported(next(reversed(reports.values()))))
        return next(filter(None, causes), NO_REPORT)

    def close_inherited_files(self) -> None:
        """Close what this process has inherited, such as the pipe that somebody reads to its end."""
        os.closerange(3, self._handle)
        os.closerange(self._handle + 1, 1024)

    def close(self) -> None:
        """Remove the file. Safe to call again."""
        self.path.unlink(missing_ok=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _cause(self, process: PythonProcess, reports: Mapping[int, str]) -> str:
        return _reported(reports[process.pid]) if process.pid in reports else why_not_entered(process)


def _reported(report: str) -> str:
    kind, _, version = report.partition(" ")
    if kind == "ok":
        return ""
    if kind == "old":
        return f"its Python {version} is too old for flatout. Use Python 3.10 or newer"
    return f"flatout failed in it ({report}). Install flatout again: pip install --force-reinstall flatout"


def python_processes(root: int) -> tuple[list[PythonProcess], set[int]]:
    """The Python processes of a program, and the pids of those with a Python process below them."""
    import psutil  # here, because it takes 15 ms, and most programs need no look

    pythons: list[PythonProcess] = []
    parents: set[int] = set()
    try:
        root_process = psutil.Process(root)
        processes = [root_process, *root_process.children(recursive=True)]
    except psutil.Error:
        return [], set()
    parent_of = {process.pid: process.ppid() for process in processes if process.is_running()}
    for process in processes:
        try:
            argv = tuple(process.cmdline())
            if not argv or not is_python(process.exe() or argv[0]):
                continue
        except psutil.Error:
            continue
        try:
            environment: Mapping[str, str] | None = process.environ()
        except psutil.Error:
            environment = None
        pythons.append(PythonProcess(process.pid, argv, environment))
        pid = parent_of.get(process.pid, 0)
        while pid in parent_of:
            parents.add(pid)
            pid = parent_of[pid]
    return pythons, parents


def watch_from_beside(watch: EntryWatch, prefix: str) -> None:
    """Watch this process, which becomes the program, from a process beside it that is no child of it.

    It ends once flatout is in the program; otherwise it prints ``prefix`` and the cause."""
    program = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:
            os.setsid()
            _watch(watch, program, prefix)
    finally:
        os._exit(0)


def _watch(watch: EntryWatch, program: int, prefix: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    watch.close_inherited_files()
    timer = select.poll()
    try:
        timer.register(os.pidfd_open(program), select.POLLIN)  # ends a wait when the program ends
    except (AttributeError, OSError):
        pass  # Linux before 5.3
    wait_s, cause = POLL_S, ""
    while not watch.is_decided(program):
        timer.poll(wait_s * 1000)
        if not owner(program):
            cause = watch.cause_at_end()
            break
        wait_s = min(SCAN_S, wait_s * 1.1)
    watch.close()
    if cause := cause or watch.cause:
        os.write(2, f"{prefix}{cause}\n".encode(errors="replace"))
