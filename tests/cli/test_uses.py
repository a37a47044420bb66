"""Each use of `uses.py` runs plainly and under `flatout run`, and both do the same: output, exit code, files, and nothing is left."""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import termios
import threading
from dataclasses import dataclass

import pytest
from limits import hang_s
from processes import state, until
from uses import KILLED, NO_PYTHON, RARE, TOGETHER, WAYS, uses, write

from flatout.job.temporary import sweep

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]

CLOSED = {"no input": "<&-", "no output": ">&-", "no error": "2>&-", "none": "<&- >&- 2>&-"}
OURS = re.compile(r"^(flatout: .*|\+--.*--\+|\|.*\|)\r?\n", re.MULTILINE)
PLACES = {"space": "with space", "quotes": 'it\'s "$HOME" *', "non-ASCII": "größe Ω", "in TMPDIR": "tmp/own"}
# Processes, addresses, and the times in what torchrun says.
VARIES = re.compile(
    r"(?<=line \d: )[ \d]+| at 0x\w+|(?<=torchelastic_)\w+|(?<=subprocess )\d+|=+ .*(passed|failed|error).* in .*|(?<=child )\d+|^ +\d+ Done +|^(W|E|I)\d{4} .*$|time +: .*|\(pid: \d+\)|pid +: .*|local_rank: .*|Process \w+-\d+"
)


@dataclass(frozen=True)
class Seen:
    """What a user can see of a run that has ended."""

    code: int
    out: list[str]
    err: list[str]
    files: list[str]
    temporary: list[str]
    left: list[str]


class Place:
    """The same folders for each run: the user's own, a home, one for temporary files, and one for the test."""

    def __init__(self, use, base):
        self.use, self.base = use, base
        self.folder = base / PLACES.get(use.folder, "project")
        self.home, self.tmp, self.control = base / "home", base / "tmp", base / "control"

    def make(self):
        for path in (self.home, self.tmp, self.control, self.folder):
            path.mkdir(parents=True, exist_ok=True)
        write(self.folder)
        (self.base / "link").symlink_to(self.folder)
        (self.base / "gone").mkdir()
        if self.use.folder == "read-only":
            for path in (self.folder / "pkg", self.folder):
                path.chmod(0o555)
        if self.use.folder == "TMPDIR read-only":
            (self.base / "no").mkdir(mode=0o555)

    def remove(self):
        for path in (self.base, *(path for path in self.base.rglob("*") if path.is_dir())):
            path.chmod(0o755)
        shutil.rmtree(self.base)

    @property
    def cwd(self):
        return self.base / self.use.folder if self.use.folder in ("link", "gone") else self.folder

    def environment(self):
        more = {
            "END": self.use.end,
            "READY": str(self.control / "ready"),
            "TMPDIR": str(self.tmp),
            "HOME": str(self.home),
            "PWD": str(self.cwd),
        }
        if self.use.folder in ("TMPDIR missing", "TMPDIR read-only"):
            more |= {"TMPDIR": str(self.base / "no"), "TMP": str(self.tmp)}
        if self.use.folder == "removed":
            more["GONE"] = "1"
        if self.use.train:
            more["TRAIN"] = "weights.pt" if self.use.folder not in ("read-only",) else str(self.home / "w.pt")
        return more

    def files(self):
        """The user's files and those in the home, with modes and content."""
        found, cache = [], self.home / ".cache" / "flatout"
        for top in (self.folder, self.home):
            for path in sorted(top.rglob("*")) if top.exists() else ():
                # the record of a run that trained; where it would be if the folder cannot be written
                records = self.use.train and ".flatout" in path.parts
                if not records and path not in (cache, *cache.parents) and cache not in path.parents:
                    mode = stat.filemode(path.lstat().st_mode)
                    found.append(f"{mode} {path.relative_to(self.base)} {_content(path)}")
        return found

    def temporary(self):
        return sorted(VARIES.sub("", path.name) for path in self.tmp.iterdir() if path != self.folder)


def _content(path):
    return os.readlink(path) if path.is_symlink() else str(path.read_bytes()) if path.is_file() else ""


def without_rights():
    """Words that take from root the right to write where the modes forbid it."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("not run: root can write to a read-only folder, and there is no setpriv")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


def run(use, place, words, environment):
    """Start the words with the streams of the use, end them as it says, and return exit code, output and errors."""
    if use.folder == "no HOME":
        del environment["HOME"]
    if use.folder in ("read-only", "TMPDIR read-only"):
        words = [*without_rights(), *words]
    if use.folder == "gone":
        words = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *words]
    if use.streams in CLOSED:
        words = ["sh", "-c", f'exec "$@" {CLOSED[use.streams]}', "sh", *words]
    files = [place.control / name for name in ("out", "err")]
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    outside = inside = -1
    if use.streams == "one pipe":
        streams["stderr"] = subprocess.STDOUT
    elif use.streams == "files":
        streams |= {"stdout": files[0].open("wb"), "stderr": files[1].open("wb")}
    elif use.streams == "nothing":
        streams |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    elif use.streams == "full disk":
        streams["stdout"] = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    elif use.streams == "terminal":
        outside, inside = os.openpty()
        termios.tcsetwinsize(inside, (40, 100)) if sys.version_info >= (3, 11) else None
        streams = {"stdin": inside, "stdout": inside, "stderr": inside}
    if use.way == "-":
        streams["stdin"] = (place.folder / "train.py").open("rb")
    elif use.streams == "input":
        (place.control / "in").write_text("a line\nanother, without an end")
        streams["stdin"] = (place.control / "in").open("rb")
    process = subprocess.Popen(
        words,
        cwd=place.cwd,
        env=environment,
        umask=0o077 if use.folder == "umask 077" else 0o022,
        start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) if inside >= 0 else None,
        **streams,
    )
    for stream in streams.values():
        if hasattr(stream, "close"):
            stream.close()
    shown = []
    reader = None
    if inside >= 0:
        os.close(inside)
        reader = threading.Thread(target=lambda: shown.extend(_all_of(outside)))
        reader.start()
    ends_it = threading.Thread(target=_interrupt, args=(place.control / "ready", process))
    if use.end == "Ctrl-C":
        ends_it.start()
    try:
        if use.end == "broken pipe":
            assert process.stdout is not None
            while (line := process.stdout.readline()) not in (
                b"0\n",
                b"",
            ):  # then come more than a pipe holds
                shown.append(line)
            process.stdout.close()
            process.stdout = None
            out, err = b"", process.communicate(timeout=hang_s(100))[1] or b""
        else:
            out, err = process.communicate(timeout=hang_s(100))
    finally:
        process.kill()
        if reader is not None:
            reader.join()
            os.close(outside)
    if use.end == "Ctrl-C":
        ends_it.join()
    if use.streams == "files":
        out, err = (path.read_bytes() for path in files)
    return process.returncode, b"".join(shown) or out or b"", err or b""


def _all_of(descriptor):
    """What a terminal shows, until its last program has closed it."""
    while True:
        try:
            part = os.read(descriptor, 1 << 16)
        except OSError:
            return
        if not part:
            return
        yield part


def _interrupt(ready, process):
    """Ctrl-C once the program sleeps: SIGINT to its process group."""
    number = int(until(lambda: (ready.exists() and ready.read_text()) or process.poll() is not None, 100))
    until(lambda: process.poll() is not None or state(number) == "S", 100)
    if process.poll() is None:
        os.killpg(os.getpgid(number), signal.SIGINT)


def lines(shown, together):
    found = [VARIES.sub("", line) for line in OURS.sub("", shown.decode(errors="replace")).splitlines()]
    return sorted(found) if together else found


@pytest.fixture
def see(flatout, tmp_path, monkeypatch):
    def seen(use, under_flatout):
        place = Place(use, tmp_path / "all")
        place.make()
        words = {**WAYS, **RARE}[use.way]
        if under_flatout:
            words = [sys.executable, "-m", "flatout", "run", *use.options.split(), *words]
        environment = flatout.environment(place.environment())
        code, out, err = run(use, place, words, environment)
        left = flatout.ended(environment["FLATOUT_TEST_RUN"])
        if ours := [name for name in place.temporary() if "flatout" in name]:
            assert len(ours) == 1
            assert use.way in NO_PYTHON or use.end in KILLED, ours
            monkeypatch.setattr(tempfile, "tempdir", str(place.tmp))
            sweep.cache_clear()
            sweep()  # as the next command does
        together = use.way in TOGETHER
        said = lines(err, together)
        if (
            together and use.end == "Ctrl-C"
        ):  # tracebacks of several processes, written in pieces: only what they have counts
            said = sorted("".join(said).replace("\n", ""))
        found = Seen(code, lines(out, together), said, place.files(), place.temporary(), left)
        place.remove()
        return found

    return seen


@pytest.mark.sampled(50)
@pytest.mark.parametrize("use", uses(), ids=str)
def test_it_is_as_without_flatout(see, use):
    assert (found := _differences(see(use, False), see(use, True))) == [], "\n".join(found)


def _differences(plain, under):
    found = []
    for name, one in vars(plain).items():
        other = vars(under)[name]
        if isinstance(one, list):
            both = difflib.unified_diff(one, other, "plain", "under flatout", lineterm="", n=0)
            found += [f"{name}: {line}" for line in both]
        elif one != other:
            found.append(f"{name}: {one} plain, {other} under flatout")
    return found
