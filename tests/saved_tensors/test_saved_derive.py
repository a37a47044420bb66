"""Tensors that follow from another saved tensor are not kept: fewer bytes, bitwise the same gradients, and
the plain program's errors.
"""

import copy
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout.levers.saved_tensors.rederive import SavedTensorRederiver  # noqa: E402

WIDTH = 12


class Norm(nn.Module):
    """The script's own layer normalisation, with its epsilon written into its forward."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return nn.functional.layer_norm(x, (WIDTH,), self.scale, self.shift, 1e-6)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        )


class Images(nn.Module):
    """[B, L, W] as images of one row, through channel normalisations."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch, self.group, self.last = (
            nn.Conv1d(WIDTH, WIDTH, 1),
            nn.BatchNorm1d(WIDTH),
            nn.GroupNorm(3, WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 1),
        )

    def forward(self, x):
        y = nn.functional.silu(self.batch(self.conv(x.transpose(1, 2))))
        return x + self.last(nn.functional.mish(self.group(y))).transpose(1, 2)


LAYERS = {
    "norm": lambda: nn.LayerNorm(WIDTH),
    "own norm": Norm,
    "bare norm": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "gated": Gated,
    "bare mlp": lambda: nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    ),
    "attention": Attention,
    "images": Images,
    "drop": lambda: nn.Dropout(0.3),
    "relu": nn.ReLU,
    "tanh": lambda: nn.GELU(approximate="tanh"),
    "leaky": lambda: nn.LeakyReLU(0.2),
    "softplus": nn.Softplus,
    "hard": nn.Hardswish,
}


def network(names):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in names), nn.Linear(WIDTH, WIDTH)
    )


def gradients(forward, model, x, autocast=False):
    torch.manual_seed(3)
    model.zero_grad()
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = forward(given)
    output.float().square().mean().backward()
    return [
        output.detach(),
        given.grad,
        *(p.grad for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
    ]


class Meter:
    """Bytes that autograd keeps in addition to parameters, at the end of a forward pass."""

    def __init__(self, model):
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    @property
    def bytes(self):
        return sum(self.kept.values())


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.34, 1.0]),
    autocast=st.booleans(),
)
def test_any_network_has_the_same_gradients_bit_for_bit(names, share, autocast):
    model, x = network(names), torch.randn(2, 5, WIDTH)
    counterpart, deriving = copy.deepcopy(model), None
    deriving = SavedTensorRederiver(torch, share)
    for _ in range(2):  # tried first, then trusted
        plain = gradients(model, model, x, autocast)
        mine = gradients(lambda given: deriving.forward(counterpart, (given,), {}), counterpart, x, autocast)
        assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))


@pytest.mark.parametrize(
    ("names", "share", "most"),
    [
        (["mlp"] * 3, 0.0, 0.75),
        (["norm", "mlp"] * 3, 1.0, 0.35),
        (["norm", "attention", "norm", "mlp"] * 2, 1.0, 0.4),
        (["images"] * 3, 0.0, 0.75),
        (["gated"] * 3, 0.0, 0.85),
        (["norm", "bare mlp"] * 3, 1.0, 0.35),
    ],
)
def test_it_keeps_less(names, share, most):
    model, x = network(names), torch.randn(32, 64, WIDTH)
    with Meter(model) as plain:
        model(x)
    deriving = SavedTensorRederiver(torch, share)
    with Meter(model) as mine:
        deriving.forward(model, (x,), {})
    assert deriving.derived >= 3
    assert 0.05 * plain.bytes < mine.bytes <= most * plain.bytes


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_are_frozen_or_come_first(bias):
    """Autograd saves an operand of a product only where the other operand needs a gradient."""
    first = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH, bias=bias),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 8 * WIDTH, bias=bias),
        nn.GELU(),
        nn.Linear(8 * WIDTH, 2),
    )
    deriving, x = SavedTensorRederiver(torch, 1.0), torch.randn(3, 4, WIDTH)
    for frozen in (False, True, False):
        first[2].requires_grad_(not frozen)
        grads = []
        for forward in (first, lambda given: deriving.forward(first, (given,), {})):
            first.zero_grad()
            forward(x).square().mean().backward()
            grads.append([p.grad.clone() for p in first.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_share_lies_between():
    model, x = network(["norm", "mlp"] * 6), torch.randn(32, 64, WIDTH)
    kept = []
    for share in (0.0, 0.34, 0.67, 1.0):
        with Meter(model) as meter:
            SavedTensorRederiver(torch, share).forward(model, (x,), {})
        kept.append(meter.bytes)
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_tensors_that_cannot_be_derived_bitwise_are_kept():
    """An unknown epsilon, and an output that was changed without autograd's knowledge."""

    class Strange(nn.Module):
        def forward(self, x):
            y = nn.functional.layer_norm(x, (WIDTH,), eps=0.123)
            y.data.mul_(2)
            return nn.functional.gelu(y) @ torch.ones(WIDTH, WIDTH, requires_grad=True)

    model, deriving = nn.Sequential(nn.Linear(WIDTH, WIDTH), Strange()), SavedTensorRederiver(torch)
    x = torch.randn(3, 4, WIDTH)
    plain = gradients(model, model, x)
    mine = gradients(lambda given: deriving.forward(model, (given,), {}), model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))
    assert deriving.derived == 1  # GELU's output; the normalisation's is unchanged


def test_a_changed_saved_tensor_is_the_plain_error():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    for forward in (model, lambda x: SavedTensorRederiver(torch).forward(model, (x,), {})):
        output = forward(torch.randn(3, WIDTH))
        output.data  # noqa: B018
        with torch.no_grad():
            output.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_hooks_of_the_script_get_the_kept_tensors():
    model, x = network(["mlp"]), torch.randn(3, 4, WIDTH)
    plain = gradients(model, model, x)
    deriving, packed, unpacked = SavedTensorRederiver(torch), [], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(1) or tensor, lambda tensor: unpacked.append(1) or tensor
    ):
        mine = gradients(lambda given: deriving.forward(model, (given,), {}), model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))
    assert deriving.derived == 1
    assert len(unpacked) >= len(packed) > 5


def test_nothing_is_held_after_the_backward_pass_and_backward_may_come_twice():
    model, x = network(["norm", "attention", "mlp"]), torch.randn(3, 4, WIDTH)
    deriving, held = SavedTensorRederiver(torch, 1.0), []
    model[2].register_forward_hook(lambda module, args, output: held.append(weakref.ref(output)))
    loss = deriving.forward(model, (x,), {}).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(once, model.parameters(), strict=True))
    del loss
    assert held
    assert all(ref() is None for ref in held)
    with torch.no_grad():
        assert torch.equal(deriving.forward(model, (x,), {}), model(x))
