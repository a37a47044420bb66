"""The folder of checkpoints: which are valid, skipped, removed or kept, who may write, and who may read."""

import os
import random
import shutil
import signal
import socket
import time

import pytest
from corrupting import KINDS

from flatout.checkpoint.checkpoints import CheckpointFolder, CorruptCheckpoint, verified
from flatout.checkpoint.manifest import Manifest
from flatout.checkpoint.values import pack
from flatout.schema.errors import CheckpointError, StorageError

torch = pytest.importorskip("torch", reason="not run: there is no torch here")


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.rand(64, 32, generator=generator),
        "b": torch.rand(7, generator=generator).double(),
        "step": step,
        "random": [step] * 100,
    }


def write(folder, *steps, keep=5):
    with CheckpointFolder(folder, keep=keep) as saves:
        return [saves.write("test", step, {"": pack(torch, state(step))}, {"by": "a test"}) for step in steps]


def steps_in(folder):
    return sorted(int(each.name[5:13]) for each in folder.iterdir() if each.name.startswith("step-"))


# -- accidents


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_accident_is_detected_and_the_previous_checkpoint_used(tmp_path, kind):
    whole = tmp_path / "whole"
    write(whole, 10, 20, 30)
    chance = random.Random(kind.__name__)
    for _ in range(25):
        folder = tmp_path / "hurt"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        what = kind(chance, folder / "step-00000030", folder / "step-00000020")
        newest, bad = CheckpointFolder(folder).newest()
        assert newest is not None, what
        assert newest.step == 20, what
        assert torch.equal(newest.read(torch)["w"], state(20)["w"])
        assert len(bad) == 1, what
        assert bad[0].why, what
        assert not bad[0].why.endswith("."), what


def test_without_a_valid_checkpoint_training_does_not_start_from_scratch(tmp_path):
    folder = tmp_path / "saves"
    write(folder, 10, 20)
    for path in folder.glob("step-*/tensors.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(str(each) for each in folder.rglob("*"))
    with pytest.raises(
        CheckpointError,
        match=r"all 2 checkpoints in .* are corrupt; in the newest, step-00000020, tensors\.safetensors has .* bytes instead",
    ):
        CheckpointFolder(folder).newest()
    assert sorted(str(each) for each in folder.rglob("*")) == before
    assert CheckpointFolder(tmp_path / "never").newest() == (None, [])


def test_a_file_that_changes_after_verification_is_not_read(tmp_path):
    (save,) = write(tmp_path / "saves", 1)
    for name in ("tensors.safetensors", "state.json"):
        path = save.path / name
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=name):
            save.read(torch)
        data[-20] ^= 1
        path.write_bytes(data)
    assert save.read(torch)["step"] == 1


# -- which checkpoints are kept


def test_a_new_checkpoint_is_never_the_removed_one(tmp_path):
    """Invalid checkpoints with higher numbers do not count as kept: training resumed from an older one, and
    its new checkpoints stay.
    """
    folder = tmp_path / "saves"
    write(folder, 10, 90, 100)
    for bad in (90, 100):
        (folder / f"step-{bad:08d}" / "manifest.json").write_text("{}")
    write(folder, 20, keep=1)
    assert steps_in(folder) == [20, 90, 100]
    newest, bad = CheckpointFolder(folder).newest()
    assert newest.step == 20
    assert [each.path.name for each in bad] == ["step-00000100", "step-00000090"]
    write(folder, 20, 20, keep=2)
    assert CheckpointFolder(folder).newest()[0].path.name == "step-00000020-3"
    with CheckpointFolder(folder) as saves:
        assert saves.set_aside(bad[0]).parent.name == "damaged"
    assert steps_in(folder) == [20, 20, 90]


def test_the_last_good_checkpoint_stays_if_a_new_one_reads_back_wrong(tmp_path, monkeypatch):
    """The disk returns different bytes: the new checkpoint is set aside, and the only good one is
    not pruned.
    """
    folder = tmp_path / "saves"
    write(folder, 10, keep=1)
    really = os.write
    with CheckpointFolder(folder, keep=1) as saves:
        monkeypatch.setattr(
            os, "write", lambda handle, data: really(handle, bytes(data).replace(b"\x3f", b"\x3e"))
        )
        with pytest.raises(CheckpointError, match="was not stored as it was written"):
            saves.write("test", 20, {"": pack(torch, state(20))})
        monkeypatch.undo()
    assert steps_in(folder) == [10]
    assert [each.name for each in (folder / "damaged").iterdir()] == ["step-00000020.0"]


def test_order_is_by_step_and_no_clock_matters(tmp_path):
    folder = tmp_path / "saves"
    for save, when in zip(write(folder, 999_999_999, 100_000_000, 20), (0, 2**31, 2**32), strict=True):
        for path in (*save.path.iterdir(), save.path):
            os.utime(path, (when, when))
    assert CheckpointFolder(folder).newest()[0].step == 999_999_999
    with CheckpointFolder(folder) as saves, pytest.raises(CheckpointError, match="cannot be named"):
        saves.write("test", 10**15, {"": pack(torch, 1)})


# -- who writes


@pytest.mark.processes
def test_one_writer_at_a_time_and_a_killed_one_is_followed(tmp_path):
    folder = tmp_path / "saves"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with CheckpointFolder(folder):
                os.write(writing, b"x")
                time.sleep(60)
        finally:
            os._exit(1)
    os.read(reading, 1)
    try:
        with pytest.raises(
            StorageError,
            match=f"another process writes checkpoints in .*process {child} on '{socket.gethostname()}'",
        ):
            write(folder, 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    left = (
        folder / ".writing-7-1"
    )  # as a writer would leave it, with one more dot before its name each time its removal was interrupted
    left.mkdir()
    (left / "state.json").write_text("{")
    (folder / f".removing-writing-6-{os.getpid()}").mkdir()
    (folder / ".removing-link").symlink_to("/etc")
    write(folder, 1)
    assert sorted(each.name for each in folder.iterdir()) == ["lock", "step-00000001"]
    assert os.path.exists("/etc/passwd")
    with (
        CheckpointFolder(folder),
        pytest.raises(StorageError, match="this process already writes checkpoints"),
    ):
        CheckpointFolder(folder).open()
    # A child of a writer does not hold the lock: loader workers sometimes outlive it.
    with CheckpointFolder(folder) as saves:
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        saves.write("test", 2, {"": pack(torch, state(2))})
    try:
        write(folder, 3)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert steps_in(folder) == [1, 2, 3]


def test_only_the_owner_can_read_or_change_a_checkpoint(tmp_path):
    for number, umask in enumerate((0o000, 0o777)):
        before = os.umask(umask)
        try:
            folder = tmp_path / f"saves{number}"
            with CheckpointFolder(folder) as saves:
                saves.write("test", 1, {"": pack(torch, state(1))})
                (folder / "step-00000001" / "state.json").write_text("")
                saves.set_aside(CorruptCheckpoint(folder / "step-00000001", "empty"))
        finally:
            os.umask(before)
        modes = {path.name: path.lstat().st_mode & 0o7777 for path in (folder, *folder.rglob("*"))}
        assert {mode for name, mode in modes.items() if name.endswith((".json", ".safetensors", "lock"))} == {
            0o600
        }, modes
        assert {mode for name, mode in modes.items() if name.startswith(("step", "saves", "damaged"))} == {
            0o700
        }, modes


# -- special files


@pytest.mark.parametrize(
    "make",
    [
        lambda path, aside: path.symlink_to(aside),
        lambda path, aside: os.mkfifo(path),
        lambda path, aside: path.symlink_to("/dev/zero"),
        lambda path, aside: path.mkdir(),
        lambda path, aside: path.symlink_to(path),
    ],
    ids=["link", "pipe", "device", "folder", "round link"],
)
@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_links_pipes_and_devices_are_not_read(tmp_path, make, name):
    """The reader neither waits for them nor follows them, even where a link leads to valid data."""
    folder = tmp_path / "saves"
    write(folder, 1, 2)
    path, aside = folder / "step-00000002" / name, tmp_path / "aside"
    path.rename(aside)
    make(path, aside)
    newest, (bad,) = CheckpointFolder(folder).newest()
    assert newest.step == 1
    assert bad.why.startswith(name)


def test_a_folder_that_is_a_link_is_not_valid(tmp_path):
    write(tmp_path / "elsewhere", 5)
    folder = tmp_path / "saves"
    write(folder, 1)
    (folder / "step-00000005").symlink_to(tmp_path / "elsewhere" / "step-00000005")
    newest, (bad,) = CheckpointFolder(folder).newest()
    assert newest.step == 1
    assert "cannot be read" in bad.why


def test_a_manifest_that_names_enormous_files_costs_nothing(tmp_path):
    """A file of another length is not read; here it would be a terabyte of zeros."""
    folder = tmp_path / "saves"
    write(folder, 1)
    (two,) = write(folder, 2)
    with open(two.path / "tensors.safetensors", "r+b") as file:
        file.truncate(1 << 40)
    assert CheckpointFolder(folder).newest()[0].step == 1
    (two.path / "state.json").unlink()
    path = two.path / "manifest.json"
    path.write_text(Manifest("test", 2, {}, {}, {}).to_text())
    save = verified(two.path)
    with pytest.raises(CheckpointError, match=r"has no state\.json"):
        save.read(torch)
