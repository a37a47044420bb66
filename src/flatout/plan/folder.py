"""The folder of a job, and the one way in which flatout writes a file: whole, or not at all.

    .flatout/<job>/            0700
        session.json           every record of the session
        flatout.toml           the Plan
        report.html
        profile.json           what `flatout profile` saw, and profile.html
        trials/<n>/            one measured run: spec.json, result.json, stdout.log, stderr.log, saved/
        trials/handed_on/      samples that the programs of a search hand on, while it lasts
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from flatout.plan.errors import StorageError
from flatout.plan.trust import distrusted

MOST_BYTES = 1 << 26  # of a record; the largest that was seen had 3 MB
HANDED_ON = "handed_on"
MOST_VALUES = 1 << 21  # of 100 bytes each, the largest that a value of three characters can be


def write_whole(path: Path, text: str) -> None:
    """Write beside, flush to the disk, rename: a reader sees the old file or the new one, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}. Free some space, or name another folder with --job.") from error


def write_json(path: Path, data: Any) -> None:
    write_whole(path, json.dumps(data, indent=1, sort_keys=False) + "\n")


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of an ordinary file. Raises OSError, also for a pipe, a device, and what is longer; ValueError for what is not UTF-8."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe that nobody writes to is not waited for
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > most_bytes:
            raise OSError(0, "it is not an ordinary file of a sensible length", str(path))
        return file.read(most_bytes).decode("utf-8")


def read_json(path: Path) -> Any:
    """The content, or None where there is no file or it is not JSON (a power cut, another tool), or more of it than any record has."""
    try:
        text = read_text(path)
        return json.loads(text) if values_in(text.encode()) <= MOST_VALUES else None
    except (OSError, ValueError, RecursionError):
        return None


def values_in(text: bytes | bytearray) -> int:
    """How many values JSON can turn into at most, which is known before one is made."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; a last one that was cut off is left out. Nothing where there is no file."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


class JobFolder:
    """Owns every path of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> JobFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if why := distrusted(self.path, whose=self.path.absolute().parent.parent):  # whoever owns the project's folder owns its records
                raise StorageError(f"the records in {self.path} are not used: {why}. Name another folder with --job DIR.")
            self.path.chmod(0o700)
            self.trials.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the folder {self.path}: {error.strerror}. Name a folder that can be written with --job DIR.") from error
        return self

    @property
    def session(self) -> Path:
        return self.path / "session.json"

    @property
    def plan(self) -> Path:
        return self.path / "flatout.toml"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def profile_page(self) -> Path:
        return self.path / "profile.html"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks.json"

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    @property
    def handed_on(self) -> Path:
        """The `TrialFolder.handed_on` of its trials."""
        return self.trials / HANDED_ON

    def new_trial(self) -> TrialFolder:
        """The next free number. Made with ``mkdir``, so that two sessions never share one."""
        number = 1 + max((int(p.name) for p in self.trials.glob("*") if p.name.isdigit()), default=0)
        while True:
            try:
                (self.trials / str(number)).mkdir(parents=True)
                return TrialFolder(self.trials / str(number))
            except FileExistsError:
                number += 1
            except OSError as error:
                raise StorageError(f"cannot make a folder in {self.trials}: {error.strerror}. Name another folder with --job DIR.") from error


class TrialFolder:
    """Owns every path of one trial."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def stdout(self) -> Path:
        return self.path / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.path / "stderr.log"

    @property
    def saved(self) -> Path:
        """Where a trial's own files land instead of the user's folders."""
        return self.path / "saved"

    @property
    def told(self) -> Path:
        """What the measured rank has told the others to do, and after which step."""
        return self.path / "told.json"

    def of_rank(self, rank: int) -> Path:
        """What a rank that is not measured has heard."""
        return self.path / f"rank{rank}.json"

    @property
    def handed_on(self) -> Path:
        """Where the programs of one search hand on the samples that they have kept; there while the search lasts."""
        return self.path.parent / HANDED_ON

    @property
    def claim(self) -> Path:
        """Made by the one process of the program that is measured."""
        return self.path / "claim"
