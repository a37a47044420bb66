"""What torch.compile did: how often a graph broke or was compiled again, why, and at which line."""

import os

import pytest

from flatout.agent.compilers import compile_record

torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    def forward(self, x):
        if x.sum().item() > 0:  # breaks
            return x * 2
        return x


def test_breaks_and_recompilations_have_a_reason_and_a_line():
    from torch._dynamo import utils

    torch._dynamo.reset()
    utils.counters.clear()
    utils._compilation_metrics.clear()
    compiled = torch.compile(Model(), backend="eager", dynamic=False)
    for size in (2, 3):
        compiled(torch.ones(size))
    record = compile_record()
    torch._dynamo.reset()
    first = Model.forward.__code__.co_firstlineno
    assert (record.breaks, record.recompiles) == (2, 2)
    assert record.ms > 0
    name = os.path.basename(__file__)
    assert any(reason.endswith(f"({name}:{first + 1})") and "item" in reason for reason in record.reasons)
    assert any(
        reason.startswith("recompiled: ") and reason.endswith(f"expected 2, actual 3 ({name}:{first})")
        for reason in record.reasons
    )
    assert {place.line for place in record.places} >= {first, first + 1}
