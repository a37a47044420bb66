"""`flatout explain` without an exception: a NaN in a log."""

import pytest
from click.testing import CliRunner

from flatout.cli.main import flatout
from flatout.schema.errors import UsageError


def explain(path, text):
    path.write_text(text, encoding="utf-8")
    return CliRunner().invoke(flatout, ["explain", str(path)], standalone_mode=False)


@pytest.mark.parametrize(
    ("before", "said", "fix"),
    [
        ([2.0, 1.9, 4.0, 30.0, 900.0], "grown from 1.9 to 900: the training diverged", "flatout lr"),
        ([2.0, 1.9, 1.8, 1.7], "at once, after 1.7", "set_detect_anomaly"),
    ],
)
@pytest.mark.parametrize(
    "line", ["step {} loss {}", "epoch 1 it {} train_loss={} lr=0.1", "{{'step': {}, 'loss': {}}}"]
)
def test_the_first_nan_is_found_far_from_the_end(tmp_path, before, said, fix, line):
    values = [*[2.0] * 3000, *before, *[float("nan")] * 9000]
    text = "best_val_loss: inf\n" + "\n".join(line.format(at, value) for at, value in enumerate(values))
    done = explain(tmp_path / "train.log", text)
    assert done.return_value == 0
    assert said in done.output
    assert fix in done.output
    assert line.format(3000 + len(before), "nan") in done.output


def test_a_known_failure_comes_before_the_nan(tmp_path):
    text = 'loss: nan\nTraceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n'
    done = explain(tmp_path / "train.log", text)
    assert "FE040" in done.output
    assert "FE110" not in done.output


@pytest.mark.parametrize(
    "text", ["step 1 loss 0.5\nstep 2 loss 0.4", "best_loss inf\nloss 1.0", "loss_scale: inf"]
)
def test_a_healthy_log_shows_nothing(tmp_path, text):
    assert explain(tmp_path / "train.log", text).return_value == 1


def test_a_record_is_no_log(tmp_path):
    done = explain(tmp_path / "profile.json", "{}")
    assert isinstance(done.exception, UsageError)
    assert "profile.json is a record, not a log" in str(done.exception)
