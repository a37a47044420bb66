"""Files are written whole or not at all, even if interrupted; folders never share a number."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import hang_s

import flatout.job.folder as folder_module
from flatout.job.folder import JobFolder, read_json, write_atomically, write_json
from flatout.schema.errors import StorageError

WRITER = """
import sys
from pathlib import Path
from flatout.job.folder import write_json
path, at = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    at += 1
    write_json(path, {"at": at, "filling": [at] * 200_000})
"""


def test_nothing_else_is_left_in_the_folder(tmp_path):
    for text in ("one", "two"):
        write_atomically(tmp_path / "a.txt", text)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_killed_in_the_middle(tmp_path):
    """SIGKILL at twenty arbitrary moments: the file is always one of the whole ones."""
    path = tmp_path / "session.json"
    seen = set()
    for at in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(hang_s(0.02 * 1.25**at))  # the last ones are late enough on any machine
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        if path.exists():
            data = json.loads(path.read_text())
            assert data["filling"] == [data["at"]] * 200_000
            seen.add(data["at"])
    assert seen


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "session.json"
    write_json(path, {"at": 0, "filling": []})
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.DEVNULL)
    try:
        seen, until = set(), time.monotonic() + hang_s(30)
        while len(seen) < 4 and time.monotonic() < until:
            data = read_json(path)
            assert data is not None
            seen.add(data["at"])
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) >= 4


@pytest.mark.processes
def test_a_full_disk_keeps_the_old_file(tmp_path):
    """RLIMIT_FSIZE replaces the disk: a write beyond it fails in the middle of the file, as with ENOSPC."""
    path = tmp_path / "session.json"
    code = (
        "import sys, signal\nfrom pathlib import Path\nfrom flatout.job.folder import write_atomically\nfrom flatout.schema.errors import StorageError\n"
        "path = Path(sys.argv[1])\nwrite_atomically(path, 'old')\n"
        "try:\n    write_atomically(path, 'x' * 100_000)\nexcept StorageError as error:\n    sys.exit(str(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "Free some space" in done.stderr
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["session.json"]


@pytest.mark.parametrize(
    "where", ["a file in place of the folder", "a kernel folder", "a folder in place of the file"]
)
def test_where_nothing_can_be_written(tmp_path, where):
    """Root may write despite permissions, so these are places where nobody can."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    path = {
        "a file in place of the folder": tmp_path / "file" / "session.json",
        "a kernel folder": Path("/proc/flatout/session.json"),
        "a folder in place of the file": tmp_path / "folder",
    }[where]
    with pytest.raises(StorageError, match="cannot write"):
        write_atomically(path, "text")
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1} trailing', b"NaN,"]
)
def test_invalid_json_reads_as_nothing(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path / "missing.json") is None


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=("Cs",))),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner)
        ),
        max_leaves=10,
    )
)
def test_json_and_back(tmp_path, data):
    write_json(tmp_path / "a.json", data)
    assert read_json(tmp_path / "a.json") == data


def test_a_job_is_private(tmp_path):
    job = JobFolder(tmp_path / "job").make()
    assert job.path.stat().st_mode & 0o777 == 0o700
    for path in (job.session, job.plan, job.report, job.trials):
        assert path.parent == job.path


def test_a_job_that_cannot_be_created_names_the_place_and_the_next_command(tmp_path):
    (tmp_path / "job").write_text("")
    with pytest.raises(StorageError, match=r"job.*Make the folder around it writable"):
        JobFolder(tmp_path / "job").make()


def test_trials_are_counted(tmp_path):
    job = JobFolder(tmp_path).make()
    (job.trials / "7").mkdir()
    (job.trials / "notes").mkdir()
    assert [job.new_trial().path.name for _ in range(3)] == ["8", "9", "10"]


@pytest.mark.processes
def test_trials_never_share_a_number(tmp_path):
    """Threads and processes that start at the same time."""
    job = JobFolder(tmp_path).make()
    code = (
        "import sys\nfrom pathlib import Path\nfrom flatout.job.folder import JobFolder\n"
        "for _ in range(50): print(JobFolder(Path(sys.argv[1])).new_trial().path.name)"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    mine = []
    threads = [
        threading.Thread(target=lambda: mine.extend(job.new_trial().path.name for _ in range(50)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = mine + [name for other in others for name in other.communicate()[0].split()]
    assert len(got) == 300
    assert len(set(got)) == 300
    assert set(got) == {p.name for p in job.trials.iterdir()}


def test_written_files_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    """The rename follows the flush: a power cut leaves the old file or the new one."""
    order = []
    really_sync, really_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("flush"), really_sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), really_replace(a, b))[1])
    write_atomically(tmp_path / "a", "text")
    assert order == ["flush", "rename"]


@pytest.mark.processes
def test_what_killed_processes_left_in_trials_is_removed(tmp_path):
    """The folder of a process that lives stays."""
    job = JobFolder(tmp_path / "job").make()
    trial = job.new_trial()
    folder_module._sweep.cache_clear()
    trial.files.mkdir()
    leaves = f"import pathlib, flatout.job.folder as f; f.TrialFolder(pathlib.Path({str(trial.path)!r})).files.mkdir()"
    subprocess.run([sys.executable, "-c", leaves], check=True)
    assert len(list(trial.path.iterdir())) == 2
    job.new_trial()
    assert list(trial.path.iterdir()) == [trial.files]
