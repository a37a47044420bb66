"""A training resumed from its checkpoints ends with the bits of an uninterrupted one.

Every part of a checkpoint is needed for that, and messages report it.
"""

import hashlib
import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from limits import hang_s
from processes import run_python

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import flatout  # noqa: E402
from flatout.checkpoint.values import pack  # noqa: E402
from flatout.loop import saving  # noqa: E402
from flatout.schema.errors import CheckpointError, LoopError, StorageError  # noqa: E402

LIVES = Path(__file__).with_name("lives.py")
PRECISIONS = ("float32", "fp16")


class Data(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        x = torch.randn(6) * 0.1 + index / 20 + random.random() + np.random.rand()
        return x, x.sum()


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]).squeeze(1).float(), batch[1])


def made(folder, learning_rate=0.01, data=None, batch=2, model=None, **more):
    flatout.seed(0)
    model = model or nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    )
    model[0].register_buffer("noise", torch.zeros(2), persistent=False)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    loader = DataLoader(data or Data(), batch, shuffle=True)
    arguments = {
        "epochs": 3,
        "scheduler": scheduler,
        "effective_batch": 4,
        "allow_inexact": True,
        "save_every": 1,
        "extra_state": {"average": average},
        **more,
    }
    return flatout.Loop(model, optimizer, loss_fn, loader, checkpoint_dir=folder, **arguments), average


def train(folder, until=None, **more):
    """The Loop, and a digest of everything it has learned and of its random states.

    ``until``: as if killed inside the step after.
    """
    loop, average = made(folder, **more)
    for step in loop:
        if step.index == until:
            break
        average.update_parameters(loop.model)
        loop.model[0].noise.add_(torch.rand(2))
        if step.index == 2:
            loop.model[1].eval()
    digest = hashlib.sha256()
    for tensor in [
        *loop.model.parameters(),
        *loop.model.buffers(),
        *average.parameters(),
        *average.buffers(),
    ]:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for state in loop.optimizer.state_dict()["state"].values():
        digest.update(repr([value.tolist() for value in state.values()]).encode())
    digest.update(
        repr(
            [
                loop.scheduler.get_last_lr(),
                loop.precision.state()["scaler"],
                torch.get_rng_state().tolist(),
                random.getstate(),
            ]
        ).encode()
    )
    digest.update(repr(np.random.get_state()[1].tolist()).encode())
    return loop, digest.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return {
        precision: train(tmp_path_factory.mktemp("whole") / "saves", precision=precision)[1]
        for precision in PRECISIONS
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_interrupted_repeatedly_it_ends_with_the_same_bits(tmp_path, undisturbed, precision):
    """The interruptions are in the middle of epochs, at their ends, and after the training has ended, which
    does nothing more.
    """
    for until in (1, 5, 6, 10, 13):
        loop, _ = train(tmp_path, until, precision=precision)
    assert loop.resumed.exact
    last, digest = train(tmp_path, precision=precision)
    assert digest == undisturbed[precision]
    assert last.resumed.step == 13
    again, digest = train(tmp_path, precision=precision)
    assert digest == undisturbed[precision], "a training that had ended"
    assert (again.resumed.step, again.index) == (15, 15)


def losses_of(folder, until=None, **more):
    """Losses of a training on a list, whose levers and sizes may be found during the training."""
    flatout.seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    batches = [(x, x.sum(1)) for x in torch.randn(150, 8, 6, generator=torch.Generator().manual_seed(1))]
    loop = flatout.Loop(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss_fn,
        batches,
        epochs=2,
        checkpoint_dir=folder,
        **more,
    )
    losses = {}
    for step in loop:
        losses[step.index] = float(step.loss)
        if step.index == until:
            break
    return loop, losses


def test_found_sizes_are_not_tried_again(tmp_path):
    loop, _ = losses_of(tmp_path / "found", 60, micro_batch="auto", save_every=1)
    assert loop.sized is not None
    again, _ = losses_of(tmp_path / "found", 70, micro_batch="auto", save_every=1)
    assert (again.sizing, again.sized) == (False, loop.sized)
    assert again.resumed.exact, again.resumed.sentences()
    losses_of(tmp_path / "trying", 1, micro_batch="auto", save_every=1)
    again, _ = losses_of(tmp_path / "trying", 4, micro_batch="auto", save_every=1)
    assert "it was saved while sizing micro-batches" in again.resumed.inexact


def test_more_epochs_than_it_was_made_for(tmp_path):
    assert train(tmp_path / "a", epochs=2)[0].index == 10
    longer, digest = train(tmp_path / "a")
    assert longer.index == 15
    assert train(tmp_path / "b")[1] == digest


PARTS = [
    ("model", "0.weight"),
    ("model", "1.running_mean"),
    ("buffers", "model"),
    ("modes", "model"),
    ("optimizer", "state"),
    ("optimizer", "param_groups"),
    ("scheduler",),
    ("extra_state", "average"),
    ("loader_position", "consumed"),
    ("loader_position", "epoch_start"),
    ("loader_position", "now"),
    ("loop", "index"),
    ("loop", "epoch"),
    ("precision", "scaler"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A training with one saved step, and one with eight."""
    folders = {steps: tmp_path_factory.mktemp("begun") / f"{steps}" for steps in (1, 8)}
    for steps, folder in folders.items():
        train(folder, steps, precision="fp16", save_every=steps)
    return folders


@pytest.mark.parametrize("part", PARTS, ids=".".join)
def test_no_part_of_a_checkpoint_can_be_left_out(tmp_path, monkeypatch, begun, undisturbed, part):
    """One part comes from the first step, as if it had not been stored; then the bits differ."""
    import shutil

    shutil.copytree(begun[8], tmp_path / "saves")
    donor = flatout.checkpoint.checkpoints.CheckpointFolder(begun[1]).newest()[0].read(torch)
    really = saving.read_states

    def spoiled(*args):
        state, own = really(*args)
        at, given = state, donor
        for name in part[:-1]:
            at, given = at[name], given[name]
        at[part[-1]] = given[part[-1]]
        return state, own

    monkeypatch.setattr(saving, "read_states", spoiled)
    loop, digest = train(tmp_path / "saves", precision="fp16")
    assert loop.resumed.step == 8
    assert (digest, loop.index) != (undisturbed["fp16"], 15)


def test_another_number_of_ranks_is_rejected(tmp_path):
    with flatout.checkpoint.checkpoints.CheckpointFolder(tmp_path) as saves:
        saves.write("loop", 3, {"": pack(torch, {})}, {"ranks": 2})
    with pytest.raises(
        CheckpointError, match=r"is of 2 ranks, and 1 would resume .* Start 2 again, or use from_scratch"
    ):
        train(tmp_path)


def test_differences_are_reported_and_nothing_is_claimed(tmp_path, caplog):
    train(tmp_path, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(
            LoopError,
            match=r"cannot be resumed exactly: threads: 1 when it was saved, 2 now.*from_scratch=True",
        ):
            made(tmp_path, on_drift="stop", clip=1.0)
        with caplog.at_level(logging.INFO, "flatout"):
            loop, _ = made(tmp_path, batch=4, effective_batch=None, clip=1.0)
    finally:
        torch.set_num_threads(threads)
    assert not loop.resumed.exact
    for words in (
        "not bitwise identical",
        "clip: unknown when it was saved, 1.0 now",
        "batch size of the loader: 2 when it was saved, 4 now",
        "batches in an epoch: 10 when it was saved, 5 now",
    ):
        assert words in caplog.text
    loop.close()


def test_invalid_checkpoints(tmp_path, caplog):
    """The newest is set aside.

    Where none is left, nothing starts from scratch unless requested, and then all of them stay.
    """
    loop, _ = train(tmp_path, 5)
    newest = max(tmp_path.glob("step-*"))
    content = bytearray((newest / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "tensors.safetensors").write_bytes(content)
    loop, _ = made(tmp_path)
    assert loop.resumed.step == 4
    assert [path.parent.name for path in loop.resumed.damaged] == ["damaged"]
    assert "its digest differs" in caplog.text
    with pytest.raises(StorageError, match=r"already writes checkpoints in "):
        made(tmp_path)
    loop.close()
    for path in tmp_path.glob("step-*"):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoints in .* are corrupt"):
        made(tmp_path)
    loop, _ = made(tmp_path, from_scratch=True)
    assert loop.resumed is None
    assert list((tmp_path / "before-1").glob("step-*"))
    loop.close()


def test_an_invalid_model_does_not_overwrite_a_good_one(tmp_path, caplog):
    loop, _ = made(tmp_path, on_nan="ignore", steps=4)
    for step in loop:
        if step.index == 1:
            with torch.no_grad():
                loop.model[0].weight[0, 0] = float("nan")
    assert "model.0.weight is not finite. Earlier checkpoints stay." in caplog.text
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_unsupported_state_is_named(tmp_path):
    class Odd:
        def state_dict(self):
            return {"name": object(), "count": 3}

        def load_state_dict(self, state):
            pass

    assert train(tmp_path, 2, extra_state={"odd": Odd()})[0].resumed is None
    loop, _ = made(tmp_path, extra_state={"odd": Odd()})
    assert not loop.resumed.exact
    assert "extra_state.odd.name (object) was not stored" in loop.resumed.inexact
    loop.close()


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (
            {"model": nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1))},
            CheckpointError,
            "does not fit the model of this training",
        ),
        ({"scheduler": None}, CheckpointError, "saved with a scheduler and has none now"),
        ({"extra_state": None}, CheckpointError, "has none of that name now"),
        ({"extra_state": {"average": 3}}, LoopError, "needs state_dict and load_state_dict"),
        ({"on_drift": "ignore"}, LoopError, 'Use "warn" or "stop"'),
        ({"save_every": 0}, LoopError, "a whole number from 1"),
    ],
)
def test_a_mismatched_checkpoint_is_rejected(begun, tmp_path, more, error, words):
    import shutil

    shutil.copytree(begun[8], tmp_path / "saves")
    with pytest.raises(error, match=words):
        made(tmp_path / "saves", **{"precision": "fp16", **more})
    made(tmp_path / "saves", precision="fp16")[0].close()  # a rejected loop does not hold the folder


def test_saving_without_a_folder_is_an_error():
    with pytest.raises(LoopError, match="need a folder"):
        made(None)


def test_a_trial_resumes_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text(json.dumps({"entry": "flatout.trial.worker:attach"}))
    monkeypatch.setenv("FLATOUT_JOB", str(tmp_path / "job.json"))
    train(tmp_path / "saves", 2)
    assert not (tmp_path / "saves").exists()


@pytest.fixture(scope="module")
def lives(chosen):
    return json.loads(run_python(LIVES, *chosen("number"), limit_s=250))


@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize("number", range(3), ids=["loader workers", "a save every 4 steps", "two ranks"])
def test_killed_at_random_moments_it_ends_with_the_same_bits(lives, number):
    """Real processes are killed, at moments chosen by a seed, until the training is done.

    With a checkpoint in each step only the current step is lost.
    """
    found = lives["killed"][str(number)]
    assert found["wrong"] == ""
    assert found["kills"] >= 1
    assert all(lost <= (1 if found["every"] == 1 else 2 * found["every"]) for lost in found["lost"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "codes", "handled"),
    [
        ("SIGTERM", [143], False),
        ("own handler", [143], True),
        ("SIGUSR1", [138], False),
        ("SIGINT", [99], False),
        ("two ranks", [143, 143], False),
    ],
)
def test_a_signal_ends_it_after_the_step_and_a_checkpoint(lives, name, codes, handled):
    """99 is the program's own answer to KeyboardInterrupt. Only one of two ranks gets the signal."""
    found = lives[name]
    assert found["codes"] == codes
    assert found["saved"] == found["done"] >= 7
    assert found["handled"] is handled


@pytest.mark.processes
def test_the_second_signal_ends_it_at_once(lives):
    """The signal arrives in the middle of a long step."""
    assert lives["insisted"]["code"] == -15
    assert lives["insisted"]["seconds"] < hang_s(10)


def test_the_program_of_the_page_does_what_the_page_says(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent.parent / "docs" / "explanation" / "exactness.md").read_text(
        encoding="utf-8"
    )
    program = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(program, "page", "exec"), {"__name__": "page"})
    first, _, second = capsys.readouterr().out.partition("\n")
    assert first == "96 steps"
    assert "resuming after step 96, in epoch" in second
    assert ": bitwise exact\n96 steps" in second
