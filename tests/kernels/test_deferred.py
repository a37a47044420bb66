"""Deferred logits: whatever a program does with them, values and gradients are those of the plain layer."""

import copy
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from flatout.kernels import deferred_logits as deferred  # noqa: E402

V = 40
draw = torch.Generator().manual_seed(0)
X, W, B = (
    torch.randn(3, 5, 8, generator=draw),
    torch.randn(V, 8, generator=draw),
    torch.randn(V, generator=draw),
)
T = torch.randint(V, (3, 5), generator=draw)


def loss_of(logits, target=T, **more):
    return F.cross_entropy(logits.view(-1, V), target.reshape(-1), **more)


def in_place(logits):
    logits.mul_(0.5)
    return loss_of(logits)


def in_place_in_a_view(logits):
    logits.view(-1, V)[:, 3] = 0.0
    return loss_of(logits)


def copied_then_changed(logits):
    kept = logits.clone()
    logits.mul_(0.1)
    return loss_of(kept) + 0.01 * logits.sum()


def looked_at_afterwards(logits):
    loss = loss_of(logits)
    assert logits.argmax(-1).shape == (3, 5)
    assert logits.detach().numpy().shape == (3, 5, V)
    assert "tensor" in repr(logits)
    return loss + 0 * logits.data.sum()


def doubled_gradient(logits):
    logits.register_hook(lambda gradient: gradient * 2)
    return loss_of(logits)


def kept_gradient(logits):
    logits.retain_grad()
    loss = loss_of(logits)
    loss.backward(retain_graph=True)
    return loss + logits.grad.sum() * 0


# The number of losses taken without the logits, and the program.
PROGRAMS = {
    "view": (1, loss_of),
    "reshape": (1, lambda z: F.cross_entropy(z.reshape(-1, V), T.view(-1))),
    "flatten": (1, lambda z: F.cross_entropy(z.flatten(0, 1), T.flatten(), label_smoothing=0.1)),
    "next token": (
        1,
        lambda z: F.cross_entropy(
            z[..., :-1, :].contiguous().view(-1, V), T[:, 1:].reshape(-1), ignore_index=3
        ),
    ),
    "in float": (
        1,
        lambda z: F.cross_entropy(z[:, :-1].reshape(-1, V).float(), T[:, 1:].reshape(-1), reduction="sum"),
    ),
    "a module": (1, lambda z: torch.nn.CrossEntropyLoss()(z.view(-1, V), T.view(-1))),
    "one position": (1, lambda z: F.cross_entropy(z[:, -1], T[:, -1])),
    "two losses": (2, lambda z: loss_of(z) + 0.5 * loss_of(z, T.flip(0))),
    "with a penalty": (1, lambda z: loss_of(z) + 0.01 * z.logsumexp(-1).square().mean()),
    "afterwards": (1, looked_at_afterwards),
    "all ignored": (1, lambda z: loss_of(z, torch.full_like(T, -100), reduction="sum") + 0 * z.sum()),
    "classes second": (0, lambda z: F.cross_entropy(z.transpose(1, 2), T)),
    "temperature": (0, lambda z: loss_of(z / 2)),
    "in place": (0, in_place),
    "in a view": (0, in_place_in_a_view),
    "copied": (0, copied_then_changed),
    "a hook": (0, doubled_gradient),
    "its gradient": (0, kept_gradient),
    "class weights": (0, lambda z: loss_of(z, weight=torch.ones(V))),
    "each row": (0, lambda z: loss_of(z, reduction="none").mean()),
    "probabilities": (0, lambda z: F.cross_entropy(z.view(-1, V), torch.full((15, V), 1 / V))),
    "log_softmax": (0, lambda z: F.nll_loss(z.log_softmax(-1).view(-1, V), T.view(-1))),
    "fewer classes": (0, lambda z: F.cross_entropy(z[..., :20].reshape(-1, 20), T.view(-1) % 20)),
    "a class": (0, lambda z: z[..., 3].sum()),
    "detached": (0, lambda z: loss_of(z.detach()) * 0 + z.sum()),
    "some rows": (0, lambda z: F.cross_entropy(z.view(-1, V)[T.view(-1) > 5], T.view(-1)[T.view(-1) > 5])),
    "joined": (0, lambda z: (torch.cat([z, z]) @ torch.ones(V)).sum()),
    "other views": (0, lambda z: z.view(15, 8, 5).square().mean()),
}


def run(layer, program, **options):
    x, w, b = (tensor.clone().requires_grad_() for tensor in (X, W, B))
    before = deferred.FUSED_LOSSES[0]
    loss = program(layer(x, w, b, **options))
    loss.backward()
    return [loss.detach(), x.grad, w.grad, b.grad], deferred.FUSED_LOSSES[0] - before


def assert_near(ours, plain, tolerance=1e-5):
    for a, b in zip(ours, plain, strict=True):
        assert type(a) is torch.Tensor
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_the_plain_values(name):
    taken, program = PROGRAMS[name]
    plain, _ = run(F.linear, program)
    ours, count = run(deferred.linear, program)
    assert count == taken
    assert_near(ours, plain)


@given(
    st.lists(
        st.sampled_from(
            ["view", "slice", "clone", "float", "select", "alias", "double", "mul_", "add", "permute"]
        ),
        max_size=5,
    ),
    st.booleans(),
)
def test_any_chain_of_operations(chain, ask_in_between):
    """Whatever path the logits take to a loss, it is the plain loss."""

    def program(z):
        for step in chain:
            z = {
                "view": lambda z: z.reshape(-1, V),
                "slice": lambda z: z[1:] if len(z) > 1 else z,
                "clone": lambda z: z.clone(),
                "float": lambda z: z.float(),
                "select": lambda z: z[0] if z.dim() > 2 else z,
                "alias": lambda z: z.view_as(z),
                "double": lambda z: z.double(),
                "mul_": lambda z: z.mul_(0.5),
                "add": lambda z: z + 1,
                "permute": lambda z: z.transpose(0, 1) if z.dim() > 2 else z,
            }[step](z)
            if ask_in_between:
                z.sum().item()
        rows = z.reshape(-1, V)
        return F.cross_entropy(rows, torch.arange(len(rows)) % V).float()

    assert_near(run(deferred.linear, program)[0], run(F.linear, program)[0])


@pytest.mark.parametrize("program", ["view", "in float", "with a penalty", "a hook"])
def test_under_autocast(program):
    def within(layer):
        with torch.autocast("cpu", torch.bfloat16):
            return run(layer, PROGRAMS[program][1])[0]

    assert_near(within(deferred.linear), within(F.linear), tolerance=0.02)


def test_in_half_precision_and_inside_a_checkpoint():
    def half(layer):
        x, w = (tensor.bfloat16().requires_grad_() for tensor in (X, W))
        loss = loss_of(layer(x, w))
        loss.backward()
        return [loss.detach(), x.grad, w.grad]

    assert_near(half(deferred.linear), half(F.linear), tolerance=0.05)

    def recomputed(layer):
        return run(
            lambda x, w, b: checkpoint(lambda *given: loss_of(layer(*given)), x, w, b, use_reentrant=False),
            lambda loss: loss,
        )

    ours, count = recomputed(deferred.linear)
    assert count >= 1  # the second time it may stop before the loss
    assert_near(ours, recomputed(F.linear)[0])


def trained(layer, look):
    """Three steps of SGD, and what ``look`` reads from each step's logits after the weights have changed."""
    model = torch.nn.Linear(8, V)
    model.load_state_dict({"weight": W, "bias": B})
    optimizer, seen, held = torch.optim.SGD(model.parameters(), lr=0.5), [], []
    for _ in range(3):
        logits = layer(X, model.weight, model.bias)
        loss_of(logits).backward()
        if layer is deferred.linear:
            deferred.before_step()
        optimizer.step()
        optimizer.zero_grad()
        look(logits, seen, held)
    return [*seen, *(each.clone() for each in held), model.weight.detach()]


@pytest.mark.parametrize(
    "look",
    [
        lambda logits, seen, held: seen.append(logits.argmax(-1)),
        lambda logits, seen, held: held.append(logits.detach()),
        lambda logits, seen, held: None,
        lambda logits, seen, held: seen.append(torch.tensor(logits.tolist())),
    ],
    ids=["at once", "collected", "never", "as a list"],
)
def test_logits_that_are_read_late_are_those_of_the_old_weights(look):
    before = deferred.FUSED_LOSSES[0]
    ours = trained(deferred.linear, look)
    assert deferred.FUSED_LOSSES[0] == before + 3
    for a, b in zip(ours, trained(F.linear, look), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_that_change_without_the_optimizer():
    """The result is neither the old values nor a silent mistake, but a clear error."""
    w = W.clone().requires_grad_()
    logits = deferred.linear(X, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="changing their weights outside an optimizer"):
        logits.sum()


def test_operations_that_need_memory_get_it():
    w = W.clone().requires_grad_()
    logits, plain = deferred.linear(X, w), F.linear(X, w)
    saved = io.BytesIO()
    torch.save(logits.detach(), saved)
    assert b"flatout" not in saved.getvalue()
    saved.seek(0)
    assert torch.equal(torch.load(saved), plain)
    assert torch.equal(copy.deepcopy(logits.detach()), plain)
    assert f"{logits.sum():.3f}" == f"{plain.sum():.3f}"
    assert logits.shape == plain.shape
    assert logits.stride() == plain.stride()
    assert logits.dtype is plain.dtype
    assert isinstance(logits, torch.Tensor)
    with pytest.raises(RuntimeError, match="requires grad"):
        logits.numpy()


def test_per_sample_gradients_see_the_plain_layer():
    def loss(w, x, t):
        return F.cross_entropy(deferred.linear(x[None], w), t[None])

    def plain(w, x, t):
        return F.cross_entropy(F.linear(x[None], w), t[None])

    ours, right = (torch.func.vmap(torch.func.grad(f), (None, 0, 0))(W, X[0], T[0]) for f in (loss, plain))
    torch.testing.assert_close(ours, right)
