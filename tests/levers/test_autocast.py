"""Half precision at the module's boundary: the script sees float32, float16 carries its loss scale, an
overflow skips the step.
"""

import pytest

from flatout.agent.ledger import Ledger
from flatout.levers.autocast import INITIAL_SCALE, LEVER

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DTYPES = ["bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_maths_is_done_in_half_precision_and_the_script_sees_float32(program, dtype):
    live = program()
    seen = []
    live.model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    LEVER.apply(live.context, dtype, live.ledger)
    output = live.model(torch.randn(2, 3, 12, 12))
    assert seen == [getattr(torch, dtype)]
    assert output.dtype == torch.float32
    functional.binary_cross_entropy(output.sigmoid(), torch.ones_like(output)).backward()
    assert output.detach().numpy().dtype == "float32"
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in live.model.parameters())


class Many(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(432, 5)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return {"logits": y, "all": [y, (y.argmax(1), None)], "name": "text", "count": 3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_of_any_shape_keep_their_form(program, dtype):
    live = program(epochs=0, model=Many())
    live.context._roots[id(live.model)] = lambda: live.model
    plain = live.model(torch.ones(2, 3, 12, 12))
    LEVER.apply(live.context, dtype, live.ledger)
    output = live.model(torch.ones(2, 3, 12, 12))
    assert set(output) == set(plain)
    assert isinstance(output["all"], list)
    assert isinstance(output["all"][1], tuple)
    assert output["logits"].dtype == output["all"][0].dtype == torch.float32
    assert output["all"][1][0].dtype == torch.int64
    assert output["all"][1][1] is None
    assert (output["name"], output["count"]) == ("text", 3)


def gradients(live, backward, *modules):
    """All gradients after ``backward()``, from none."""
    modules = modules or (live.model,)
    for module in modules:
        module.zero_grad()
    torch.manual_seed(5)
    backward()
    return torch.cat([p.grad.flatten() for m in modules for p in m.parameters()]).double()


def near(half, plain):
    return (half - plain).norm() / plain.norm() < 0.1


def of_a_batch(live, factor=1.0):
    """The backward pass of one batch."""
    x, y = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))
    return lambda: (functional.cross_entropy(live.model(x), y) * factor).backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_plain_ones_up_to_rounding(program, dtype):
    """The script never sees a scaled number, neither in its gradients nor in their norm."""
    live = program()
    backward = of_a_batch(live)
    plain = gradients(live, backward)
    undo = LEVER.apply(live.context, dtype, Ledger())
    half = gradients(live, backward)
    undo()
    assert near(half, plain)
    assert torch.equal(gradients(live, backward), plain)


def test_accumulated_gradients_are_unscaled_once(program):
    live = program()
    LEVER.apply(live.context, "float16", live.ledger)
    backward = of_a_batch(live)

    def twice():
        backward()
        torch.manual_seed(5)
        backward()

    one = gradients(live, backward)
    assert (gradients(live, twice) - 2 * one).norm() / one.norm() < 0.1


def test_small_gradients_survive_in_float16(program):
    """Without a scale these would be zeros: float16 cannot hold 1e-6 and less between layers."""
    live = program()
    LEVER.apply(live.context, "float16", live.ledger)
    live.optimizer.zero_grad()
    of_a_batch(live, 1e-6)()
    first = next(live.model.parameters()).grad
    assert first.count_nonzero() > 0.9 * first.numel()


def test_overflow_skips_the_step_and_halves_the_scale(program):
    live = program(optimizer="SGD")
    ledger = live.ledger
    LEVER.apply(live.context, "float16", ledger)
    x, y = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))

    def step(factor):
        before = [p.detach().clone() for p in live.model.parameters()]
        live.optimizer.zero_grad()
        (functional.cross_entropy(live.model(x), y) * factor).backward()
        live.optimizer.step()
        return any(not torch.equal(a, b) for a, b in zip(before, live.model.parameters(), strict=True))

    assert step(1.0)
    assert not step(1e8)  # infinite in float16
    assert all(torch.isfinite(p).all() for p in live.model.parameters())
    assert all(torch.isfinite(p.grad).all() for p in live.model.parameters())
    assert step(1.0)
    # The scale has been halved: what overflowed at the first scale passes at some lower one.
    tries = 0
    while not step(10.0) and tries < 20:
        tries += 1
    assert tries < 20
    assert INITIAL_SCALE == 2.0**14


def test_an_overflow_skips_the_step_of_its_own_optimizer_alone(program):
    """A GAN's two optimizers: the gradient of one overflows, and the other steps first."""
    live = program(optimizer="SGD")
    other = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    live.context.optimizers.append(optimizer)
    live.context.roots.append(other)
    LEVER.apply(live.context, "float16", live.ledger)

    def step(network, optimizer, loss):
        before = [p.detach().clone() for p in network.parameters()]
        loss()
        return lambda: (
            optimizer.step(),
            any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)),
        )[1]

    x = torch.randn(8, 3, 12, 12)
    overflows = step(
        live.model,
        live.optimizer,
        lambda: (functional.cross_entropy(live.model(x), torch.randint(5, (8,))) * 1e8).backward(),
    )
    sound = step(other, optimizer, lambda: other(torch.randn(8, 3)).square().mean().backward())
    assert sound()
    assert not overflows()


class Reads(TorchDispatchMode):
    """Counts the values that Python reads from tensors: on a device, each is a wait."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*args, **(kwargs or {}))


def test_overflow_is_checked_once_a_step_and_not_for_each_parameter(program):
    live = program(optimizer="SGD")
    LEVER.apply(live.context, "float16", live.ledger)
    loss = functional.cross_entropy(live.model(torch.randn(8, 3, 12, 12)), torch.randint(5, (8,)))
    with Reads() as reads:
        loss.backward()
        assert reads.count == 0
        live.optimizer.step()
        assert reads.count == 1


@pytest.mark.filterwarnings("error")  # a scheduler warns if its mark on the step is missing
def test_a_skipped_step_leaves_scheduler_and_state_unchanged(program):
    live = program(optimizer="Adam")
    scheduler = torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5)
    LEVER.apply(live.context, "float16", live.ledger)
    live.train()
    scheduler.step()
    counts = [state["step"].item() for state in live.optimizer.state.values()]
    live.optimizer.zero_grad()
    (live.model(torch.randn(8, 3, 12, 12)).sum() * 1e9).backward()
    live.optimizer.step()
    scheduler.step()
    assert [state["step"].item() for state in live.optimizer.state.values()] == counts
    assert all(torch.isfinite(state["exp_avg"]).all() for state in live.optimizer.state.values())


def test_a_penalty_on_the_weights_is_not_divided_by_the_scale(program):
    """Part of the loss may reach the parameters without passing through the module; its gradient must stay
    whole.
    """
    live = program()
    LEVER.apply(live.context, "float16", live.ledger)
    live.optimizer.zero_grad()
    sum(p.square().sum() for p in live.model.parameters()).backward()
    for p in live.model.parameters():
        assert torch.allclose(p.grad, 2 * p.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_modules_in_sequence(program, dtype):
    """In a GAN, or an encoder and a decoder, the gradient crosses two boundaries."""
    live = program(epochs=0)
    head = torch.nn.Linear(5, 2)
    x = torch.randn(8, 3, 12, 12)

    def both():
        return gradients(live, lambda: head(live.model(x)).square().mean().backward(), live.model, head)

    other = torch.optim.SGD(head.parameters(), lr=0.01)
    both()
    live.optimizer.step()
    other.step()
    plain = both()
    undo = LEVER.apply(live.context, dtype, Ledger())
    assert len(live.context.roots) == 2
    half = both()
    undo()
    assert near(half, plain)


def test_the_gradient_of_an_input(program):
    live = program()
    x = torch.randn(8, 3, 12, 12, requires_grad=True)

    def gradient():
        x.grad = None
        gradients(live, lambda: live.model(x).square().mean().backward())
        return x.grad.clone()

    plain = gradient()
    undo = LEVER.apply(live.context, "float16", Ledger())
    half = gradient()
    undo()
    assert near(half, plain)
    assert torch.equal(gradient(), plain)


def test_a_reentrant_checkpoint_is_scaled_once(program):
    from torch.utils.checkpoint import checkpoint

    live = program()
    x = torch.randn(8, 3, 12, 12, requires_grad=True)
    LEVER.apply(live.context, "float16", live.ledger)
    once = gradients(live, lambda: live.model(x).square().mean().backward())
    again = gradients(live, lambda: checkpoint(live.model, x, use_reentrant=True).square().mean().backward())
    assert near(again, once)


def test_several_losses_and_given_gradients(program):
    live = program()
    x = torch.randn(8, 3, 12, 12)

    def backward():
        output = live.model(x)
        torch.autograd.backward([output, output.square().mean()], [torch.full_like(output, 0.1), None])

    plain = gradients(live, backward)
    LEVER.apply(live.context, "float16", live.ledger)
    assert near(gradients(live, backward), plain)
    with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
        live.model(x).backward()
