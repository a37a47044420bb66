"""The levers on a CUDA device: those that only act there, and the state they leave."""

import pytest

from flatout.agent.ledger import Ledger
from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.enums import Moment
from flatout.schema.lever import Options, Skip

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

LEVER = {lever.name: lever for lever in TABLE}
LIVE = [lever for lever in TABLE if lever.live and lever.moment is not Moment.PROCESS]


def weights(live):
    return [p.detach().clone() for p in live.model.parameters()]


def state(live):
    return [
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        sorted(vars(live.model)),
        [p.is_contiguous() for p in live.model.parameters()],
        [{k: v for k, v in g.items() if k != "params"} for g in live.optimizer.param_groups],
    ]


@pytest.mark.parametrize("lever", LIVE, ids=lambda lever: lever.name)
def test_on_and_off_again(program, lever):
    """The program trains under every value that it offers here.

    Off again, flags, hooks, layouts and groups are as before.
    """
    live = program(device="cuda")
    answer = lever.applies(look(), live.context)
    for value in answer.values if isinstance(answer, Options) else ():
        before = state(live)
        undo = lever.apply(live.context, value, Ledger())
        losses = live.train(2)
        undo()
        assert all(torch.isfinite(torch.tensor(losses)))
        assert live.context.reports == []
        assert before == state(live)
        live.train()


@pytest.mark.parametrize("name", ["tf32", "autocast", "channels_last", "fused_optimizer", "compile"])
def test_it_is_offered_here(program, name):
    live = program(device="cuda")
    if name == "tf32" and torch.cuda.get_device_capability()[0] < 8:
        assert isinstance(LEVER[name].applies(look(), live.context), Skip)
    else:
        assert isinstance(LEVER[name].applies(look(), live.context), Options)


def test_tf32_and_compile_together(program):
    """Inductor reads the precision flags; both families of flags must answer."""
    live = program(device="cuda")
    LEVER["tf32"].apply(live.context, True, Ledger())
    LEVER["compile"].apply(live.context, "max-autotune-no-cudagraphs", Ledger())
    assert all(torch.isfinite(torch.tensor(live.train(2))))
    assert live.context.reports == []
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(program, dtype):
    plain, live = program(device="cuda"), program(device="cuda")
    LEVER["autocast"].apply(live.context, dtype, Ledger())
    mine, theirs = live.train(6), plain.train(6)
    assert sum(mine) / len(mine) == pytest.approx(sum(theirs) / len(theirs), rel=0.1)
    assert all(p.dtype == torch.float32 for p in weights(live))


def test_copies_from_pinned_memory_arrive(program):
    """Non-blocking copies are still ordered before the operations that use them."""
    live = program(epochs=0, device="cuda", early=[(LEVER["loader"], {"workers": 1, "pin": True})])
    assert live.loader.pin_memory
    for x, y in live.loader:
        assert x.is_pinned()
        assert torch.equal(x.to("cuda").cpu(), x)
        assert torch.equal(y.cuda().cpu(), y)
    live.train(2)


class Bytes(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.data = torch.randint(
            0, 256, (64, 12, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        ).numpy()
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(pytest.importorskip("PIL.Image").fromarray(self.data[index])), index % 5


@pytest.mark.parametrize(
    ("name", "value", "workers"),
    [
        ("resident_data", {"mib": 64}, 0),
        ("resident_data", {"mib": 64}, 2),
        ("resident_data", {"mib": 64, "host": True}, 0),
        ("device_prefetch", 2, 2),
        ("device_prefetch", 0, 0),
        ("loader", {"workers": 0, "pin": True}, 0),
    ],
)
def test_batches_that_are_there_already_are_the_plain_ones(program, name, value, workers):
    """Losses and weights are bitwise equal, and the copies were really replaced by the resident data."""
    transforms = pytest.importorskip("torchvision.transforms")
    pipeline = transforms.Compose(
        [transforms.RandomCrop(12, padding=2), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    plain, live = (
        program(device="cuda", epochs=0),
        program(device="cuda", epochs=0, early=[(LEVER[name], value)]),
    )
    for each in (plain, live):
        torch.manual_seed(5)
        each.loader = torch.utils.data.DataLoader(
            Bytes(pipeline), batch_size=8, shuffle=True, num_workers=workers
        )
        each.train(3)
    assert live.context.reports == []
    assert live.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(weights(live), weights(plain), strict=True))
