"""Parts of flatout that work for a model on the second card while the first is current.

Prints the objections of each check as JSON.
"""

import contextlib
import copy
import gc
import json
import os
import traceback
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from flatout.agent import failure_details
from flatout.agent.applier import Applier
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.distributed.batches import Streams
from flatout.distributed.single_process import _backend_of_cuda
from flatout.guard.captured_steps import CapturedCall, StepReplayer
from flatout.guard.copies import random_state
from flatout.guard.replica import StepReplica
from flatout.kernels.layer_norm.op import layer_norm
from flatout.levers.autocast import LEVER as AUTOCAST
from flatout.levers.resident_data import LEVER as RESIDENT
from flatout.levers.tf32 import LEVER as TF32
from flatout.loop.accumulation import ReductionTest
from flatout.measure import parity
from flatout.schema.enums import Effect, Moment
from flatout.schema.errors import LoopError
from flatout.schema.facts import Facts, Gpu
from flatout.schema.lever import Lever, Options
from flatout.schema.plan import Choice

DEVICE = torch.device("cuda:1")
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def context(model, optimizer=None):
    found = TrainingContext(torch, Listener(), Ledger())
    found.register_objects([model], [optimizer] if optimizer else [], [])
    return found


class Launches:
    """Wraps a Triton kernel and records the current device of each launch."""

    def __init__(self, kernel):
        self.kernel, self.devices = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.devices.append(torch.cuda.current_device())
            return self.kernel[grid](*args, **kwargs)

        return launch


@check
def triton_launches_where_the_tensors_are():
    from flatout.kernels.layer_norm import in_triton

    seen = []
    for name in ("_forward", "_backward"):
        seen.append(Launches(getattr(in_triton, name)))
        setattr(in_triton, name, seen[-1])
    x, weight = (
        torch.randn(4, 16, device=DEVICE, requires_grad=True),
        torch.ones(16, device=DEVICE, requires_grad=True),
    )
    y = layer_norm(x, weight, implementation="triton")
    y.sum().backward()
    assert torch.allclose(y, functional.layer_norm(x, (16,), weight), atol=1e-5)
    assert [launches.devices for launches in seen] == [[1]] * 2


@check
def capability_is_asked_of_the_models_device():
    asked, really = [], torch.cuda.get_device_capability
    model = nn.Linear(4, 1).to(DEVICE)
    torch.cuda.get_device_capability = lambda device=None: asked.append(device) or really(device)
    for lever in (TF32, AUTOCAST):
        lever.applies(Facts(), context(model))
    torch.cuda.get_device_capability = really
    assert asked == [DEVICE, DEVICE]


@check
def data_may_fill_a_share_of_the_models_device():
    model = nn.Linear(4, 1).to(DEVICE)
    large, small = Gpu("large", 64 * 2**30, (9, 0)), Gpu("small", 8 * 2**30, (9, 0))
    assert RESIDENT.applies(Facts(gpus=(large, small)), context(model)).values == ({"mib": 2048},)
    assert RESIDENT.applies(Facts(gpus=(small,)), context(model)).values == (
        {"mib": 2048},
    )  # it was requested alone


@check
def an_error_is_looked_at_on_the_device_that_it_names():
    held = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda:0"), nn.Linear(1000, 1000).to(DEVICE)
    try:
        torch.empty(2**40, dtype=torch.uint8, device=DEVICE)
    except torch.OutOfMemoryError as error:
        seen = failure_details.record_failure(error)
    assert seen.facts["gpu"] == "Stand-in card 1"
    assert 4_000_000 <= seen.memory["parameters"] <= seen.memory["allocated"] < 50 * 2**20
    assert (
        failure_details.record_failure(RuntimeError("CUDA error: out of memory")).facts["gpu"]
        == "Stand-in card 0"
    )  # the fullest
    del held


@check
def the_guard_keeps_its_results_on_the_host_where_the_models_card_is_nearly_full():
    model = nn.Linear(1024, 1024).to(DEVICE)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 1024, device=DEVICE)
    found = context(model, optimizer)
    autocast, grads = ("cuda", torch.float16, False), {0: model(x).detach()}
    step = [CapturedCall(0, (x,), {}, random_state(found), autocast, grads)]

    def devices():
        played = StepReplayer(
            found, Applier((), Facts(), found), copy.deepcopy(([model], [optimizer])), [0]
        ).play([step])
        return {str(tensor.device) for tensor in (*played.outputs[0], *played.gradients[0], *played.updates)}

    assert devices() == {"cuda:1"}
    held = torch.empty(torch.cuda.mem_get_info(DEVICE)[0] - 100 * 2**20, dtype=torch.uint8, device=DEVICE)
    assert devices() == {"cpu"}
    del held


@check
def trying_out_a_loss_draws_nothing():
    def noisy(model, batch):
        return functional.mse_loss(functional.dropout(model(batch[0]), 0.5), batch[1])

    model, batch = (
        nn.Linear(8, 1).to(DEVICE),
        (torch.randn(6, 8, device=DEVICE), torch.randn(6, 1, device=DEVICE)),
    )
    before = torch.cuda.get_rng_state(DEVICE)
    with contextlib.suppress(LoopError):  # it is random in evaluation, too
        ReductionTest(torch, model, lambda part: noisy(model, part)).run(batch, 6)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)


@check
def ranks_draw_for_themselves_on_their_device():
    torch.manual_seed(7)
    plain, common, own = torch.rand(4, device=DEVICE), [], []
    for rank in range(2):
        torch.manual_seed(7)
        streams = Streams(torch, rank)
        streams.use_own()
        own.append(torch.rand(4, device=DEVICE))
        with streams.common():
            common.append(torch.rand(4, device=DEVICE))
    assert not torch.equal(*own)
    assert all(torch.equal(each, plain) for each in common)


@check
def ranks_with_a_card_each_exchange_over_nccl():
    """The same card is the current one in both, as in scripts that never call set_device."""
    place, here = torch.distributed.HashStore(), SimpleNamespace(rank=0, world_size=2)
    backends = []
    for other in ("cuda:0", "cuda:1"):
        place.set("device 1", f"{os.uname().nodename} {torch.cuda.get_device_properties(other).uuid}")
        backends.append(_backend_of_cuda(torch, here, place, DEVICE))
    assert backends == ["cpu:gloo,cuda:nccl", "gloo"]


@check
def an_overflow_on_the_device_leaves_the_step_out():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    undo = AUTOCAST.apply(
        SimpleNamespace(
            torch=torch,
            device=DEVICE,
            device_type="cuda",
            roots=[],
            parameters=list(model.parameters()),
            optimizers=[optimizer],
        ),
        "float16",
        Ledger(),
    )
    before = [p.detach().clone() for p in model.parameters()]
    (model(torch.ones(4, 8, device=DEVICE)).sum() * 1e38).backward()  # infinite at the leaves, after scaling
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.zero_grad()
    model(torch.ones(4, 8, device=DEVICE)).sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], model[0].weight)
    undo()


@check
def digests_are_those_of_the_host_and_wait_for_nothing():
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(0, 2, shape, generator=draw).mul(7).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.float64)
        for shape in ((), (0, 3), (5,), (3, 70), (9, 5, 7))
    ]
    tensors += [torch.full((40,), float("nan")), tensors[-2].T, tensors[-1].transpose(0, 2)]
    with mock.patch.multiple(parity, ROW=32, DEVICE_PART=128):
        on_card = [tensor.to(DEVICE) for tensor in tensors]
        torch.cuda.set_sync_debug_mode("error")
        found = parity.fingerprints(on_card, torch)
        torch.cuda.set_sync_debug_mode("default")
        assert parity.digest_of(found) == parity.digest(tensors, torch)
        for one, other in zip(found, parity.fingerprints(tensors, torch), strict=True):
            assert one[0] == other[0], one[0]
            assert int(one[1]) == int(other[1]), one[0]


@check
def dropout_under_autocast_drops_what_it_drops_in_float32():
    """On a GPU, the same seed may drop other elements of a tensor in half precision."""

    def mirrored(draw):
        def other(x, *args, **kwargs):
            drawn = draw(x, *args, **kwargs)
            if x.dtype is not torch.bfloat16:
                return drawn
            return drawn.flip(0) if isinstance(drawn, torch.Tensor) else [part.flip(0) for part in drawn]

        return other

    model = nn.Sequential(nn.Linear(8, 256), nn.Dropout(0.3)).to(DEVICE)
    x = torch.ones(64, 8, device=DEVICE, requires_grad=True)
    torch.manual_seed(3)
    plain = model(x)
    with (
        mock.patch.object(functional, "dropout", mirrored(functional.dropout)),
        mock.patch.object(torch, "native_dropout", mirrored(torch.native_dropout)),
    ):
        state = torch.cuda.get_rng_state(DEVICE)
        undo = AUTOCAST.apply(context(model), "bfloat16", Ledger())
        assert torch.equal(state, torch.cuda.get_rng_state(DEVICE)), "it has drawn"
        torch.manual_seed(3)
        half = model(x)
        half.sum().backward()
        undo()
    assert torch.equal(plain == 0, half == 0)
    assert torch.allclose(plain, half, rtol=2**-6, atol=2**-6)
    gradient, x.grad = x.grad, None
    plain.sum().backward()
    assert (x.grad - gradient).norm() < 2**-6 * x.grad.norm()


def replica_of(model, lever):
    """The verdict of a replica after a few steps."""
    optimizer = torch.optim.Adam(model.parameters())
    found = TrainingContext(torch, Listener(), Ledger())
    found.register_objects([model], [optimizer], [])
    replica = StepReplica(found, Applier([lever], Facts(), found), [Choice(lever.name, True)])
    for _ in range(6):
        x = torch.randn(8, 8, device=DEVICE)
        optimizer.zero_grad()
        replica.forward_begin(model, (x,), {})
        output = model(x)
        replica.forward_end(model, output)
        functional.cross_entropy(output, torch.zeros(8, dtype=torch.long, device=DEVICE)).backward()
        replica.optimizer_begin(optimizer)
        optimizer.step()
        found.steps += 1
    return replica.judge()


def one_lever(apply):
    return Lever(
        "one", Moment.STEP, Effect.ROUNDING, lambda *_: Options((True,)), str, apply=apply, live=True
    )


@check
def a_replica_leaves_memory_to_others():
    """It runs out of its own share, gives back what it took, and blames no lever."""
    tried = []

    def apply(context, value, ledger):
        def fill(*_):
            free, total = torch.cuda.mem_get_info(DEVICE)
            tried.append(free / total)
            torch.empty(int(0.9 * free), dtype=torch.uint8, device=DEVICE)

        return context.roots[0].register_forward_pre_hook(fill).remove

    gc.collect()
    torch.cuda.empty_cache()  # what other checks have left would be used first
    model = nn.Linear(8, 5).to(DEVICE)
    torch.cuda.set_per_process_memory_fraction(0.97, DEVICE)
    verdict = replica_of(model, one_lever(apply))
    assert tried
    assert "too little memory" in verdict.get("failure", ""), verdict
    assert abs(torch.cuda.get_per_process_memory_fraction(DEVICE) - 0.97) < 1e-6
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    verdict = replica_of(model, one_lever(lambda context, value, ledger: ledger.restore))
    assert all(each["passed"] for each in verdict["checks"]), verdict
    tried.clear()
    model = nn.Linear(8, 2**20).to(DEVICE)
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(800, 2**31)):
        verdict = replica_of(model, one_lever(apply))
    assert "too little memory" in verdict.get("failure", ""), verdict
    assert not tried, "the model was copied"


def main():
    found = {}
    for name, function in CHECKS.items():
        try:
            function()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-2)}"
        if torch.cuda.current_device():
            found[name] += "the current device has changed"
    print(json.dumps(found), flush=True)
    os._exit(0)  # an autograd thread that still frees Python objects would end the process with a signal


if __name__ == "__main__":
    main()
