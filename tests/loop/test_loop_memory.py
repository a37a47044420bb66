"""Out of memory inside a step: injected at every kind of operator, and a real one on the CPU.

No step is wrong, no tensor leaks, nothing hangs.
"""

import weakref

import pytest
from processes import run_python

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flatout import Loop  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402

SAMPLES, STEPS, AT = 8, 5, 2
FAILS = 90  # a step of a longer run


class Injector(TorchDispatchMode):
    """Raises once at the operator of this number, while armed."""

    def __init__(self, number, error=None):
        super().__init__()
        self.left, self.armed, self.fired = number, False, ""
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.armed:
            self.left -= 1
            if self.left == 0:
                self.armed, self.fired = False, str(operator)
                raise self.error
        return operator(*args, **(kwargs or {}))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU()),
            nn.Linear(16, 3),
        )
        self.hidden = []  # weak references

    def forward(self, x):
        h = self.body(x)
        self.hidden.append(weakref.ref(h))
        return self.head(h)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def data():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def train(
    number=None, phase="gradients", error=None, make=lambda p: torch.optim.AdamW(p, lr=1e-2), at=AT, **more
):
    """Weights after each step, the steps, the injector.

    The error comes in step ``at``, at that operator of the phase.
    """
    torch.manual_seed(0)
    model = Network().double()
    optimizer = make(model.parameters())
    injector = Injector(number or -1, error)
    optimizer.register_step_pre_hook(
        lambda *_: setattr(
            injector, "armed", phase == "optimizer" and loop.index == at and not injector.fired
        )
    )
    optimizer.register_step_post_hook(lambda *_: setattr(injector, "armed", False))

    def armed(model, batch):
        injector.armed = (
            phase == "gradients" and loop.index == at and not injector.fired and number is not None
        )
        return loss_fn(model, batch)

    loop = Loop(model, optimizer, armed, data(), **more)
    weights, steps = [], []
    with injector:
        for step in loop:
            injector.armed = False
            steps.append(step)
            weights.append([p.detach().clone() for p in model.parameters()])
    injector.model = model
    return weights, steps, injector


def same(ours, theirs):
    return all(
        torch.allclose(a, b, rtol=1e-11, atol=1e-13)
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.fixture(scope="module")
def undisturbed():
    return train()[0]


def test_every_operator_of_forward_and_backward(undisturbed):
    """The step is repeated from its start.

    The trajectory is the undisturbed one, at whatever operator memory ran out.
    """
    sites = 0
    for number in range(1, 200):
        try:
            weights, steps, injector = train(number)
        except LoopError:
            break  # the optimizer's step has begun
        sites += 1
        assert same(weights, undisturbed), injector.fired
        assert [step.parts for step in steps] == [1, 1, 2, 2, 2]
        assert [step.samples for step in steps] == [SAMPLES] * STEPS
        assert not any(reference() is not None for reference in injector.model.hidden[:-2]), (
            f"a tensor of the failed step leaks after {injector.fired}"
        )
    assert sites > 25


@pytest.mark.parametrize(("foreach", "at"), [(False, 0), (True, 0), (False, AT), (True, AT)])
def test_every_operator_of_the_optimizer(undisturbed, foreach, at):
    """In the first step, before a weight has changed, the step is repeated.

    Later it is rejected: half a step cannot be undone or even detected.
    """
    again, refused = 0, 0
    for number in range(1, 400):
        try:
            weights, _, injector = train(
                number, "optimizer", make=lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=foreach), at=at
            )
        except LoopError as error:
            refused += "half a step" in str(error)
            continue
        if not injector.fired:
            break
        again += 1
        assert same(weights, undisturbed), injector.fired
    assert refused > 8
    assert (again > 0) == (at == 0)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()],
    ids=["CPU", "Python"],
)
def test_other_families_of_the_same_error(undisturbed, error):
    weights, _, injector = train(9, error=error)
    assert injector.fired
    assert same(weights, undisturbed)


def test_another_error_passes_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(9, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def evaluate_without_memory(model):
    with torch.no_grad(), Injector(4) as injector:
        injector.armed = True
        model(data()[0][0])


def test_evaluation_that_runs_out_of_memory_is_the_users(undisturbed):
    """A failure between two steps is the user's: the loop continues at the same step."""
    torch.manual_seed(0)
    model = Network().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = []
    for step in Loop(model, optimizer, loss_fn, data()):
        if step.index == AT:
            with pytest.raises(torch.OutOfMemoryError):
                evaluate_without_memory(model)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert same(weights, undisturbed)
    assert not any(reference() is not None for reference in model.hidden)


def test_the_random_state_of_the_step_is_restored():
    """Random numbers used before the batch is split are used again."""
    drawn = []

    def noisy(model, batch):
        drawn.append(torch.rand(()).item())
        return loss_fn(model, batch)

    model = Network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    failing = iter([False, True, False])
    torch.manual_seed(3)

    def sometimes(model, batch):
        loss = noisy(model, batch)
        if len(batch[0]) == SAMPLES and next(failing, False):
            raise torch.OutOfMemoryError("out of memory")
        return loss

    list(Loop(model, optimizer, sometimes, data()[:2], reduction="mean"))
    assert len(drawn) == 4  # one, the failed one, and its two halves
    assert drawn[1] == drawn[2] != drawn[3]


@pytest.mark.parametrize(("begins", "again"), [(0, True), (40, True), (10**9, False)])
def test_late_use_of_random_numbers_is_detected(begins, again):
    """One step in 64 is checked, so new use of random numbers is repeated from then on.

    A program without random numbers keeps nothing.
    """
    drawn = []

    def noisy(model, batch):
        if len(seen) >= begins or len(seen) == FAILS:
            drawn.append((len(seen), torch.rand(()).item()))
        if len(seen) == FAILS and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory")
        return loss_fn(model, batch)

    model = Network().double()
    seen, failed = [], []
    for step in Loop(
        model, torch.optim.SGD(model.parameters(), lr=1e-2), noisy, data() * 20, reduction="mean"
    ):
        seen.append(step.index)
    there = [value for at, value in drawn if at == FAILS]
    assert len(there) == 3
    assert (there[0] == there[1]) == again


def test_a_single_sample_that_does_not_fit():
    with pytest.raises(LoopError, match=r"(?s)single sample.*precision"):
        list(
            Loop(
                model := Network().double(),
                torch.optim.SGD(model.parameters(), 0.1),
                _never,
                data(),
                reduction="mean",
            )
        )


def _never(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")


def test_an_unsplittable_batch_is_rejected_with_both_reasons():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    def once(model, batch):
        model(batch[0])
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(LoopError, match=r"(?s)out of memory with 8 samples.*uses batch normalisation"):
        list(Loop(model, torch.optim.SGD(model.parameters(), 0.1), once, data()))


def test_an_unsplittable_batch_is_split_where_that_is_allowed():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    failing = iter([True])

    def once(model, batch):
        if next(failing, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_fn(model, batch)

    steps = list(Loop(model, torch.optim.SGD(model.parameters(), 0.1), once, data(), allow_inexact=True))
    assert [step.parts for step in steps] == [2] * STEPS


REAL = """\
import resource, sys
import torch
from torch import nn
from flatout import Loop

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
batches = [(torch.randn(4096, 64, generator=generator), torch.randint(0, 8, (4096,), generator=generator)) for _ in range(3)]
limited = sys.argv[1] == "limited"
if limited:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 70 * 2**20,) * 2)
for step in Loop(model, optimizer, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batches):
    print(step.parts, float(step.loss), sum(p.double().sum().item() for p in model.parameters()), flush=True)
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_real_one_on_the_cpu(tmp_path):
    """The address space is limited, and the allocator really fails.

    Steps continue in smaller micro-batches, to the same weights.
    """
    (tmp_path / "train.py").write_text(REAL)
    said = {}
    for how in ("free", "limited"):
        lines = run_python(tmp_path / "train.py", how, limit_s=200).splitlines()
        said[how] = [[float(word) for word in line.split()] for line in lines]
    assert [parts for parts, *_ in said["free"]] == [1, 1, 1]
    assert said["limited"][-1][0] > 1
    for free, limited in zip(said["free"], said["limited"], strict=True):
        assert limited[1:] == pytest.approx(free[1:], rel=1e-5)
