"""`flatout scale`: from a profile without starting a process, and from a real program."""

import json

import pytest
from click.testing import CliRunner
from profiles import healthy

from flatout.cli.scale import OVERHEAD, command
from flatout.measure.links import Fabric
from flatout.measure.scaling import Workload, equal_tensors, predict
from flatout.schema.scale import NETWORKS, ScaleRecord, Timing

PROGRAM = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,))), 32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def profile(tmp_path):
    """A step of 10.3 ms with 64 MB of gradients in three tensors, on a GPU."""
    path = tmp_path / "profile.json"
    record = healthy(device="cuda", step_ms=10.0, samples_per_s=3200.0)
    record.settings["gradient_bytes"] = [24_000_000, 40_000, 40_000_000]
    path.write_text(json.dumps(record.to_json()))
    return path


def test_from_a_profile(flatout, profile):
    links = ["--network", "ib-hdr", "--inside", "nvlink3"]
    done = flatout.here("scale", "--gpus", "1..64", *links, "--from", str(profile))
    assert done.code == 0, done.err
    assert {path.name for path in profile.parent.iterdir() if path.is_file()} == {
        "profile.json",
        "scale.json",
        "scale.html",
    }
    assert not list(profile.parent.glob("trials/*"))  # nothing was run
    record = ScaleRecord.from_json(json.loads((profile.parent / "scale.json").read_text()))
    assert (record.status, record.scaling, record.overhead) == ("done", "weak", OVERHEAD)
    assert record.timing == Timing(
        pytest.approx(3.5), pytest.approx(5.5), pytest.approx(0.5), pytest.approx(0.5), pytest.approx(32.0)
    )
    assert record.line("ddp")[0].step_ms == pytest.approx(10.0)
    work = Workload(
        record.timing, tuple(map(float, record.tensor_bytes)), 64_040_000.0, overhead=OVERHEAD, local_steps=16
    )
    fabric = Fabric(NETWORKS["ib-hdr"], NETWORKS["nvlink3"], 8)
    assert record.points == [
        predict(work, fabric, way, 2**power)
        for way in ("ddp", "fsdp", "hybrid", "local")
        for power in range(7)
    ]
    for words in (
        "Predicted, not measured",
        "32.0 samples",
        "devices cost 6.2%",
        "local SGD averages parameters every 16 steps",
        "FSDP on 64 devices: ",
    ):
        assert words in " ".join(done.out.split())


def ask(profile, *words):
    done = CliRunner().invoke(
        command, [*words, "--json", "--from", str(profile), "--job", str(profile.parent / "job")]
    )
    return ScaleRecord.from_json(json.loads(done.stdout)) if done.exception is None else done.exception


def test_another_device_strong_scaling_and_given_figures(profile):
    given = ["--gpus", "4", "--network", "bandwidth=1GB/s", "--strategies", "ddp"]
    plain = ask(profile, *given)
    faster = ask(profile, *given, "--compute-scale", "50")
    assert faster.points[0].compute_ms == pytest.approx(9.5 / 50 + 0.5)  # the host's half millisecond stays
    assert faster.points[0].efficiency < plain.points[0].efficiency < 0.5
    assert any("50 times faster than measured on cuda" in note for note in faster.notes)
    assert not any("neighbours" in note for note in plain.notes)
    one_each = ask(profile, "--gpus", "4", "--network", "ib-ndr")
    assert [point.strategy for point in one_each.points] == ["ddp", "fsdp", "local"]
    assert any("hybrid is left out" in note for note in one_each.notes)

    two = ["--gpus", "2", "--network", "bandwidth=1000GB/s", "--strategies", "ddp", "--scaling", "strong"]
    strong = ask(profile, *two)
    assert strong.points[0].compute_ms == pytest.approx(
        0.55 * 9.5 + 0.5
    )  # the optimizer as with the whole batch
    assert any("10% of a step's compute" in note for note in strong.notes)


def test_an_older_profile_has_only_the_sum(profile):
    record = json.loads(profile.read_text())
    del record["settings"]["gradient_bytes"]
    record["settings"]["dtypes"] = {"float32": 64_000_000}
    profile.write_text(json.dumps(record))
    found = ask(profile, "--gpus", "8", "--network", "nvlink4", "--strategies", "ddp")
    assert any("only their sum" in note for note in found.notes)
    work = Workload(found.timing, equal_tensors(64e6), 64e6, overhead=OVERHEAD)
    assert found.points == [predict(work, Fabric(NETWORKS["nvlink4"]), "ddp", 8)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--network", "nonesuch"], "ib-ndr"),
        (["--network", "nvlink4", "--inside", "nvlink4"], "joins the devices of one machine"),
        (["--network", "ib-ndr", "--strategies", "tensor"], "ddp, fsdp, hybrid, local"),
        (["--network", "ib-ndr", "--gpus", "8..2"], "--gpus"),
    ],
)
def test_invalid_arguments(profile, words, said):
    assert said in str(ask(profile, *words))


@pytest.mark.parametrize("change", [{"unit": "backward"}, {"step_ms": None}, {"settings": {}}])
def test_a_profile_without_the_needed_figures(profile, change):
    record = json.loads(profile.read_text())
    profile.write_text(json.dumps({**record, **change}))
    assert type(ask(profile, "--network", "ib-ndr")).__name__ in ("NothingMeasured", "UsageError")


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_real_program(flatout):
    (flatout.folder / "train.py").write_text(PROGRAM)
    options = ["--network", "ethernet-25g", "--scaling", "strong", "--strategies", "ddp", "--job", "job"]
    done = flatout("scale", "--gpus", "1,2,64", *options, "--json", "python", "train.py")
    assert done.code == 0, done.err
    assert done.left == []
    record = ScaleRecord.from_json(json.loads(done.out))
    assert record.tensor_bytes == [40, 4 * 256 * 10, 4 * 256, 4 * 64 * 256]  # the last layer's bias first
    assert (record.timing.samples, record.overhead) == (32, 0.0)
    assert record.timing.forward_ms > 0
    assert record.timing.backward_ms > 0
    alone, two, many = record.points
    assert alone.step_ms == pytest.approx(record.timing.step_ms)
    assert (two.samples, two.wire_bytes) == (16, pytest.approx(sum(record.tensor_bytes)))
    assert "not enough" in many.why_not
    assert (flatout.folder / "job" / "scale.html").is_file()
