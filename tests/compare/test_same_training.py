"""Whether two programs learn the same: the verdict over records, and over real programs."""

import json
import math
import random

import pytest

from flatout.compare.evaluate import judge_training
from flatout.schema.enums import Effect
from flatout.schema.records import TrialRecord

STEPS = ("1", "2", "4", "8", "16")
ROUNDING = 1e-7


def runs(moved=0.0, at=STEPS, name="head.weight", losses=lambda t, x: x, hashes="batch", digest="", count=3):
    """Runs with some seeds. ``moved``: a share by which one tensor differs after the steps ``at``."""
    records = []
    for seed in range(count):
        draw = random.Random(seed)
        curve = [losses(t, 2 * 0.97**t + 0.1 * draw.gauss(0, 1)) for t in range(60)]
        sketches = {
            step: {
                tensor: [
                    draw.gauss(0, 1) * (1 + (moved if step in at and tensor == name else 0.0))
                    for _ in range(8)
                ]
                for tensor in ("body.weight", "head.weight", "head.bias")
            }
            for step in STEPS
        }
        digests = {step: f"{seed} {step} {digest}" for step in STEPS}
        records.append(
            TrialRecord(
                "finished",
                losses=[x.hex() for x in curve],
                loss_steps=list(range(60)),
                seed=seed,
                weights_digests=digests,
                weights_sketches=sketches,
                batch_hashes=[f"{hashes} {step}" for step in STEPS],
                context={"loaders": [{"dataset": "D"}]},
            )
        )
    return records


def rounded(t, x):
    return x * (1 + ROUNDING)


PERTURBED = runs(4 * ROUNDING, losses=rounded)[:2]


def verdict(b, a=None, repeats=None, perturbed=PERTURBED, effect=Effect.ROUNDING):
    a = a or runs()
    return judge_training(a, b, repeats if repeats is not None else a[:1], lambda: perturbed, effect)


def test_equal_bits_are_the_same_and_the_verdict_says_what_was_compared():
    found = verdict(runs())
    assert found.verdict == "same"
    assert found.why == (
        "bit for bit: 180 losses, and the weights after 5 steps, the last of them step 16 (3 seeds), and 15 batches"
    )


def test_what_rounding_explains_is_equivalent():
    found = verdict(runs(ROUNDING, losses=rounded, digest="other"))
    assert found.verdict == "equivalent"
    assert "each weight after 5 steps, the last of them step 16, and 15 batches" in found.why


@pytest.mark.parametrize("tensor", ["body.weight", "head.weight", "head.bias"])
@pytest.mark.parametrize("at", [("1",), ("8", "16"), ("16",)])
def test_a_tensor_that_rounding_does_not_explain_is_named_with_its_step(tensor, at):
    """Whatever the losses show: they are equal here."""
    found = verdict(runs(1e-3, at, tensor, losses=rounded, digest="other"))
    assert (found.verdict, found.first_step, found.first_tensor) == ("different", int(at[0]), tensor)
    assert f"after step {at[0]}, {tensor} differs" in found.why


def test_weights_that_are_no_numbers_are_different():
    found = verdict(runs(math.nan, ("16",), losses=rounded, digest="other"))
    assert (found.verdict, found.first_step) == ("different", 16)


@pytest.mark.parametrize(
    ("b", "says"),
    [
        (runs(ROUNDING, losses=rounded, hashes="other", digest="other"), "batch 0 differs"),
        (runs(ROUNDING, losses=lambda t, x: x + 0.5 * (t > 20), digest="other"), "the loss curves are"),
    ],
)
def test_other_batches_or_losses_are_different(b, says):
    found = verdict(b)
    assert found.verdict == "different"
    assert says in found.why


def test_renamed_parameters_are_matched_in_order_and_other_ones_are_different():
    renamed = runs(ROUNDING, losses=rounded, digest="other")
    for run in renamed:
        for step, sketches in run.weights_sketches.items():
            run.weights_sketches[step] = {f"net.{name}": sketch for name, sketch in sketches.items()}
    assert verdict(renamed).verdict == "equivalent"
    for run in renamed:
        for sketches in run.weights_sketches.values():
            sketches.popitem()
    found = verdict(renamed)
    assert found.verdict == "different"
    assert "the programs have 3 and 2 parameters" in found.why


def test_nothing_is_claimed_where_a_check_could_not_be_made():
    b = runs(ROUNDING, losses=rounded, digest="other")
    assert verdict(b, perturbed=[]).verdict == "cannot tell"
    for run in b:
        run.weights_sketches = {}
    assert verdict(b).verdict == "cannot tell"
    unrepeatable = runs(losses=rounded, count=1)
    found = verdict(b, repeats=unrepeatable)
    assert found.verdict == "cannot tell"
    assert "not repeatable" in found.why


PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30_000):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("old", "new", "code", "verdicts"),
    [
        pytest.param("lr=1e-3", "lr=1e-3, fused=True", 0, ("same", "equivalent"), marks=pytest.mark.full),
        ("lr=1e-3", "lr=1.001e-3", 1, ("different",)),
    ],
)
def test_real_programs(flatout, old, new, code, verdicts):
    (flatout.folder / "a.py").write_text(PROGRAM)
    (flatout.folder / "b.py").write_text(PROGRAM.replace(old, new))
    options = ["--same-training", "--pairs", "2", "--budget", "1s", "--json"]
    done = flatout("compare", *options, "python a.py", "python b.py")
    assert done.code == code, done.err
    training = json.loads(done.out)["training"]
    assert training["verdict"] in verdicts, training
    if code:
        assert training["first_step"] == 1
