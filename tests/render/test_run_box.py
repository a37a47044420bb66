"""The lines of the box that say what torch.compile did."""

import pytest

from flatout.render.run_box import box
from flatout.schema.run_request import CompileRecord, RunSummary

COLD = "compiling took 38 s"
WARM = "compiled code came from the cache: 4.1 s instead of 38 s"


@pytest.mark.parametrize(
    ("compiled", "lines"),
    [
        (None, []),
        (CompileRecord(ms=38_000, uncached=2), [COLD]),
        (CompileRecord(ms=4_100, saved_ms=33_900, cached=2), [WARM]),
        (
            CompileRecord(ms=4_100, saved_ms=33_900, cached=2, uncached=1),
            ["2 of 3 compiled passes came from the cache: 4.1 s instead of 38 s"],
        ),
        (
            CompileRecord(ms=38_000, breaks=1, recompiles=2, reasons=["Tensor.item() (model.py:7)", "size"]),
            [COLD, "1 graph break, 2 recompilations, first: Tensor.item() (model.py:7)"],
        ),
    ],
)
def test_compiled_code(compiled, lines):
    record = RunSummary([], "", plan={"choices": [{}]}, compiled=compiled)
    shown = [line.strip("| ") for line in box(record, "rank0.json").splitlines()]
    assert shown[4:-1] == [*lines, "record: rank0.json"]
