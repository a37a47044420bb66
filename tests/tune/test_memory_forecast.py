"""`flatout memory` on real programs.

Predictions match real steps, the program stays unchanged, and unpredictable cases are explained.
"""

import json

import pytest

from flatout.render.memory_page import memory_page
from flatout.render.page import html
from flatout.schema.batch import MemoryForecast, MemoryPoint
from flatout.schema.facts import Gpu
from flatout.trial.memory_prediction import cublas_bytes
from flatout.tune.memory_forecast import add_overhead, advice

pytestmark = pytest.mark.processes

TRAINS = """
import hashlib, torch
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(120, 3, 16, 16), torch.randint(0, 10, (120,)))
loader = torch.utils.data.DataLoader(data, batch_size=24, shuffle=True, generator=torch.Generator())
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters())
def digest():
    parts = [*model.state_dict().values(), torch.get_rng_state()]
    return hashlib.sha1(b"".join(part.numpy().tobytes() for part in parts)).hexdigest(), len(optimizer.state), model[0].weight.grad is None
before = digest()
try:
    for epoch in range(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(f"{len(x)} {loss:.3f} {loss.item()}", flush=True)
        with torch.no_grad():
            model.eval()(data.tensors[0].repeat(8, 1, 1, 1))
            model.train()
finally:
    print("the same" if digest() == before else "changed", flush=True)
"""

PIECES = """
import torch
torch.manual_seed(0)
text = torch.randint(0, 50, (5000,))
model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50))
optimizer = torch.optim.Adam(model.parameters())
while True:
    starts = torch.randint(len(text) - 9, (2,))
    pieces = torch.stack([text[at : at + 9] for at in starts])
    loss = torch.nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    assert pieces.shape == (2, 9)
"""


def record_of(flatout):
    return MemoryForecast.from_json(json.loads((flatout.folder / "job" / "memory.json").read_text()))


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_real_program(flatout, script):
    """A small convolutional network, predicted at its own batch size and at four times it, then measured at
    both.

    At four times its size every second batch is a short one, and the evaluations between them take more
    memory than any step. The measurement excludes both.
    """
    script(TRAINS)
    done = flatout(
        "memory",
        "--job",
        "job",
        "--sizes",
        "96",
        "--memory-limit",
        "64MiB",
        "python",
        "train.py",
        timeout=220,
    )
    assert done.code == 0, done.err
    record = record_of(flatout)
    assert (record.status, record.own_size, record.limit_bytes) == ("done", 24, 2**26)
    points = {point.batch_size: point for point in record.points}
    for size in (24, 96):
        assert abs(points[size].error) < 0.02, (size, points[size])
        assert sum(points[size].kinds.values()) == points[size].peak_bytes
        assert f"A real step with {size} samples" in " ".join(done.out.split())
    own_size = points[24].kinds
    parameters = 4 * (32 * 27 + 32 + 64 + 2048 * 10 + 10)
    assert own_size["parameters"] == parameters
    assert own_size["held by the program"] >= 120 * (3 * 256 * 4 + 8)
    assert points[96].by_module["Sequential.0"] == 96 * 32 * 256 * 4  # what the normalisation keeps
    assert record.largest > 96
    assert record.largest_peak_bytes <= 2**26 < record.largest_peak_bytes * 1.05
    first, *measured = sorted(int(path.name) for path in (flatout.folder / "job" / "trials").iterdir())
    said = (flatout.folder / "job" / "trials" / str(first) / "stdout.log").read_text()
    assert "the same" in said
    assert "24 1.0" in said, "the output of a program whose loss is fake"
    assert len(measured) == 2
    page = (flatout.folder / "job" / "memory.html").read_text()
    assert "<script" not in page
    assert "predicted to fit into 64.0 MiB" in page
    assert done.left == []


@pytest.mark.timeout(120)
def test_without_a_loader_and_as_on_cuda(flatout, script):
    """Its own batch is predicted, another one is not.

    A simulated device rounds to 512 bytes and updates all tensors of an optimizer at once.
    """
    script(PIECES)
    done = flatout(
        "memory",
        "--job",
        "job",
        "--sizes",
        "16",
        "--allocator",
        "cuda",
        "--memory-limit",
        "50KB",
        "--json",
        "python",
        "train.py",
        timeout=100,
    )
    assert done.code == 0, done.err
    record = MemoryForecast.from_json(json.loads(done.out))
    own_size = record.own_point()
    assert own_size.batch_size is None
    assert own_size.kinds["parameters"] == -(-50 * 64 * 4 // 512) * 512 * 2 + 512
    assert own_size.by_module["Sequential.0"] == 2 * 8 * 64 * 4, "fake positions still cut whole pieces"
    assert own_size.kinds["temporary"] > 0.9 * own_size.kinds["parameters"], (
        "torch's optimizers take a list of them on CUDA"
    )
    assert "held by the program" not in own_size.kinds
    assert all(size % 512 == 0 for size in own_size.kinds.values())
    other = next(point for point in record.points if point.batch_size == 16)
    assert (other.peak_bytes, "without a DataLoader" in other.why_not) == (None, True)
    assert "no batch fits" in record.advice
    assert any("cuDNN" in note for note in record.notes)
    assert any("nothing was measured" in note for note in record.notes)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_program_that_wrote_its_batch_size_down(flatout, script):
    script(TRAINS.replace("loss = nn", "assert len(x) % 24 == 0, 'not in 11 rows'; loss = nn"))
    done = flatout(
        "memory", "--job", "job", "--no-measure", "--sizes", "48,12", "python", "train.py", timeout=100
    )
    assert done.code == 0, done.err
    points = {point.batch_size: point for point in record_of(flatout).points}
    assert points[24].peak_bytes
    assert points[48].peak_bytes, "48 rows can be read as 24"
    assert points[12].peak_bytes is None
    assert "11 rows" in points[12].why_not
    assert "12 samples: " in done.out
    assert "Measured" not in done.out


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("raise ValueError('no data here')", 1, "no data here"),
        ("import torch", 3, "ended without a training step"),
    ],
    ids=["fails", "never trains"],
)
def test_clear_messages(flatout, script, source, code, words):
    script(source)
    done = flatout("memory", "--job", "job", "python", "train.py")
    assert done.code == code
    assert words in done.err


def test_what_the_real_step_took_beyond_its_prediction_counts_for_other_sizes():
    """Figures of a ResNet-18 on an H100, in KiB; the step with 2,048 samples took 1,103,509."""
    own = MemoryPoint(128, 181_177 + 65_536, measured_bytes=267_834)
    larger, largest = (
        MemoryPoint(2048, 1_013_267 + 65_536, measured_bytes=1_103_509),
        MemoryPoint(185_922, 83_000_000),
    )
    record = MemoryForecast([], "", device="cuda", largest=185_922, notes=["more comes on top"])
    record.points = [own, larger, largest]
    add_overhead(record, own, (2048,))
    assert own.error == pytest.approx(-0.079, abs=1e-3)
    assert abs(larger.error) < 0.005
    assert record.largest == largest.batch_size < 185_922
    assert 82_999_000 < record.largest_peak_bytes <= 83_000_000


@pytest.mark.parametrize(
    ("config", "capability", "kib"),
    [(None, (9, 0), 32768), (None, (8, 0), 8320), (":4096:2:16:8", (9, 0), 8320), (":0:0", (9, 0), 0)],
)
def test_the_workspace_of_cublas(monkeypatch, config, capability, kib):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert cublas_bytes(Gpu("a GPU", 2**30, capability)) == kib * 1024


def test_what_would_help():
    point = MemoryPoint(64, 1000, kinds={"parameters": 300, "activations": 700})
    assert advice(point, 1000, 64) == ""
    assert "2 micro-batches of at most 32" in advice(point, 600, 32)
    assert "no batch fits" in advice(point, 200, 0)
    assert "Recomputing" in advice(point, 400, 0)


@pytest.mark.parametrize("limit", [None, 500, 10**9])
def test_a_page_of_any_prediction(limit):
    record = MemoryForecast(
        ["python", "<b>"], "/", limit_bytes=limit, limit_source="asked for", own_size=4, notes=["<i>"]
    )
    assert "<b>" not in html(memory_page(record))
    record.points = [
        MemoryPoint(4, 300, {"parameters": 100, "activations": 200}, {"a<b>": 200}, measured_bytes=310),
        MemoryPoint(8, why_not="it <fails>"),
    ]
    record.largest, record.largest_peak_bytes = 0, None
    page = html(memory_page(record))
    assert "it &lt;fails&gt;." in page
    assert "3.2% too low" in page
    assert ("predicted to fit into" in page) == (limit is not None)
    assert MemoryForecast.from_json(json.loads(json.dumps(record.to_json()))) == record
