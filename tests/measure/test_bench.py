"""The ceilings are really measured: small sizes, the real kernels, real processes."""

import json

import pytest

from flatout.diagnose.doctor import ceilings
from flatout.job.folder import json_lines
from flatout.measure import bench
from flatout.schema.errors import NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.machine_snapshot import MATMUL_DTYPES, Ceiling

torch = pytest.importorskip("torch")


@pytest.fixture
def small(monkeypatch):
    """Sizes that a test can afford; the measurement is the same."""
    monkeypatch.setattr(bench, "MIN_REPETITION_MS", 2.0)
    monkeypatch.setattr(bench, "MIN_PRODUCT_MS", 0.5)
    monkeypatch.setattr(bench, "MAX_MATRIX_ROWS", {"cpu": 512, "cuda": 512})
    monkeypatch.setattr(bench, "ARRAY_BYTES", {"cpu": 2**20, "cuda": 2**20})


def test_every_figure_of_the_host(small):
    before = torch.get_float32_matmul_precision()
    found = {each.name: each for each in bench.measure_device(torch, "cpu")}
    assert set(found) == {
        *(f"matmul_{dtype}_flops" for dtype in MATMUL_DTYPES),
        "memory_bytes_per_s",
    }
    absent = {name for name, each in found.items() if each.value is None}
    assert absent == {"matmul_tf32_flops"}
    assert all(found[name].note.startswith("not run: ") for name in absent)
    for name in set(found) - absent:
        each = found[name]
        assert 0 < each.low <= each.high, each
        assert each.value == pytest.approx(each.high) or each.value > each.low, each
        assert each.n >= 2
    assert torch.get_float32_matmul_precision() == before


def test_a_product_is_counted_as_two_operations_an_element(monkeypatch):
    """1,000 products of 256 x 256 in a second are 33.6 GFLOP/s: only the clock is replaced."""

    class Clock:
        now = 0.0

        def mark(self):
            return Clock.now

        def elapsed_ms(self, start, end):
            return end - start

        def synchronize(self):
            pass

    def mm(a, b, out):
        Clock.now += 1.0

    monkeypatch.setattr(bench, "clock_for", lambda *_: Clock())
    monkeypatch.setattr(bench, "MIN_PRODUCT_MS", 0.5)
    monkeypatch.setattr(torch, "mm", mm)
    found = bench.matmul(torch, "cpu", "float32")
    assert (found.value, found.n) == (pytest.approx(1000 * 2 * 256**3), 7)


@pytest.mark.processes
def test_without_torch_nothing_is_measured(monkeypatch, tmp_path):
    """The error names the cause and the next command."""
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ceilings.__file__.rpartition('/flatout/')[0]}")
    with pytest.raises(
        NothingMeasured, match=r"libcudart\.so\.13.*Run `flatout doctor` to see what is wrong"
    ):
        ceilings.measure(Facts(cores=1), lambda words: None)


def test_a_child_that_was_ended_keeps_its_figures(tmp_path):
    path = tmp_path / "figures.jsonl"
    whole = json.dumps({"ceiling": Ceiling("matmul_float32_flops", "cpu", 1.0).to_json()})
    path.write_text(f'{{"threads": 2}}\n{whole}\n{whole[:20]}', encoding="utf-8")
    assert len(json_lines(path)) == 2
    assert json_lines(tmp_path / "none") == []
