"""Failing disks: full, limited, read-only, gone.

Training continues, reports it at once, keeps its good checkpoints, and saves again when possible.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import limits
import pytest
from cutting import in_a_child
from limits import hang_s

from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.saver import CheckpointWriter, WriterClocks
from flatout.checkpoint.values import pack
from flatout.schema.errors import StorageError

torch = pytest.importorskip("torch", reason="not run: there is no torch here")

pytestmark = pytest.mark.processes
CLOCKS = WriterClocks(lambda: 0.0, lambda: 0.0)


def training(folder, trouble, fixed, steps=8):
    """A training of ``steps`` steps that saves each, with ``trouble()`` after the third and ``fixed()``
    after the sixth. Returns the messages and the step of each.
    """
    said, weights = [], torch.zeros(100_000)
    with CheckpointFolder(folder, keep=2) as saves:
        saver = CheckpointWriter(
            torch, saves, "test", CLOCKS, lambda sentence: said.append((step, sentence)), every=1
        )
        for step in range(1, steps + 1):
            weights += 1
            saver.save(step, pack(torch, {"w": weights}), {})
            saver.wait()
            if step == 3:
                trouble()
            if step == 5:
                good = (
                    [each.read(torch)["w"][0].item() for each in [saves.newest()[0]]]
                    if os.path.isdir(folder)
                    else ["gone"]
                )
            if step == 6:
                fixed()
    newest, bad = CheckpointFolder(folder).newest()
    return {
        "said": said,
        "good": good,
        "newest": newest.step,
        "bad": len(bad),
        "left": sorted(os.listdir(folder)),
        "done": weights[0].item(),
    }


def observed(record, words):
    assert record["done"] == 8.0
    assert record["newest"] == 8
    assert record["bad"] == 0
    first, again = record["said"]
    assert first[0] == 4  # at once
    assert words in first[1]
    assert first[1].endswith("The training continues.")
    assert tuple(again) == (7, "step 7 is saved; the 3 attempts before it failed.")
    assert all(name == "lock" or name.startswith("step-") for name in record["left"])


def in_a_child_that_tells(act):
    reading, writing = os.pipe()

    def child():
        os.write(writing, json.dumps(act()).encode())

    assert in_a_child(child) == 0
    return json.loads(os.read(reading, 1 << 16))


def test_a_file_that_may_not_grow(tmp_path):
    """RLIMIT_FSIZE: a quota, as a process meets it."""

    def limited(size):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def act():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return training(tmp_path / "saves", limited(300_000), limited(resource.RLIM_INFINITY))

    record = in_a_child_that_tells(act)
    observed(
        record,
        f"cannot write checkpoints in {tmp_path / 'saves'}: File too large. Free some space there, or name a writable folder.",
    )
    assert record["good"] == [3.0]


FULL = """
import json, os, subprocess, sys
sys.path[:0] = {path!r}
from test_disks import training
disk = {disk!r}
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=True)
def fill():
    with open(disk + "/other", "wb") as file:
        try:
            file.write(bytes(1 << 30))
        except OSError:
            pass
print(json.dumps([training(__import__("pathlib").Path(disk, "saves"), fill, lambda: os.unlink(disk + "/other")),
                  training(__import__("pathlib").Path(disk, "more"), lambda: subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "x", disk], check=True),
                           lambda: subprocess.run(["umount", disk], check=True))]))
"""


def test_a_full_disk_and_a_disk_that_becomes_read_only(tmp_path):
    """Real file systems of a few MiB in their own namespace: root may write to read-only files, but nobody
    can write without space.
    """
    (tmp_path / "disk").mkdir()
    program = FULL.format(
        path=[os.path.dirname(__file__), os.path.dirname(limits.__file__)], disk=str(tmp_path / "disk")
    )
    try:
        subprocess.run(
            ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", tmp_path / "disk"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not run: this machine does not allow a private file system (unshare -Urm)")
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=hang_s(120),
    )
    assert done.returncode == 0, done.stderr
    full, read_only = json.loads(done.stdout)
    observed(full, "No space left on device")
    assert full["good"] == [3.0]
    observed(read_only, "Read-only file system")
    assert read_only["good"] == ["gone"]  # the good ones lie below the mount and were back at the end


def test_a_folder_that_vanishes_and_one_that_comes_back(tmp_path):
    folder, aside = tmp_path / "run" / "saves", tmp_path / "aside"
    # The whole folder is removed for good: it is created again at once.
    record = training(folder, lambda: shutil.rmtree(folder), lambda: None)
    assert (record["said"], record["newest"], record["left"]) == (
        [],
        8,
        ["lock", "step-00000007", "step-00000008"],
    )
    shutil.rmtree(folder.parent)

    # A mount disappears and returns with its contents; in the meantime nothing can be created there.
    def away():
        folder.parent.rename(aside)
        folder.parent.write_text("a file where the folder was")

    def back():
        folder.parent.unlink()
        aside.rename(folder.parent)

    observed(training(folder, away, back), "cannot write checkpoints in")


def test_another_process_that_took_the_folder_is_not_disturbed(tmp_path):
    """The folder vanishes and another training starts in one of the same name: the first one continues
    without checkpoints.
    """
    folder, said = tmp_path / "saves", []
    with CheckpointFolder(folder) as saves:
        saver = CheckpointWriter(torch, saves, "test", CLOCKS, said.append, every=1)
        shutil.rmtree(folder)
        done = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with CheckpointFolder(folder) as others:
                    others.write("test", 50, {"": pack(torch, {"w": 1})})
                    os.write(done[1], b"x")
                    signal.pause()
            finally:
                os._exit(1)
        os.close(done[1])
        assert os.read(done[0], 1)
        try:
            saver.save(1, pack(torch, {"w": 0}), {})
            saver.wait()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert len(said) == 1
        assert "another process writes checkpoints in" in said[0]
        assert [each.name for each in saves.paths()] == ["step-00000050"]
        saver.save(51, pack(torch, {"w": 0}), {})  # it has ended
        saver.wait()
        assert saves.newest()[0].step == 51


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EIO])
def test_file_systems_that_do_not_flush_folders(tmp_path, monkeypatch, number):
    """As some network and FUSE file systems: their files are flushed all the same.

    A disk error is an error.
    """
    import stat

    really = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        really(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with (
            pytest.raises(StorageError, match="Input/output error"),
            CheckpointFolder(tmp_path / "saves") as saves,
        ):
            saves.write("test", 1, {"": pack(torch, 1)})
    else:
        with CheckpointFolder(tmp_path / "saves") as saves:
            saves.write("test", 1, {"": pack(torch, 1)})
        assert CheckpointFolder(tmp_path / "saves").newest()[0].read(torch) == 1
