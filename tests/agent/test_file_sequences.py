"""A law: a program in a file sandbox sees what it would see without one, and the user's files stay as they are.

Each example is a folder and a sequence of calls on a few names, so that they meet. It is carried out plainly in one
copy of the folder and in a sandbox over another: every result and every error must be the same.
"""

import os
import pickle
import shutil
import stat
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.agent.file_sandbox import FileSandbox
from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay

EXAMPLES = 2000 if os.environ.get("FLATOUT_FULL") else 60
NAMES = st.sampled_from(["a", "b", "c", "runs"])
INSIDE = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PATHS = st.one_of(INSIDE, INSIDE.map("./".__add__), INSIDE.map("../work/".__add__), st.just("."))
MODES = st.sampled_from(["r", "w", "a", "x", "r+", "w+"])
FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDONLY | os.O_DIRECTORY,
        os.O_RDONLY | os.O_NOFOLLOW,
        os.O_WRONLY | os.O_CREAT,
        os.O_WRONLY | os.O_TRUNC,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
    ]
)


def opened(path, mode):
    with open(path, mode) as file:
        if mode != "r":
            file.write("abc")
        return file.name, mode in ("r", "w+", "r+") and (file.seek(0), file.read())


def opened_low(path, flags):
    handle = os.open(path, flags, 0o640)
    try:
        return os.fstat(handle).st_mode
    finally:
        os.close(handle)


def in_open_folder(path, name, call):
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    calls = {
        "stat": lambda: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode,
        "unlink": lambda: os.unlink(name, dir_fd=folder),
        "mkdir": lambda: os.mkdir(name, dir_fd=folder),
        "rmdir": lambda: os.rmdir(name, dir_fd=folder),
        "rename": lambda: os.rename(name, "a", src_dir_fd=folder, dst_dir_fd=folder),
        "listdir": lambda: sorted(os.listdir(folder)),
        "utime": lambda: os.utime(folder, (5, 5)),
    }
    try:
        return calls[call]()
    finally:
        os.close(folder)


def scanned(path):
    with os.scandir(path) as entries:
        found = {entry.name: entry for entry in entries}
    kinds = {}
    for name, entry in found.items():
        try:
            kinds[name] = entry.path, entry.is_symlink(), entry.is_dir(), entry.is_file()
        except OSError as error:
            kinds[name] = entry.path, error.errno
    return sorted(kinds.items())


def changed_mode(path):
    with open(path) as file:
        os.fchmod(file.fileno(), 0o640)
    return os.stat(path).st_mode


def dated(path, seconds):
    os.utime(path, (seconds, seconds))
    return os.stat(path).st_mtime


def gone_to(path):
    here = os.getcwd()
    os.chdir(path)
    if "/work" not in os.getcwd():
        os.chdir(here)
    return os.getcwd()


def about(path):
    found = os.stat(path)
    return found.st_mode, stat.S_ISREG(found.st_mode) and found.st_size


def exists(path):
    return [
        ask(path) for ask in (os.path.exists, os.path.lexists, os.path.isdir, os.path.isfile, os.path.islink)
    ] + [os.access(path, os.W_OK)]


def within(path, target):
    """Into itself, through a link: shutil copies until the disk is full."""
    return f"{os.path.realpath(target)}/".startswith(f"{os.path.realpath(path)}/")


def copied_tree(path, target):
    if not within(path, target):
        shutil.copytree(path, target, symlinks=True)


def moved(path, target):
    if not within(path, target):
        shutil.move(path, target)


def walked(_=None):
    """Everything below the current folder, as the program sees it."""
    found = []
    for folder, folders, files in os.walk("."):
        for path in (os.path.join(folder, name) for name in folders + files):
            mode = os.lstat(path).st_mode
            link = os.readlink(path) if stat.S_ISLNK(mode) else None
            found.append((path, mode, link, Path(path).read_bytes() if stat.S_ISREG(mode) else None))
    return sorted(found)


TWO_PATHS = [os.rename, os.replace, os.link, shutil.copyfile, shutil.copy, shutil.copy2, copied_tree, moved]
CALLS = st.one_of(
    st.tuples(st.just(opened), PATHS, MODES),
    st.tuples(st.just(opened_low), PATHS, FLAGS),
    st.tuples(
        st.just(in_open_folder),
        PATHS,
        NAMES,
        st.sampled_from(["stat", "unlink", "mkdir", "rmdir", "rename", "listdir", "utime"]),
    ),
    st.tuples(st.sampled_from([scanned, changed_mode, about, exists, gone_to, walked]), PATHS),
    st.tuples(st.sampled_from([os.mkdir, os.makedirs, os.rmdir, os.unlink, os.readlink]), PATHS),
    st.tuples(st.sampled_from([shutil.rmtree, os.path.realpath, lambda path: Path(path).touch()]), PATHS),
    st.tuples(st.sampled_from(TWO_PATHS), PATHS, PATHS),
    st.tuples(st.just(os.symlink), st.one_of(NAMES, PATHS, NAMES.map("../".__add__)), PATHS),
    st.tuples(st.just(os.chmod), PATHS, st.sampled_from([0o600, 0o644, 0o755])),
    st.tuples(st.just(dated), PATHS, st.integers(0, 10**9)),
    st.tuples(st.just(os.truncate), PATHS, st.integers(0, 5)),
)
BEFORE = st.lists(st.tuples(INSIDE, st.sampled_from(["file", "folder", "a", "../a", "runs/b"])), max_size=8)


def prepare(work, before):
    work.mkdir(parents=True)
    for path, kind in before:
        place = work / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if kind == "folder":
                place.mkdir(exist_ok=True)
            elif kind == "file":
                place.write_text(f"old {path}")
            else:
                place.symlink_to(kind)
        except OSError:
            pass  # a file is in the way


def carry_out(work, calls, run=lambda call: call()):
    """Return the result or the error of each call, and what the program sees at its end."""
    os.chdir(work)
    results = []
    for function, *arguments in calls:
        # os is asked again each time: a sandbox replaces its functions
        call = getattr(os, function.__name__, function) if function.__module__ == "posix" else function
        try:
            results.append(run(partial(call, *arguments)))
        except OSError as error:
            # Python leaves the name out of the errors of utime
            named = function not in (dated, in_open_folder) and error.filename
            results.append((type(error).__name__, error.errno, str(named)))
        except (shutil.Error, RecursionError) as error:
            results.append(type(error).__name__)
    os.chdir(work)
    return [*results, walked()]


def untouched(root):
    found = {}
    for folder, folders, files in os.walk(root):
        for path in (os.path.join(folder, name) for name in ["", *folders, *files]):
            about = os.lstat(path)
            found[path] = about.st_mode, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_nlink
    return found


def sandboxed(work, folder, calls, run=lambda call: call()):
    ledger = Ledger()
    os.chdir(work)
    sandbox = FileSandbox(Overlay(str(folder)), ledger)
    sandbox.install()
    try:
        return carry_out(work, calls, run)
    finally:
        os.chdir("/")
        ledger.restore()


@pytest.fixture
def anew(tmp_path, monkeypatch):
    """Start each example with empty folders: a plain one, and one for sandboxes. Temporary files lie elsewhere."""
    monkeypatch.chdir("/")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))

    def start(before):
        shutil.rmtree(tmp_path, ignore_errors=True)
        prepare(tmp_path / "plain" / "work", before)
        prepare(tmp_path / "user" / "work", before)
        return tmp_path / "plain" / "work", tmp_path / "user" / "work"

    return start


def seen_from(work, results):
    return str(results).replace(str(work.parent), "")


LAW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@LAW
@given(before=BEFORE, calls=st.lists(CALLS, min_size=1, max_size=25))
def test_a_program_sees_what_it_would_see_alone(anew, before, calls):
    plain, user = anew(before)
    there = untouched(user)
    alone = carry_out(plain, calls)
    os.chdir("/")
    apart = sandboxed(user, user.parent.parent / "trial", calls)
    assert untouched(user) == there
    assert seen_from(user, apart) == seen_from(plain, alone)


@LAW
@given(before=BEFORE, one=st.lists(CALLS, max_size=15), two=st.lists(CALLS, max_size=15))
def test_two_trials_do_not_see_each_other(anew, before, one, two):
    plain, user = anew(before)
    there = untouched(user)
    sandboxed(user, user.parent.parent / "one", one)
    second = sandboxed(user, user.parent.parent / "two", two)
    assert untouched(user) == there
    assert seen_from(user, second) == seen_from(plain, carry_out(plain, two))


@pytest.mark.processes
@settings(LAW, max_examples=EXAMPLES // 10)
@given(before=BEFORE, calls=st.lists(CALLS, min_size=1, max_size=15), turns=st.integers(0, 2**15))
def test_all_processes_of_a_trial_see_one_view(anew, before, calls, turns):
    """Some calls run in a process that is forked for them."""
    plain, user = anew(before)
    here = iter(range(len(calls)))
    calls = [call for call in calls if call[0] is not gone_to]  # which acts on one process only

    def in_some_process(call):
        return call() if turns >> next(here) & 1 else forked(call)

    alone = carry_out(plain, calls)
    apart = sandboxed(user, user.parent.parent / "trial", calls, in_some_process)
    assert seen_from(user, apart) == seen_from(plain, alone)


def forked(call):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = call()
        except BaseException as error:
            answer = error
        with os.fdopen(write, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answer = pickle.load(file)
    os.waitpid(child, 0)
    if isinstance(answer, BaseException):
        raise answer
    return answer
