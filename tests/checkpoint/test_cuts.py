"""A checkpoint that is interrupted anywhere: the newest is then the old or the new one, bit for bit, and the
next writer leaves no remains.
"""

import random
import shutil

import pytest
from cutting import AFTER, BEFORE, MIDDLE, Disk, copied, killed_at, points

from flatout.checkpoint.checkpoints import CheckpointFolder, verified
from flatout.checkpoint.values import pack

torch = pytest.importorskip("torch", reason="not run: there is no torch here")

pytestmark = pytest.mark.processes

STRIDE = 3  # every third point; bench/faults.py takes all of them


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "weights": {f"layer{at}": torch.rand(40, 50, generator=generator) for at in range(3)},
        "words": [step, "x", None],
    }


def save(folder, step, keep=2):
    with CheckpointFolder(folder, keep=keep) as saves:
        saves.write("test", step, {"": pack(torch, state(step)), "other": pack(torch, {"step": step})})


def is_one_of(folder, steps):
    """The newest checkpoint is that of one of these steps, bit for bit, and no checkpoint was skipped."""
    newest, bad = CheckpointFolder(folder).newest()
    assert bad == []
    assert newest is not None
    assert newest.step in steps
    found, expected = newest.read(torch), state(newest.step)
    assert found["words"] == expected["words"]
    assert all(torch.equal(found["weights"][name], tensor) for name, tensor in expected["weights"].items())
    assert newest.read(torch, "other") == {"step": newest.step}
    return newest.step


def the_next_writer_cleans_up(folder, step):
    save(folder, step)
    assert is_one_of(folder, [step]) == step
    assert all(each.name == "lock" or each.name.startswith("step-") for each in folder.iterdir())


def test_killed_at_any_call_that_changes_the_disk(tmp_path):
    """The third checkpoint also removes the first.

    At each of its calls the process gets SIGKILL before it, after it, or with half of the bytes written.
    """
    before = tmp_path / "before"
    save(before, 1)
    save(before, 2)
    everything = copied(before, tmp_path / "all")
    calls = points(lambda: save(everything, 3))
    assert {"open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir"} <= set(calls)
    cuts = [
        (at, when)
        for at, name in enumerate(calls)
        for when in (BEFORE, MIDDLE, AFTER)
        if when != MIDDLE or name == "write"
    ]
    found = set()
    for at, when in cuts[::STRIDE]:
        folder = copied(before, tmp_path / "cut")
        assert killed_at(at, when, lambda folder=folder: save(folder, 3)) == -9
        found.add(is_one_of(folder, (2, 3)))
        for each in CheckpointFolder(folder).paths():
            verified(each)  # an older one is there or not; a half-removed one would confuse the user
        the_next_writer_cleans_up(folder, 4)
    assert found == {2, 3}


def test_the_very_first_checkpoint_is_complete_or_absent(tmp_path):
    calls = points(lambda: save(tmp_path / "all", 1))
    for at in range(0, len(calls), 2 * STRIDE):
        folder = tmp_path / f"cut{at}" / "saves"
        folder.parent.mkdir()
        assert killed_at(at, BEFORE, lambda folder=folder: save(folder, 1)) == -9
        newest, bad = CheckpointFolder(folder).newest()
        assert bad == []
        assert newest is None or is_one_of(folder, [1])
        the_next_writer_cleans_up(folder, 2)


@pytest.mark.parametrize("how", ["nothing", "any", "everything"])
def test_a_loss_of_power_at_any_time(tmp_path, how):
    """Unflushed data is gone, torn or complete.

    A checkpoint that was reported as written exists whatever happens.
    """
    chance = random.Random(how)
    start, before, fresh = tmp_path / "start", tmp_path / "before", tmp_path / "fresh"
    save(start, 1)
    save(start, 2)
    copied(start, before)
    disk = Disk(start)
    disk.record(lambda: save(start, 3))
    renamed = next(
        at
        for at, (name, args, *_) in enumerate(disk.observed)
        if name == "rename" and str(args[1]).endswith("step-00000003")
    )
    flushed = next(at for at, (name, *_) in enumerate(disk.observed) if at > renamed and name == "fsync")
    for at in range(1, len(disk.observed) + 1, 1 if how == "any" else STRIDE):
        replayed = Disk(start, like=before)
        replayed.observed = disk.observed
        shutil.rmtree(fresh, ignore_errors=True)
        replayed.after(at).left(chance, how, fresh)
        newest = is_one_of(fresh, (2, 3))
        assert newest == 3 or at <= flushed
        assert newest == 2 or at > renamed
