"""Trains the given cases as one process or as a rank with a shard of each weight, and records the results.

    python shard_cases.py CASES.json OUT

Writes OUT/<case>.<ranks>.<rank>.json, and the checkpoint of the script to OUT/<case>.<ranks>.<rank>.pt.
"""

import copy
import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed.fsdp
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from known_bad_levers import sums_gradients

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.distributed.sharding import Sharding
from flatout.job.rank_environment import RankEnvironment
from flatout.levers.recompute import repeated

WORDS, WIDTH = 11, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Norm(nn.LayerNorm):
    """Computes in float32, whatever the dtype of the rest."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Words(nn.Module):
    """A tied embedding, equal blocks, a scalar, a head with fewer rows than there may be ranks, and an unused
    layer.
    """

    def __init__(self, case):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale, self.unused, self.kinds = (
            nn.Parameter(torch.tensor(0.5)),
            nn.Linear(WIDTH, 3),
            nn.Linear(WIDTH, 3),
        )
        if case["tied"]:
            self.out.weight = self.embed.weight
        if case["frozen"]:
            self.blocks[0].requires_grad_(False)
        self.to(getattr(torch, case["dtype"]))
        if case["other"]:  # a different dtype among the others
            self.blocks[1].norm = Norm(WIDTH)

    def encode(self, tokens):
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return x

    def decode(self, x):
        return self.out(x) * self.scale

    def forward(self, tokens):
        x = self.encode(tokens)
        return self.decode(x), self.kinds(x)


def data_of(case):
    draw = torch.Generator().manual_seed(1)
    length = case["length"]
    return torch.utils.data.TensorDataset(
        torch.randint(0, WORDS, (length, 5), generator=draw),
        torch.randint(0, WORDS, (length,), generator=draw),
        torch.randint(0, 3, (length,), generator=draw),
    )


def loss_of(model, case, batch):
    tokens, word, kind = batch
    if case["pieces"]:  # never through the model's own forward
        x = model.embed(tokens)
        x += 1.0  # in place
        x = x.mean(1) - 1.0
        for block in model.blocks:
            x = x + block.down(torch.relu(block.up(block.norm(x))))
        words, kinds = (
            model.out(x) * model.scale,
            nn.functional.linear(x, model.kinds.weight, model.kinds.bias),
        )
    else:
        words, kinds = model(tokens)
    loss = nn.functional.cross_entropy(words, word, reduction=case["loss"]) + nn.functional.cross_entropy(
        kinds, kind, reduction=case["loss"]
    )
    if case["penalty"]:
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.blocks.parameters())
    return loss


def optimizers_of(model, case):
    make = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        "adam": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=case["foreach"]),
    }
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    if case["two"]:
        return [make[case["optimizer"]](decayed), make[case["optimizer"]](others)]
    return [
        make[case["optimizer"]](
            [{"params": decayed, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}]
        )
    ]


def live_bytes():
    """The bytes of all live tensors in this process, each memory counted once.

    A DTensor itself has none; its local tensor has.
    """
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each._local_tensor for each in tensors if type(each).__name__ == "DTensor"]
    with torch._C.DisableTorchFunctionSubclass():
        return sum(
            {
                s._cdata: s.nbytes()
                for each in tensors
                if type(each).__name__ != "DTensor"
                for s in [each.untyped_storage()]
            }.values()
        )


def tensors_of(held):
    """All tensors in a state, at any depth."""
    if isinstance(held, torch.Tensor):
        return [held]
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, list) else []
    return [tensor for each in inside for tensor in tensors_of(each)]


def train(case, out):
    torch.manual_seed(case["seed"])
    data = data_of(case)
    loader = torch.utils.data.DataLoader(data, batch_size=case["batch"], shuffle=True)
    held_out = torch.utils.data.DataLoader(data, batch_size=7)
    model = Words(case)
    kind, everything = type(model), tuple(model.parameters())
    optimizers = optimizers_of(model, case)
    averaged = (
        torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        if case["averaged"]
        else None
    )
    if case["resume"]:
        kept = torch.load(case["resume"])
        model.load_state_dict(kept["model"])
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=case["scaled"])
    found = {"gradients": None, "losses": [], "norms": [], "evaluations": []}
    steps, best = 0, None
    while steps < case["steps"]:
        for at, batch in enumerate(loader):
            loss = loss_of(model, case, batch)
            scaler.scale(loss if case["window"] == 1 else loss / case["window"]).backward()
            if case["window"] == 1:
                found["losses"].append(loss.item())
            if (at + 1) % case["window"] and at + 1 < len(loader):
                continue
            if case["scaled"]:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            if case["clip"] == "norm":
                found["norms"].append(float(f"{nn.utils.clip_grad_norm_(everything, 0.3):.4f}"))
            elif case["clip"] == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
            if found["gradients"] is None:
                found["gradients"] = [
                    p.grad.flatten().tolist() if p.grad is not None else [] for p in model.parameters()
                ]
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            if averaged is not None:
                averaged.update_parameters(model)
            steps += 1
            if steps == case["steps"] // 2:
                best = copy.deepcopy(model.state_dict())
                kept = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            if steps == case["steps"]:
                break
        with torch.no_grad():
            found["evaluations"].append(sum(loss_of(model, case, batch).item() for batch in held_out))
            found["evaluations"].append(model.decode(model.embed.weight[:3]).norm().item())
        if case["reload"] and best is not None:
            model.load_state_dict(best)  # and on from there
            for optimizer, state in zip(optimizers, kept, strict=True):
                optimizer.load_state_dict(state)
            best = None
    found["weights"] = [value.double().flatten().tolist() for value in model.state_dict().values()]
    found["names"] = list(model.state_dict())
    found["types"] = [
        type(model) is kind,
        type(model.blocks[0]) is Block,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in everything),
        all(isinstance(p, nn.Parameter) for p in model.parameters()),
        sorted(
            {
                type(value).__name__
                for value in tensors_of(
                    [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
                )
            }
        ),
    ]
    found["printed"] = [
        str(model),
        repr(model.out.weight.data.round(decimals=1)),
        f"{model.out.weight.mean():.3f}",
        f"{model.out.weight[0, 0].item():.9f}",
        model.out.weight.detach().numpy().round(2).tolist(),
    ]
    if averaged is not None:
        found["averaged"] = [p.double().flatten().tolist() for p in averaged.parameters()]
    torch.save(
        {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]},
        f"{out}.pt",
    )
    torch.save([model, copy.deepcopy(model)], f"{out}.module")
    return found


def weigh():
    """The bytes that a rank holds after some steps: a model of blocks only, so that all of it is sharded."""
    before = live_bytes()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)))
    everything = [*model.parameters()]
    optimizer = torch.optim.AdamW(everything)
    data = torch.utils.data.DataLoader(torch.randn(12, 64), batch_size=4)
    for x in data:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    del x, loss
    return {"bytes": live_bytes() - before}


def run(cases, out, procs, rank):
    """Run the cases for this number of ranks as this rank; with one, run the plain program."""
    torch.set_num_threads(1)
    for at, case in enumerate(cases):
        if procs not in case["procs"]:
            continue
        ledger = Ledger()
        context = TrainingContext(torch, Listener(), ledger)
        context.install()
        if procs > 1:
            here = RankEnvironment(
                rank, rank, procs, case.get("machine") or procs, f"file://{out}/rendezvous.{at}.{procs}"
            )
            context.data_parallel = divided = DataParallelScript(
                torch, context, here, SplitSettings.read(case["division"]), ledger
            )
            divided.install()
            divided.sharding = Sharding(
                torch, context, here, "node", lambda module: repeated(torch, module), ledger
            )
            if case.get("wrong"):
                sums_gradients(divided.sharding)
        name = f"{at}.{procs}.{rank}"
        found = weigh() if case.get("weigh") else train(case, out / name)
        ledger.restore()
        (out / f"{name}.json").write_text(json.dumps(found))


def forked(cases, out, procs):
    """Fork the ranks, since importing torch takes longer than all their work."""
    children = []
    for rank in range(procs):
        child = os.fork()
        if not child:
            code = 1
            try:
                run(cases, out, procs, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank of {procs} failed")


def read_back(cases, out):
    """Read the checkpoint of two ranks in one plain process."""
    found = {}
    for at, case in enumerate(cases):
        if case.get("weigh") or case.get("wrong") or 2 not in case["procs"]:
            continue
        torch.manual_seed(0)
        model, kept, one = Words(case), torch.load(out / f"{at}.2.0.pt"), torch.load(out / f"{at}.1.0.pt")
        model.load_state_dict(kept["model"], strict=True)
        optimizers = optimizers_of(model, case)
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        whole, copied = torch.load(out / f"{at}.2.0.module", weights_only=False)
        whole(data_of(case).tensors[0])
        tensors = [*kept["model"].values(), *whole.parameters(), *copied.parameters()]
        tensors += [
            value
            for state in kept["optimizers"]
            for each in state["state"].values()
            for value in each.values()
            if isinstance(value, torch.Tensor)
        ]
        found[at] = {
            "names": list(kept["model"]) == list(one["model"]),
            "kinds": sorted({type(value).__name__ for value in tensors}),
            "groups": [
                a["param_groups"] == b["param_groups"] and list(a["state"]) == list(b["state"])
                for a, b in zip(kept["optimizers"], one["optimizers"], strict=True)
            ],
            "kept": [value.double().flatten().tolist() for value in model.state_dict().values()],
            "state": [
                [
                    value.double().flatten().tolist()
                    for each in state["state"].values()
                    for value in each.values()
                    if isinstance(value, torch.Tensor)
                ]
                for state in (*kept["optimizers"], *one["optimizers"])
            ],
            "modules": [
                all(
                    torch.equal(a, b)
                    for a, b in zip(model.state_dict().values(), each.state_dict().values(), strict=True)
                )
                and (each.out.weight is each.embed.weight) is case["tied"]
                and set(vars(each)) == set(vars(model))
                for each in (whole, copied)
            ],
        }
    (out / "read_back.json").write_text(json.dumps(found))


def main():
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for procs in (1, 2, 4):
        forked(cases, out, procs)
    read_back(cases, out)


if __name__ == "__main__":
    main()
