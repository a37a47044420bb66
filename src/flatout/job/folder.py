"""Paths of a job folder, and atomic reading and writing of its files.

.flatout/<job>/            0700; if it cannot be written: ~/.cache/flatout/jobs/<folder>/<job>/ (`flatout_folder`)
    lock                   held by the process that measures
    session.json           every record of the session
    unfinished.json        the same of an interrupted session, while session.json is that of a finished one
    flatout.toml           the Plan, with flatout.certificate.json once it is confirmed
    report.html
    profile.json           record of `flatout profile`, next to profile.html
    runs/<run>/rank0.json  record of `flatout run`
    trials/<n>/            one measured run: spec.json, result.json, stdout.log, stderr.log, and what it writes
    trials/shared_samples/      samples shared by the programs of a search, while it runs
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from flatout.job.temporary import leftover_folders, owned_path, remove
from flatout.job.trust import distrusted, user_cache
from flatout.schema.errors import StorageError

FOLDER = ".flatout"  # in the working directory; holds the folders of jobs, and a .gitignore of its own
MAX_RECORD_BYTES = 1 << 26  # the largest so far had 3 MB
SHARED_SAMPLES = "shared_samples"
RUNS = "runs"  # below the folder of a job: <time>-<pid>/rank<N>.json
MAX_JSON_VALUES = 1 << 21  # a value of three characters takes up to 100 bytes in memory
_locked: set[str] = set()  # folders that this process has locked until its end


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: temporary file, fsync, rename.

    A reader sees the old or the new file, never a part. Its mode is what the umask gives."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{os.urandom(4).hex()}"
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}. Free some space, or make the folder writable."
        ) from error


def write_json(path: Path, data: object) -> None:
    write_atomically(path, json.dumps(data, indent=1, sort_keys=False) + "\n")


def read_text(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> str:
    """Return the text of a regular file.

    Raises OSError, also for a pipe, a device or a file above ``max_bytes``, and ValueError if it is not
    UTF-8."""
    # Does not block on a pipe without a writer
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(handle, "rb") as file:
        stats = os.fstat(handle)
        if not stat.S_ISREG(stats.st_mode) or stats.st_size > max_bytes:
            raise OSError(0, "not a regular file, or too large", str(path))
        return file.read(max_bytes).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it is missing, not JSON, or larger than any record."""
    try:
        text = read_text(path)
        return json.loads(text) if count_json_values(text.encode()) <= MAX_JSON_VALUES else None
    except (OSError, ValueError, RecursionError):
        return None


def count_json_values(text: bytes | bytearray) -> int:
    """Return an upper bound of the number of values in JSON text, without parsing it."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one per line, or [] without a file.

    Incomplete lines are skipped."""
    objects = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            objects.append(record)
    return objects


@cache
def _sweep(trials: Path) -> None:
    """Remove what killed processes left in trials, once per process."""
    for trial in trials.glob("*"):
        for leftover in leftover_folders(trial):
            remove(leftover)


def flatout_folder(name: str = "") -> Path:
    """Return `.flatout/<name>`, or its stand-in in the user's cache if this folder cannot be written.

    It is the same at each start, so that `run` finds the plan of `tune`, and `--resume` its checkpoints."""
    local = Path(FOLDER, name)
    existing = next((path for path in (local, *local.parents) if os.path.lexists(path)), Path())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if writable and not distrusted(local, owner_of=Path()):
        return local
    project = os.getcwd()
    stand_in = f"{os.path.basename(project)}-{zlib.crc32(os.fsencode(project)):08x}"
    try:
        return user_cache("jobs", os.environ) / stand_in / name
    except StorageError:
        return local  # writing there says why it fails


class JobFolder:
    """Paths of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = path / "session.json"
        self.unfinished = path / "unfinished.json"
        self.plan = path / "flatout.toml"
        self.report = path / "report.html"
        self.profile = path / "profile.json"
        self.profile_page = path / "profile.html"
        self.ranks = path / "ranks.json"
        self.trials = path / "trials"
        self.shared_samples = self.trials / SHARED_SAMPLES  # as `TrialFolder.shared_samples`

    def make(self) -> JobFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # The owner of the project folder is trusted
            if why := distrusted(self.path, owner_of=self.path.absolute().parent.parent):
                raise StorageError(
                    f"the records in {self.path} are not trusted: {why}. Move the folder away."
                )
            self.path.chmod(0o700)
            self.trials.mkdir(exist_ok=True)
            if self.path.parent.name == FOLDER and not (ignored := self.path.parent / ".gitignore").exists():
                ignored.write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"cannot create the folder {self.path}: {error.strerror}. Make the folder around it writable."
            ) from error
        return self

    def lock(self) -> None:
        """Let no other process measure in this folder until this one ends, however it ends.

        Raises StorageError if another does. The kernel forgets the lock with its process, and its children do
        not inherit it."""
        path = self.path / "lock"
        if (name := os.path.realpath(path)) in _locked:
            return
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = path.read_text().partition("\n")[0]
            raise StorageError(f"another tune of this command is running (pid {pid}): wait for it.") from None
        except OSError as error:
            raise StorageError(f"cannot lock {path}: {error.strerror}.") from error
        _locked.add(name)

    def new_trial(self) -> TrialFolder:
        """Create the folder of the next free number. ``mkdir`` ensures that two sessions never share one."""
        _sweep(self.trials)
        number = 1 + max((int(p.name) for p in self.trials.glob("*") if p.name.isdigit()), default=0)
        while True:
            try:
                (self.trials / str(number)).mkdir(parents=True)
                return TrialFolder(self.trials / str(number))
            except FileExistsError:
                number += 1
            except OSError as error:
                raise StorageError(
                    f"cannot create a folder in {self.trials}: {error.strerror}. Make it writable."
                ) from error


class TrialFolder:
    """Paths of one trial."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.result = path / "result.json"
        self.stdout = path / "stdout.log"
        self.stderr = path / "stderr.log"
        # Samples that the programs of a search share while it runs
        self.shared_samples = path.parent / SHARED_SAMPLES
        self.claim = path / "claim"  # created by the measured process of the program
        # the levers that all ranks switch to, written by the measured rank, and the step after which
        self.rank_command_file = path / "rank_command.json"

    @property
    def files(self) -> Path:
        """Return the folder for what a trial started by this process writes, instead of the user's folders."""
        return owned_path(self.path)
