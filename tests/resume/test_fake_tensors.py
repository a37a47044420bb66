"""The rule for fake tensors: the result of a function has the shape, strides, type and device of the real
result.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="not run: there is no torch here")
F = torch.nn.functional

from flatout.checkpoint.resume.fake_operators import FakeOperators  # noqa: E402
from flatout.checkpoint.resume.gradient_sources import ReplayTensor, spec_of  # noqa: E402


class Refused(Exception):
    pass


def refuse(why):
    raise Refused(why)


UNARY = {
    "relu": F.relu,
    "sum": torch.Tensor.sum,
    "sum_of_rows": lambda x: x.sum(-1),
    "mean_kept": lambda x: x.mean(0, keepdim=True),
    "transposed": lambda x: x.transpose(0, 1),
    "flat": lambda x: x.flatten(),
    "viewed": lambda x: x.reshape(-1, 2),
    "argmax": lambda x: x.argmax(1),
    "max": lambda x: x.max(1),
    "max_values": lambda x: x.max(1)[0],
    "softmax": lambda x: F.softmax(x, -1),
    "half": lambda x: x.half(),
    "double": lambda x: x.to(torch.float64),
    "int": lambda x: x.long(),
    "greater": lambda x: x > 0,
    "sliced": lambda x: x[1:, :2],
    "picked": lambda x: x[0],
    "stepped": lambda x: x[::2],
    "new_axis": lambda x: x[:, None],
    "ellipsis": lambda x: x[..., -1],
    "stacked": lambda x: torch.stack([x, x]),
    "catted": lambda x: torch.cat([x, x], 1),
    "chunks": lambda x: x.chunk(2, 1),
    "split": lambda x: torch.split(x, 1),
    "rows": list,
    "dropout": F.dropout,
    "norm": lambda x: x.norm(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "matmul": lambda x: x @ x.t(),
    "expanded": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "clamped": lambda x: x.clamp(min=0),
    "topk": lambda x: x.topk(2, dim=1),
    "sorted": lambda x: x.sort(),
    "like": torch.zeros_like,
    "random_like": torch.randn_like,
    "new": lambda x: x.new_zeros(2, 3),
    "T": lambda x: x.T,
    "cumsum": lambda x: x.cumsum(0),
    "in_place": lambda x: x.clone().add_(1).mul_(2),
    "filled": lambda x: x.clone().masked_fill_(x > 0, 0),
    "set_item": lambda x: _set(x.clone()),
    "squeezed_in_place": lambda x: x.sum(0, keepdim=True).squeeze_(0),
    "tensor_of": lambda x: torch.tensor([x.sum(), x.mean()]),
    "where": lambda x: torch.where(x > 0, x, -x),
    "pair": lambda x: x + torch.ones(x.shape[1]),
    "scalar": lambda x: 2 * x - 1,
    "power": lambda x: x**2,
    "iadd": lambda x: _iadd(x),
    "out": lambda x: torch.add(x, x, out=x.clone()),
}


def _set(x):
    x[0] = x[1]
    return x


def _iadd(x):
    total = torch.zeros(())
    total += x.sum()
    return total


def specs(value):
    return [
        spec_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in torch.utils._pytree.tree_leaves(value)
    ]


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(UNARY)), rows=st.integers(2, 5), half=st.integers(1, 3), turned=st.booleans()
)
def test_a_function_of_fake_tensors_gives_fake_results(name, rows, half, turned):
    real = torch.randn(2 * half, rows).t() if turned else torch.randn(rows, 2 * half)
    fake_operators = FakeOperators(refuse)
    bones = ReplayTensor(spec_of(real))
    before = torch.get_rng_state()
    with fake_operators.mode():
        for _ in range(2):  # computed once, then from the table
            try:
                found = UNARY[name](bones)
            except (RuntimeError, IndexError) as error:
                with pytest.raises(type(error)):
                    UNARY[name](real)
                return
            except Refused:
                with pytest.raises(RuntimeError):
                    UNARY[name](real)
                return
    assert torch.equal(torch.get_rng_state(), before)
    assert specs(found) == specs(UNARY[name](real))
    assert all(type(leaf) is ReplayTensor for leaf in torch.utils._pytree.tree_leaves(found))


MODULES = {
    "linear": (lambda: torch.nn.Linear(6, 3), (4, 6)),
    "conv": (lambda: torch.nn.Conv2d(3, 4, 3, stride=2), (2, 3, 9, 9)),
    "norm": (lambda: torch.nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "lstm": (lambda: torch.nn.LSTM(6, 5, 2), (7, 2, 6)),
    "gru_cell": (lambda: torch.nn.GRUCell(6, 5), (2, 6)),
    "attention": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16), (5, 2, 8)),
    "layer_norm": (lambda: torch.nn.LayerNorm(6), (4, 6)),
    "sequential": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv1d(2, 4, 3), torch.nn.ReLU(inplace=True), torch.nn.Dropout(), torch.nn.Flatten()
        ),
        (3, 2, 8),
    ),
}


@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_of_fake_tensors_gives_fake_results_and_gradients(name, training):
    make, shape = MODULES[name]
    module, real = make().train(training), torch.randn(shape)
    fake_operators = FakeOperators(refuse)
    with fake_operators.mode():
        found = module(ReplayTensor(spec_of(real)))
        loss = sum(leaf.sum() for leaf in torch.utils._pytree.tree_leaves(found))
        assert loss.requires_grad
        fake_operators.gradient_sources.set_gradients([loss], None)
        grads = {name for name, p in module.named_parameters() if p.grad is not None}
        assert all(type(p.grad) is ReplayTensor for p in module.parameters() if p.grad is not None)
        module.zero_grad()
    expected = module(real)
    assert specs(found) == specs(expected)
    sum(leaf.sum() for leaf in torch.utils._pytree.tree_leaves(expected)).backward()
    assert grads == {name for name, p in module.named_parameters() if p.grad is not None}


def test_results_without_gradients_or_detached_have_none():
    weight, fake_operators = torch.nn.Parameter(torch.randn(3)), FakeOperators(refuse)
    with fake_operators.mode():
        x = ReplayTensor(spec_of(torch.randn(3)))
        with torch.no_grad():
            assert not (weight * x).requires_grad
        cut = (weight * x).detach()
        assert not cut.requires_grad
        assert (weight * x).argmax().requires_grad is False
        fake_operators.gradient_sources.set_gradients([(cut * x).sum()], None)
        assert weight.grad is None


def test_a_tensor_that_is_written_to_becomes_fake_under_every_name():
    fake_operators, total = FakeOperators(refuse), torch.zeros(3)
    names = {"of a dict": total}, [total]
    with fake_operators.mode():
        total += ReplayTensor(spec_of(torch.randn(3)))
    assert type(total) is ReplayTensor
    assert names[0]["of a dict"] is total
    assert names[1][0] is total
    torch.utils.swap_tensors(total, torch.ones(3))
    assert names[1][0].tolist() == [1, 1, 1]


def test_a_weight_is_made_for_real_and_is_not_written_to():
    fake_operators = FakeOperators(refuse)
    with fake_operators.mode():
        layer = torch.nn.Linear(3, 2)
        weight = layer.weight.detach
        with torch.no_grad():
            layer.weight.add_(ReplayTensor(spec_of(torch.randn(2, 3))))
            layer.weight.data.copy_(ReplayTensor(spec_of(torch.randn(2, 3))))
    assert weight is not None
    assert type(layer.weight) is torch.nn.Parameter
    assert layer.weight.abs().sum() > 0


def test_values_are_unavailable():
    fake_operators, bones = FakeOperators(refuse), ReplayTensor(spec_of(torch.randn(3)))
    with fake_operators.mode(), pytest.raises(Refused, match="storage"):
        bones.untyped_storage()
    with fake_operators.mode(), pytest.raises(Refused, match="cannot be replayed"):
        torch.arange(bones.sum())
    with pytest.raises(RuntimeError, match="no values"):
        bones + 1  # bypasses the mode
