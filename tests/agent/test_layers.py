"""The layers that a program's models consist of."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout.agent.ledger import Ledger  # noqa: E402
from flatout.agent.listener import Listener  # noqa: E402
from flatout.agent.program_view import MOST_NAMES, layer_counts  # noqa: E402
from flatout.agent.training_context import TrainingContext  # noqa: E402


class Wide(nn.Linear):
    pass


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1), Wide(1, 1))


def test_subclasses_count_as_torchs_layer_own_modules_by_name_and_containers_not_at_all():
    assert layer_counts([CausalAttention()]) == {"Conv2d": 2, "CausalAttention": 1, "Linear": 1}


def test_a_module_that_two_roots_share_counts_once():
    shared = nn.Linear(1, 1)
    assert layer_counts([nn.Sequential(shared), nn.Sequential(shared, nn.GRU(1, 1))]) == {
        "GRU": 1,
        "Linear": 1,
    }


def test_the_list_is_bounded_and_keeps_the_most_frequent():
    kinds = [type(f"Own{at}", (nn.Module,), {}) for at in range(2 * MOST_NAMES)]
    found = layer_counts([nn.Sequential(nn.ReLU(), nn.ReLU(), *(kind() for kind in kinds))])
    assert len(found) == MOST_NAMES
    assert next(iter(found)) == "ReLU"


def test_a_description_of_the_program_names_its_layers():
    model = nn.LSTM(1, 1)
    context = TrainingContext(torch, Listener(), Ledger())
    context.introduce([model], [], [])
    assert context.describe()["layers"] == {"LSTM": 1}
