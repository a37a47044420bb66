"""`flatout profile` on real programs. One faulty program is profiled once, and many tests read its record."""

import json
from pathlib import Path

import pytest

from flatout.schema.profile import ProfileRecord

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]

# It fails if a recording begins in the step in which another has ended.
GUARD = """\
import torch
start, stop, step, stopped = torch.profiler.profile.start, torch.profiler.profile.stop, 0, [-1]

def starting(self):
    assert step not in stopped, "one recording begins in the step in which another has ended"
    return start(self)

def stopping(self):
    stopped.append(step)
    return stop(self)

torch.profiler.profile.start, torch.profiler.profile.stop = starting, stopping
"""

# A slow data set, a value read each step, a list that keeps graphs, a cache that is emptied, an optimizer of
# many small steps.
ILL = (
    GUARD
    + """\
import gc, os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.0004)
        return torch.full((32,), float(index)), index % 4


def make_loader():
    return DataLoader(Slow(), batch_size=8, shuffle=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.head = nn.Linear(256, 4)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    global step
    torch.manual_seed(0)
    gc.freeze()
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    kept, correct = [], 0
    for epoch in range(100000):
        loader = make_loader()
        for x, y in loader:
            step += 1
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(out)
            correct += (out.argmax(1) == y).sum().item()
            torch.cuda.empty_cache()


main()
"""
)

WELL = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10**9):
    loss = model(torch.ones(4, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def line_of(words, source=ILL):
    return next(number for number, line in enumerate(source.splitlines(), 1) if words in line)


def profiled(cli, source, *options):
    (cli.folder / "train.py").write_text(source)
    done = cli("profile", "--job", "job", *options, "python", "train.py", timeout=200)
    assert done.code == 0, done.err
    return ProfileRecord.from_json(json.loads((cli.folder / "job" / "profile.json").read_text())), done


@pytest.fixture(scope="module")
def ill(flatout_in, tmp_path_factory):
    """The record of the faulty program, its report, and its folder."""
    cli = flatout_in(tmp_path_factory.mktemp("ill"))
    record, done = profiled(cli, ILL, "--steps", "24", "--budget", "20s", "--trace", "trace.json")
    return record, done, cli.folder


def test_quiet_steps_and_phases(ill):
    record, _, _ = ill
    assert record.status == "done"
    assert record.steps == 24 == len(record.step_ms_list)
    assert record.phases["data"].share > 0.3
    assert record.samples_per_s == pytest.approx(8 / record.step_ms * 1000, rel=0.2)


def test_what_ifs_are_measured_or_say_why_not(ill):
    record, _, _ = ill
    what_ifs = {what_if.name: what_if for what_if in record.what_ifs}
    assert list(what_ifs) == [
        "loader",
        "copies",
        "optimizer",
        "syncs",
        "logging",
        "gc",
        "one thread fewer",
        "one thread more",
    ]
    assert what_ifs["loader"].ratio.significant
    assert what_ifs["loader"].ratio.median > 1.3
    assert what_ifs["loader"].step_ms < record.step_ms
    assert what_ifs["optimizer"].ratio is not None
    assert what_ifs["copies"].ratio is None
    assert "CPU" in what_ifs["copies"].why_not
    assert all(w.why_not or w.ratio for w in record.what_ifs)
    assert record.bound == "data"
    assert "as fast" in record.bound_why


def test_synchronisations_have_their_line_and_exclude_the_loader(ill):
    record, _, _ = ill
    found = {(c.kind, c.place.line): c for c in record.synchronisations if c.place is not None}
    assert found["item", line_of(".item()")].calls == pytest.approx(1.0, abs=0.2)
    assert found["item", line_of(".item()")].place.function == "main"
    assert {kind for kind, _ in found} == {"item"}


def test_operators_have_time_flops_and_lines(ill):
    record, _, folder = ill
    found = {o.name: o for o in record.operations}
    product = found["aten::addmm"]
    assert product.calls == 3
    assert product.flops == 2 * 8 * (32 * 256 + 256 * 256 + 256 * 4)
    assert product.place.file == str(folder / "train.py")
    assert product.place.line == line_of("return self.head(self.body(x))")
    backward = found["aten::mm"]
    assert backward.flops == 2 * 8 * (
        32 * 256 + 2 * 256 * 256 + 2 * 256 * 4
    )  # the gradient of the input is not needed
    assert backward.place.line == line_of("return self.head(self.body(x))")
    assert record.operators_a_step > 20
    assert 0 < record.operator_us < 1000
    assert record.python_ms > 0
    assert 0 < record.overhead.low <= record.overhead.median <= record.overhead.high
    assert any("doctor --bench" in note for note in record.notes) or record.ceilings
    trace = json.loads((folder / "trace.json").read_text())
    assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])


def test_the_loader_is_recreated_and_its_slow_line_is_found(ill):
    record, _, _ = ill
    (loader,) = record.loaders
    assert loader.place.line == line_of("return DataLoader(")
    assert loader.created > 3
    assert loader.iterators > 3
    assert loader.wait_ms > 1.0
    assert loader.fetch_ms > 3.0
    assert loader.slow_place.line == line_of("time.sleep(")
    assert loader.slow_share > 0.5


def test_memory_of_a_step_by_kind_and_module(ill):
    record, _, _ = ill
    memory, weights = record.memory, 4 * (32 * 256 + 256 + 256 * 256 + 256 + 256 * 4 + 4)
    assert memory.where == "host"
    assert memory.at_peak["parameters"] == weights
    assert memory.at_peak["optimizer state"] >= 2 * weights
    assert memory.at_peak["inputs"] >= 4 * 8 * 32
    assert memory.peak_bytes >= 4 * weights
    assert memory.by_module["body.1"] == memory.by_module["body.3"] == 4 * 8 * 256  # what tanh keeps
    assert max(m.kinds.get("activations", 0) for m in memory.timeline) >= 2 * 4 * 8 * 256
    assert max(m.kinds.get("gradients", 0) for m in memory.timeline) == weights
    assert memory.empty_cache_calls == pytest.approx(1.0, abs=0.2)
    assert memory.empty_cache_place.line == line_of("empty_cache()")
    assert memory.peak_place.file.endswith("train.py")


def test_the_leak_its_owner_and_the_line(ill):
    record, _, _ = ill
    leak = record.tensor_growth
    assert leak.leaking
    assert leak.p_value < 0.001
    assert leak.holder == "list `kept` of main()"
    assert leak.place.line == line_of("kept.append(out)")
    assert leak.graph
    assert leak.bytes_a_step == pytest.approx(
        4 * 8 * 4, rel=0.2
    )  # the outputs; the tensors saved by their graphs were freed by the backward pass
    assert leak.tensors_a_step == pytest.approx(1.0, abs=0.1)


def test_settings_and_call_counters(ill):
    record, _, _ = ill
    (optimizer,) = record.settings["optimizers"]
    assert (optimizer["kind"], optimizer["foreach"], optimizer["tensors"]) == ("Adam", False, 6)
    assert record.settings["modules"]["Linear"] == 3
    assert record.events["zero_grad"]["calls"] == pytest.approx(1.0, abs=0.2)
    assert record.compile_record is None
    assert record.idle_ms is None


def test_the_printed_report(ill):
    _, done, _ = ill
    assert "it waits for data" in done.out
    assert "train.py:" in done.out
    assert "what-if: batches prepared in advance" in done.out
    assert "memory grows" in done.out.lower() or "tensors grow" in done.out
    assert done.left == []


@pytest.mark.full
def test_a_program_without_a_loader_that_holds_nothing(flatout):
    record, done = profiled(flatout, WELL, "--steps", "20", "--budget", "10s", "--json")
    assert json.loads(done.out) == record.to_json()
    assert not record.tensor_growth.leaking
    assert record.tensor_growth.holder == ""
    assert record.loaders == []
    assert record.synchronisations == []
    why = {what_if.name: what_if.why_not for what_if in record.what_ifs}
    assert "without a DataLoader" in why["loader"]
    assert "never waits for a tensor" in why["syncs"]


def test_no_recording_begins_in_the_step_in_which_another_ends(ill):
    """The operator that is open at that time, the optimizer's step, would write its end into freed memory."""
    record, _, _ = ill
    assert record.operations
    assert record.memory is not None
    assert record.tensor_growth is not None
    assert not [note for note in record.notes if "recording begins" in note]


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("raise ValueError('no data here')", 1, "no data here"),
        ("import torch\nprint('never trains')", 3, "without a training step"),
        ("print('no torch')", 3, "nothing to profile"),
    ],
    ids=["fails", "never trains", "no torch"],
)
def test_clear_messages(flatout, script, source, code, words):
    script(source)
    done = flatout("profile", "--job", "job", "python", "train.py")
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err or words == "no data here"


def test_the_page_of_a_job_is_private(ill):
    _, _, folder = ill
    assert Path(folder / "job").stat().st_mode & 0o077 == 0
