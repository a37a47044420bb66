"""A script's own DistributedDataParallel under levers that change its gradient exchange.

Writes OUT/<rank>.json, which test_script_ddp.py reads.

    torchrun --nproc-per-node 2 ddp_cases.py OUT [CASE...]
    ddp_cases.py OUT RANKS CASE...          the same, in processes forked after importing torch
"""

import copy
import hashlib
import io
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parents[1]))
from known_bad_levers import KNOWN_BAD

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers.comm_compression import LEVER as compression
from flatout.levers.ddp_flags import LEVER as flags
from flatout.schema.facts import Facts
from flatout.schema.lever import Options

VIEWS, QUIET, STATIC = {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}, {"static_graph": True}
ON, OFF, END = 2, 9, 12  # steps


class Net(nn.Module):
    """``mask`` is a constant buffer; ``unused`` gets no gradient, ``aside`` gets one in some steps only."""

    def __init__(self, *, norm=False, recompute=False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.unused, self.aside = nn.Linear(2, 2), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)))
        self.recompute = recompute

    def forward(self, x, aside=False):
        x = self.norm(torch.tanh(self.first(x)))
        x = checkpoint(self.second, x, use_reentrant=False) if self.recompute else self.second(x)
        return self.last(torch.tanh(x @ self.mask) + (self.aside(x) if aside else 0.0))


class Program:
    """Trains on batches that differ from rank to rank. ``script`` may add its own work to each step."""

    def __init__(
        self,
        *,
        to_none=True,
        passes=1,
        aside=lambda step: False,
        script=None,
        unused=True,
        static=False,
        views=False,
        rate=0.1,
        **net,
    ):
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        self.context.install()
        self.source = torch.Generator().manual_seed(torch.distributed.get_rank())
        torch.manual_seed(0)
        made = Net(**net)
        if not unused:
            del made.unused, made.aside
        self.model = DistributedDataParallel(
            made,
            bucket_cap_mb=0.004,
            find_unused_parameters=unused,
            static_graph=static,
            gradient_as_bucket_view=views,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        self.to_none, self.passes, self.aside, self.script = to_none, passes, aside, script
        self.steps, self.digests, self.held = 0, [], []

    def step(self, x=None):
        self.optimizer.zero_grad(set_to_none=self.to_none)
        for at in range(self.passes):
            last = at == self.passes - 1
            with nullcontext() if last else self.model.no_sync():
                given = torch.randn(8, 24, generator=self.source) if x is None else x
                self.model(given, *((True,) if self.aside(self.steps) else ())).square().mean().backward()
        if self.script is not None:
            self.script(self)
        self.held.append({"views": self.model.gradient_as_bucket_view, "static": self.model.static_graph})
        self.optimizer.step()
        self.steps += 1
        self.digests.append(digest(self.model.module.state_dict().values()))

    def gradient(self):
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None])

    def leave(self):
        self.context.rest()
        self.ledger.restore()


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[
        :16
    ]


def lived(lever=None, value=None, **program):
    """The results of a program that has trained with its lever on from step ON to step OFF."""
    torch_s_own = (
        DistributedDataParallel._pre_forward,
        DistributedDataParallel.register_comm_hook,
        torch.Tensor.detach_,
    )
    live, undo = Program(**program), None
    for step in range(END):
        if step == ON and lever is not None:
            undo = lever.apply(live.context, value, Ledger())
        if step == OFF and undo is not None:
            undo()
        live.step()
    patches = (
        DistributedDataParallel._pre_forward,
        DistributedDataParallel.register_comm_hook,
        torch.Tensor.detach_,
    )
    found = {
        "digests": live.digests,
        "held": live.held,
        "reports": live.context.reports,
        "left": patches == torch_s_own,
        "gradients are views": any(p.grad is not None and p.grad._is_view() for p in live.model.parameters()),
        "flags": [live.model.gradient_as_bucket_view, live.model.static_graph, live.model.broadcast_buffers],
    }
    live.leave()
    return found


def offered(lever, **program):
    live = Program(**program)
    live.step()
    answer = lever.applies(Facts(), live.context)
    live.leave()
    return [list(answer.values), answer.effect] if isinstance(answer, Options) else answer.reason


# -- scripts --------------------------------------------------------------------------------------------------------------


def keeps(live):
    """Keeps the gradients of this step for the next one."""
    before, live.kept = (
        getattr(live, "kept", None),
        [p.grad for p in live.model.parameters() if p.grad is not None],
    )
    if before is not None:
        for p, old in zip((p for p in live.model.parameters() if p.grad is not None), before, strict=True):
            p.grad.add_(old, alpha=0.01)


def holds_on_one_rank(live):
    """Keeps the gradients of this step until the next one has computed its own; nothing reads them."""
    live.kept = [p.grad for p in live.model.parameters()] if torch.distributed.get_rank() else None


def detaches(live):
    for p in live.model.parameters():
        if p.grad is not None:
            p.grad.detach_()


def replaces(live):
    for p in live.model.parameters():
        p.grad = p.grad * 0.5 if p.grad is not None and live.steps % 2 else p.grad


def moves_a_mask(live):
    """Changes a buffer now and then, on one rank or the other, in place or by replacing the tensor."""
    rank, module = torch.distributed.get_rank(), live.model.module
    if live.steps in (3, 6) and rank == live.steps // 3 - 1:
        module.mask[live.steps] = 0.5
    if live.steps == 7:
        module.mask = module.mask * (1.0 + rank)


# -- cases ----------------------------------------------------------------------------------------------------------------


def case_flags():
    both = {**VIEWS, **QUIET}
    programs = {
        "plain": {},
        "kept gradients": {"to_none": False},
        "accumulated": {"passes": 3},
        "accumulated and kept": {"passes": 2, "to_none": False},
        "all used": {"unused": False},
        "batch norm": {"norm": True},
        "checkpointing": {"recompute": True},
        "static": {"static": True},
        "changing graph": {"aside": lambda step: step % 3 == 1},
        "detaches": {"script": detaches},
        "replaces": {"script": replaces},
    }
    return {
        name: {
            "plain": lived(**program),
            "views": lived(flags, VIEWS, **program),
            "both": lived(flags, both, **program),
        }
        for name, program in programs.items()
    }


def case_keeps():
    return {
        "plain": lived(script=keeps),
        "views": lived(flags, VIEWS, script=keeps),
        "one rank": lived(flags, VIEWS, script=holds_on_one_rank),
    }


def case_static():
    changing = {"aside": lambda step: step in (1, 4)}
    info = []
    for asked, script in (
        (STATIC, {}),
        (VIEWS, {"static": True}),
    ):  # a graph that becomes static, and one that the script declared static
        sends = Program(**script)
        sends.step()
        flags.apply(sends.context, asked, Ledger())
        compression.apply(sends.context, "bf16", Ledger())
        for _ in range(8):
            sends.step()
        info.append(
            [
                sends.model._get_ddp_logging_data()["comm_hook"],
                sends.model.static_graph,
                digest(sends.model.module.state_dict().values()),
            ]
        )
        sends.leave()
    never = Program(unused=False)
    never.step()
    try:
        flags.apply(never.context, STATIC, Ledger())
        said = ""
    except LookupError as error:
        said = str(error)
    never.leave()
    return {
        "plain": lived(),
        "static": lived(flags, STATIC),
        "and bf16": info,
        "and views": lived(flags, {**STATIC, **VIEWS}),
        "needless": said,
        "checkpointing": [lived(recompute=True), lived(flags, STATIC, recompute=True)],
        "accumulated": [lived(passes=2), lived(flags, STATIC, passes=2)],
        "changing": [lived(**changing), lived(flags, STATIC, **changing)],
    }


def case_buffers():
    really, sent = torch.distributed._broadcast_coalesced, []

    def counted(group, tensors, *args):
        sent.append(len(tensors))
        return really(group, tensors, *args)

    torch.distributed._broadcast_coalesced = counted
    found = {}
    try:
        for name, program in (
            ("still", {}),
            ("moves", {"script": moves_a_mask}),
            ("batch norm", {"norm": True}),
        ):
            for value in (None, QUIET):
                sent.clear()
                life = lived(*((flags, value) if value else ()), **program)
                found[f"{name}{' quiet' if value else ''}"] = {
                    **life,
                    "sent": len(sent) - 1,
                }  # without the buffer of a module that is created
    finally:
        torch.distributed._broadcast_coalesced = really
    return found


def case_offered():
    alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)

    def hooks(live):
        live.model.register_comm_hook(None, default_hooks.allreduce_hook)

    def is_alone(live):
        live.model = DistributedDataParallel(Net(), process_group=alone, find_unused_parameters=True)

    def freezes(live):
        live.step()
        live.model.module.last.bias.requires_grad_(False)

    found = {
        "flags": offered(flags),
        "compression": offered(compression),
        "batch norm": offered(flags, norm=True),
        "own views": [offered(flags, views=True), offered(flags, views=True, norm=True)],
    }
    for name, prepared in (("hooked", hooks), ("single", is_alone), ("frozen", freezes)):
        live = Program()
        prepared(live)
        live.step()
        found[name] = [lever.applies(Facts(), live.context).reason for lever in (flags, compression)]
        live.leave()
    return found


def case_compression():
    """The same batch in each step and no update, so each pass has the same gradient."""
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(5 + torch.distributed.get_rank()))
    found = {}
    for name, values in (
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("powersgd", {"kind": "powersgd", "rank": 1, "after": 1}),
        ("bad", None),
    ):
        live = Program(rate=0.0)
        gradients = []
        for step in range(10):
            if step == 3:
                ledger = Ledger()
                undo = (
                    compression.apply(live.context, values, ledger)
                    if values
                    else KNOWN_BAD["comm_compression"](live.context, "bf16", ledger)
                )
            if step == 7:
                undo()
            live.step(x)
            gradients.append(live.gradient().tolist())
        found[name] = {
            "gradients": gradients,
            "reports": live.context.reports,
            "buckets": len(live.model.reducer._get_zeros_like_grad_buckets()),
        }
        live.leave()
    return found


def case_both():
    """Levers that are switched on together, in the order that a search uses, and a script that later
    registers its own hook.
    """
    live = Program()
    ways, on = [], []
    for step in range(24):
        if step == 2:
            on.append(flags.apply(live.context, VIEWS, Ledger()))
        if step == 7:
            on.append(compression.apply(live.context, "bf16", Ledger()))
        if step == 10:
            on.pop()()
        if step == 13:
            on.pop()()
        if step == 15:
            on.append(compression.apply(live.context, "bf16", Ledger()))
        if step == 18:
            live.model.register_comm_hook(None, default_hooks.allreduce_hook)
        if step == 21:
            on.pop()()
        live.step()
        ways.append(live.model._get_ddp_logging_data().get("comm_hook", ""))
    found = {
        "hooks": ways,
        "views": [each["views"] for each in live.held],
        "same weights": digest(live.model.module.state_dict().values()),
        "later": flags.applies(Facts(), live.context).reason,
    }
    live.leave()
    return found


def case_copies():
    """A module that is saved or copied under the levers is that of the script."""
    live = Program()
    live.step()
    flags.apply(live.context, VIEWS, Ledger())
    compression.apply(live.context, "fp16", Ledger())
    for _ in range(7):
        live.step()
    held = io.BytesIO()
    torch.save(live.model, held)
    loaded = torch.load(io.BytesIO(held.getvalue()), weights_only=False)
    copied = copy.deepcopy(live.model.module)
    found = {
        "ours": b"flatout" in held.getvalue(),
        "loaded": digest(loaded.module.state_dict().values()),
        "copied": digest(copied.state_dict().values()),
        "itself": live.digests[-1],
    }
    live.leave()
    return found


def case_bad():
    return {"plain": lived(), "bad": lived(BAD, QUIET)}


def case_three():
    """The order in which three ranks are summed shows in the last bits."""
    kept = {"to_none": False}
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(5 + torch.distributed.get_rank()))
    again = []
    for unused, on, off in (
        (True, 2, 4),
        (False, 3, 5),
        (False, 1, 2),
    ):  # from the first backward pass torch learns the buckets for the second
        live, gradients = Program(rate=0.0, unused=unused), []
        for step in range(7):
            if step == on:
                undo = compression.apply(live.context, "bf16", Ledger())
            if step == off:
                undo()
            live.step(x)
            gradients.append(live.gradient().tolist())
        live.leave()
        plain = Program(rate=0.0, unused=unused)
        for _ in range(5):
            plain.step(x)
        again.append(
            gradients[off] == gradients[5] == gradients[6] == plain.gradient().tolist() != gradients[on]
        )
        plain.leave()
    return {
        "lives": [[lived(**program), lived(flags, VIEWS, **program)] for program in ({}, {"unused": False})],
        "kept": [lived(**kept), lived(flags, VIEWS, **kept)],
        "offered": offered(flags),
        "same gradient again": again,
    }


class BAD:
    apply = staticmethod(KNOWN_BAD["ddp_flags"])


def forked(rank, folder, ranks, *cases):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": ranks}
    main(
        folder,
        cases,
        init_method=f"file://{Path(folder).resolve()}/rendezvous",
        rank=rank,
        world_size=int(ranks),
    )


def main(folder, cases, **place):
    torch.distributed.init_process_group("gloo", **place)
    torch.set_num_threads(1)
    chosen = {
        name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")
    }
    answers = {name: chosen[name]() for name in cases or [each for each in chosen if each != "three"]}
    (Path(folder) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    main(folder, cases) if "RANK" in os.environ else torch.multiprocessing.start_processes(
        forked, (folder, *cases), int(cases[0]), start_method="fork"
    )
