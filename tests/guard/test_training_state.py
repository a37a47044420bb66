"""The training state of a script is found and named as in the script.

It equals torch's own state_dicts, without calling one.
"""

import copy
import sys

import pytest

torch = pytest.importorskip("torch")

from flatout.agent.ledger import Ledger  # noqa: E402
from flatout.agent.listener import Listener  # noqa: E402
from flatout.agent.schedulers import Schedulers  # noqa: E402
from flatout.agent.training_context import TrainingContext  # noqa: E402
from flatout.checkpoint.exported import export  # noqa: E402
from flatout.checkpoint.training_state import TrainingState  # noqa: E402
from flatout.checkpoint.values import pack, unpack  # noqa: E402


@pytest.fixture
def find():
    """``training_state, gone = find()`` hooks object creation from then on; the ledger removes the hooks when
    the test ends.
    """
    ledgers = []

    def install():
        ledgers.append(Ledger())
        gone = []
        context = TrainingContext(torch, Listener(), ledgers[-1])
        schedulers = Schedulers(torch, ledgers[-1])
        context.install()
        return TrainingState(context, schedulers, lambda: gone.append(1)), gone

    yield install
    for ledger in reversed(ledgers):
        ledger.restore()


class Loud(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        raise AssertionError("no code of the script is called")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def train(net, *optimizers, steps=3):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


# This has no assert because pytest rewrites functions with asserts, and the rewritten code uses other
# variables.
def a_script(training_state):
    netG = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8, bias=False)
    )
    netG[2].weight = netG[0].weight  # tied
    netG.register_buffer("fleeting", torch.ones(1), persistent=False)
    fast = torch.nn.DataParallel(netG)
    ema, frozen = copy.deepcopy(netG), torch.nn.Conv2d(3, 3, 3)
    optimizer = torch.optim.Adam(
        [{"params": [netG[0].weight]}, {"params": [netG[0].bias, *netG[1].parameters()], "lr": 0.1}],
        amsgrad=True,
    )
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    both = torch.optim.lr_scheduler.ChainedScheduler([halving])
    odd = Loud(8, 8)
    second = torch.optim.LBFGS(odd.parameters())
    train(fast, optimizer)
    second.step(
        lambda: (
            odd.zero_grad(),
            odd(torch.ones(2, 8)).square().mean(),
            odd(torch.ones(2, 8)).square().mean().backward(),
        )[1]
    )
    both.step()
    training_state.find(sys._getframe())
    return training_state.state(), {
        "netG": netG,
        "ema": ema,
        "optimizer": optimizer,
        "both": both,
        "odd": odd,
        "second": second,
        "kept": (fast, frozen),
    }


def test_names_and_states(find, tmp_path):
    training_state, _ = find()
    state, made = a_script(training_state)
    assert list(state["modules"]) == ["netG", "odd", "ema"], (
        "a separate copy is found, a module that does not train is not"
    )
    assert (list(state["optimizers"]), list(state["schedulers"])) == (["optimizer", "second"], ["both"]), (
        "optimizers driven by other objects are included"
    )
    assert same(dict(state["modules"]["netG"]["state"]), dict(made["netG"].state_dict()))
    assert state["modules"]["netG"]["versions"] == {
        key: value["version"] for key, value in made["netG"].state_dict()._metadata.items()
    }
    for name in ("optimizer", "second"):
        assert same(state["optimizers"][name], made[name].state_dict())
    assert same(state["schedulers"]["both"], made["both"].state_dict())
    assert training_state.notes == {"odd": "additions and changes by the custom state_dict of Loud"}
    packed = pack(torch, state)
    assert packed.left_out == {}
    assert (
        len([name for name in packed.tensors if name.startswith("modules.netG")])
        == len(made["netG"].state_dict()) - 1
    ), "tied weights appear once"
    again = unpack(torch, packed.tree, packed.tensors)
    code = export(torch, again, {"netG": "model"}, tmp_path / "out").lines
    other = copy.deepcopy(made["netG"])
    torch.nn.init.zeros_(other[0].weight)
    exec("\n".join(line for line in code if line.startswith(("import", "model"))), {"model": other})
    assert same(dict(other.state_dict()), dict(made["netG"].state_dict()))
    assert torch.load(tmp_path / "out" / "random.pt")["torch"].dtype == torch.uint8


def test_a_deleted_model_is_reported_while_its_state_exists(find):
    training_state, _ = find()
    states = []
    training_state.on_deleted = lambda: states.append(training_state.state())
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    train(net, optimizer)
    training_state.find(None)
    train(net, optimizer)
    last = {name: value.clone() for name, value in net.state_dict().items()}
    del net
    assert [same(dict(state["modules"]["linear"]["state"]), last) for state in states] == [True]
    assert training_state.state()["modules"] == {}, "and then nothing holds a reference to it"
    del optimizer
    assert len(states) == 2


def test_weights_in_no_module(find):
    training_state, _ = find()
    state = bare(training_state)
    assert {name: tuple(value.shape) for name, value in state["tensors"].items()} == {
        "W": (8, 2),
        "parameters[0]": (2, 1),
    }
    assert not training_state.live, "finding an object does not keep it alive"


def bare(training_state):
    W, parameters, data = (
        torch.randn(8, 2, requires_grad=True),
        [torch.randn(2, 1, requires_grad=True)],
        torch.ones(4, 8),
    )
    for _ in range(2):
        (data @ W @ parameters[0]).sum().backward()
    training_state.find(sys._getframe())
    return {
        key: {name: value.clone() if key == "tensors" else value for name, value in held.items()}
        for key, held in training_state.state().items()
    }
