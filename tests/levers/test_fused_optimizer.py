"""The form of an optimizer's update, on fake parameters of a CUDA device: their numbers are never
computed.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from flatout.agent.ledger import Ledger  # noqa: E402
from flatout.levers.fused_optimizer import LEVER  # noqa: E402


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_step_counters_go_back_to_the_host_when_the_lever_is_taken_off(kind, monkeypatch):
    """The plain loop reads the counter of each parameter.

    On the device each of these reads would be a wait in every later step.
    """
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 1.0)  # a fake tensor has no number
    with FakeTensorMode():
        try:
            parameters = [torch.nn.Parameter(torch.empty(4, 4, device="cuda")) for _ in range(3)]
        except (RuntimeError, AssertionError) as error:
            pytest.skip(f"this build of torch cannot fake a CUDA device: {error}")
        optimizer = kind(parameters)

        def devices():
            return {state["step"].device.type for state in optimizer.state.values()}

        for p in parameters[:2]:
            p.grad = torch.empty_like(p)
        optimizer.step()
        assert devices() == {"cpu"}
        ledger = Ledger()
        undo = LEVER.apply(SimpleNamespace(torch=torch, optimizers=[optimizer]), "fused", ledger)
        assert devices() == {"cuda"}
        assert all(group["fused"] for group in optimizer.param_groups)
        undo()
        assert devices() == {"cpu"}
        assert not any(group["fused"] for group in optimizer.param_groups)
        optimizer.step()
        assert devices() == {"cpu"}
