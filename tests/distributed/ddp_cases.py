"""A script's own DistributedDataParallel under levers, and the lines of the guide to ranks.

    ddp_cases.py OUT RANKS

Forks the ranks after importing torch. Each writes OUT/<rank>.json, which test_script_ddp.py reads.
"""

import io
import json
import os
import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from known_bad_levers import KNOWN_BAD

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers.comm_compression import LEVER as compression
from flatout.levers.ddp_flags import LEVER as flags
from flatout.schema.facts import Facts
from flatout.schema.lever import Options

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "ranks.md"
VIEWS, STATIC = {"gradient_as_bucket_view": True}, {"static_graph": True}
STEPS = 6


class Net(nn.Module):
    """``unused`` gets no gradient."""

    def __init__(self, norm=False):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(24, 32), nn.Linear(32, 3), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Program:
    """Trains on batches that differ from rank to rank. ``early`` acts before the script makes anything."""

    def __init__(self, early=None, to_none=True, passes=1, norm=False, rate=0.1, unused=True, **arguments):
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        if early is not None:
            early(self.context)
        self.context.install()
        self.source = torch.Generator().manual_seed(torch.distributed.get_rank())
        torch.manual_seed(0)
        net = Net(norm)
        if not unused:
            del net.unused
        self.model = DistributedDataParallel(
            net, bucket_cap_mb=0.002, find_unused_parameters=unused, **arguments
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        self.to_none, self.passes, self.steps = to_none, passes, []

    def step(self, x=None):
        self.optimizer.zero_grad(set_to_none=self.to_none)
        for _ in range(self.passes):
            given = torch.randn(8, 24, generator=self.source) if x is None else x
            self.model(given).square().mean().backward()
        self.optimizer.step()
        self.steps.append(weights_of(self.model))

    def gradient(self):
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]).tolist()

    def leave(self):
        self.context.stop_observing()
        self.ledger.restore()
        return self.steps


def weights_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def trained(act=None, value=None, **program):
    """The weights after each step, and the arguments in effect."""
    ledger = Ledger()
    live = Program(early=act and (lambda context: act(context, value, ledger)), **program)
    for _ in range(STEPS):
        live.step()
    in_effect = [live.model.gradient_as_bucket_view, live.model.static_graph]
    ledger.restore()
    return {"steps": live.leave(), "flags": in_effect}


def case_flags():
    programs = {
        "plain": {},
        "kept gradients": {"to_none": False},
        "accumulated": {"passes": 3},
        "batch norm": {"norm": True},
        "all used": {"unused": False},
    }
    return {
        name: [
            trained(**program),
            trained(flags.apply, VIEWS, **program),
            trained(flags.apply, STATIC, **program),
        ]
        for name, program in programs.items()
    } | {"bad": [trained(KNOWN_BAD["ddp_flags"], VIEWS)]}


def case_offered():
    alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)

    def asked(prepare=lambda live: None, **program):
        live = Program(**program)
        prepare(live)
        live.step()
        answers = [lever.applies(Facts(), live.context) for lever in (flags, compression)]
        live.leave()
        return [
            [list(answer.values), answer.effect] if isinstance(answer, Options) else answer.reason
            for answer in answers
        ]

    return {
        "plain": asked(),
        "own views": asked(gradient_as_bucket_view=True),
        "hooked": asked(lambda live: live.model.register_comm_hook(None, default_hooks.allreduce_hook)),
        "single": asked(process_group=alone),
    }


def case_compression():
    """The same batch in each step and no update, so each pass has the same gradient."""
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(5 + torch.distributed.get_rank()))
    answer = {}
    for value in ("bf16", "fp16", {"kind": "powersgd", "rank": 1, "after": 2}, "bad"):
        live = Program(rate=0.0)
        live.step(x)
        plain, ledger = live.gradient(), Ledger()
        (KNOWN_BAD["comm_compression"] if value == "bad" else compression.apply)(live.context, value, ledger)
        gradients = []
        for _ in range(4):
            live.step(x)
            gradients.append(live.gradient())
        saved = io.BytesIO()
        torch.save(live.model, saved)
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        answer[value["kind"] if isinstance(value, dict) else value] = {
            "plain": plain,
            "gradients": gradients,
            "reports": live.context.reports,
            "loaded": weights_of(loaded) == live.steps[-1],
        }
        live.leave()
    return answer


def case_guide():
    """The lines for local steps in the guide, with shorter numbers."""
    lines = next(
        part for part in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "LocalSGD" in part
    )
    live, apart = Program(unused=False), []
    draws = [torch.randn(8, 24, generator=live.source) for _ in range(12)]

    class Steps:
        def __iter__(self):
            for x in draws:
                yield x
                apart.append(weights_of(live.model))

    names = {"model": live.model, "optimizer": live.optimizer, "loader": Steps(), "loss_of": torch.square}
    names["loss_of"] = lambda output: output.square().mean()
    exec(lines.replace("100", "4"), names)
    live.leave()
    return apart


def forked(rank, folder, ranks):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{Path(folder).resolve()}/rendezvous", rank=rank, world_size=int(ranks)
    )
    torch.set_num_threads(1)
    if ranks == "3":
        answers = {
            "offered": case_offered(),
            "plain": trained(unused=False),
            "views": trained(flags.apply, VIEWS, unused=False),
        }
    else:
        cases = (case_flags, case_offered, case_compression, case_guide)
        answers = {case.__name__.removeprefix("case_"): case() for case in cases}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"WORLD_SIZE": sys.argv[2]}
    torch.multiprocessing.start_processes(forked, tuple(sys.argv[1:]), int(sys.argv[2]), start_method="fork")
