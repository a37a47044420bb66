"""Two ranks that share the layers of one model, compared with the raw loop in the same process:

``two_parallel_ranks.py RANK FOLDER``. Writes FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path

import pipelines
import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from flatout import Loop, Pipeline
from flatout.schema.errors import LoopError

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
STEPS = 10
STYLES = {"blocks.*.up": ColwiseParallel, "blocks.*.down": RowwiseParallel}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down, self.drop = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.blocks, self.head = (
            nn.Linear(6, 16),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_count(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=2), (batch[1] != 2).sum()


def made(dtype, seed=0):
    torch.manual_seed(seed)
    model = Network().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(dtype):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype), torch.arange(8) % 3)
        for _ in range(2 * STEPS)
    ]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def seen(model, losses, norms):
    return {
        "losses": losses,
        "norms": norms,
        "weights": [whole(p).detach().double().flatten().tolist() for p in model.parameters()],
        "names": list(model.state_dict()),
    }


def raw(dtype, loss, window, clip):
    """A hand-written loop: one process, no Loop."""
    model, optimizer = made(dtype)
    batches, losses, norms = data(dtype), [], []
    torch.manual_seed(5)
    for at in range(0, len(batches), window):
        x, y = (torch.cat(each) for each in zip(*batches[at : at + window], strict=True))
        found = loss(model, (x, y))
        found = found[0] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        found.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(float(found.detach()))
        if len(losses) == STEPS:
            break
    return seen(model, losses, norms)


def parallel(dtype, loss, window, clip, **more):
    model, optimizer = made(dtype, seed=RANK)  # all ranks use rank 0's weights
    loop = Loop(
        model,
        optimizer,
        loss,
        data(dtype),
        steps=STEPS,
        effective_batch=8 * window,
        clip=clip,
        parallel={n: s() for n, s in STYLES.items()},
        **more,
    )
    torch.manual_seed(5)
    steps = list(loop)
    sliced = [
        type(p).__name__
        for name, p in model.named_parameters()
        if "up.weight" in name or "down.weight" in name
    ]
    own = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
    return {
        **seen(model, [float(step.loss) for step in steps], [float(step.grad_norm) for step in steps]),
        "sliced": sliced,
        "own": own,
        "all": sum(p.numel() for p in model.parameters()),
        "state": own_state(optimizer),
        "parts": steps[0].parts,
    }


def own_state(optimizer):
    return sorted(
        {
            type(value).__name__
            for state in optimizer.state.values()
            for name, value in state.items()
            if name == "exp_avg"
        }
    )


def words(change=lambda model, optimizer: None, loss=loss_fn, batches=None, **how):
    model, optimizer = made(torch.float32)
    change(model, optimizer)
    try:
        list(
            Loop(
                model,
                optimizer,
                loss,
                batches or data(torch.float32),
                **{"parallel": {"head": ColwiseParallel()}, **how},
            )
        )
    except LoopError as error:
        return str(error)
    return ""


def begun(model, optimizer):
    loss_fn(model, data(torch.float32)[0]).backward()
    optimizer.step()


def no_memory(model, batch):
    raise torch.OutOfMemoryError("out of memory")


def fused(model, optimizer):
    optimizer.param_groups[0]["fused"] = True


def blocks(dtype, shared=False):
    """A model that is split at its children, one of which is named."""
    torch.manual_seed(RANK if distributed.is_initialized() and not shared else 0)
    model = nn.Sequential()
    for name, block in {
        "body": nn.Linear(6, 16),
        "first": Block(),
        "second": Block(),
        "head": nn.Linear(16, 3),
    }.items():
        model.add_module(name, block)
    return model.to(dtype), torch.optim.AdamW(model.parameters(), lr=1e-2)


def piped(dtype, pipeline, window, micro_batch=None, reduction=None, loss=loss_fn):
    """What this stage has learned, and the raw loop over the whole model; weights by name."""
    model, optimizer = blocks(dtype)
    loop = Loop(
        model,
        optimizer,
        loss,
        data(dtype),
        steps=STEPS,
        effective_batch=8 * window,
        micro_batch=micro_batch,
        clip=0.5,
        reduction=reduction,
        parallel=pipeline,
    )
    steps = list(loop)
    whole_model, other = blocks(dtype, shared=True)
    losses, norms, batches = [], [], data(dtype)
    for at in range(0, STEPS * window, window):
        other.zero_grad()
        found = loss(
            whole_model, tuple(torch.cat(each) for each in zip(*batches[at : at + window], strict=True))
        )
        found.backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole_model.parameters(), 0.5)))
        other.step()
        losses.append(float(found.detach()))
    raw_weights, kept = (
        whole_model.state_dict(),
        {name: p for name, p in model.state_dict().items() if p.device.type != "meta"},
    )
    return {
        "losses": [losses, [float(step.loss) for step in steps]],
        "norms": [norms, [float(step.grad_norm) for step in steps]],
        "kept": list(kept),
        "apart": max(float((p - raw_weights[name]).abs().max()) for name, p in kept.items()),
        "parts": steps[0].parts,
    }


def summed(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def piped_words(pipeline, change=lambda model: model, loss=loss_fn, **how):
    model, optimizer = blocks(torch.float32)
    try:
        list(Loop(change(model), optimizer, loss, data(torch.float32), steps=1, parallel=pipeline, **how))
    except LoopError as error:
        return str(error)
    return ""


def tied(model):
    model.second.up = model.first.up
    return model


alone = words()  # no group yet
distributed.init_process_group("gloo", init_method=f"file://{FOLDER / 'store'}", rank=RANK, world_size=2)
results = {
    "float64": [raw(torch.float64, loss_fn, 1, 0.5), parallel(torch.float64, loss_fn, 1, 0.5)],
    "float32": [raw(torch.float32, loss_fn, 1, 0.5), parallel(torch.float32, loss_fn, 1, 0.5)],
    "words": {
        "alone": alone,
        "no such module": words(parallel={"blocks.*.sideways": ColwiseParallel()}),
        "no style": words(parallel={"head": "colwise"}),
        "nothing": words(parallel={}),
        "begun": words(begun),
        "auto": words(plan="auto"),
        "sizes": words(micro_batch="auto"),
        "masters": words(precision="bf16-master"),
        "fused": words(fused),
        "memory": words(loss=no_memory),
        "batches": words(
            batches=data(torch.float32)[RANK:], steps=2, parallel={n: s() for n, s in STYLES.items()}
        ),
    },
}
nn.Dropout.forward = lambda self, x: x  # the masks of micro-batches use other random numbers
if pipelines.THERE_ARE:
    results["piped"] = {
        "float64": piped(torch.float64, Pipeline(2), 1, micro_batch=2, reduction="mean"),
        "float32": piped(torch.float32, Pipeline(["second"], "gpipe"), 1, micro_batch=4, reduction="mean"),
        "window": piped(torch.float64, Pipeline(["head"]), 2, micro_batch=4, reduction="sum", loss=summed),
        "whole": piped(torch.float64, Pipeline(2), 1),
    }
    results["piped words"] = {
        "three": piped_words(Pipeline(3)),
        "no child": piped_words(Pipeline(["third"])),
        "order": piped_words(Pipeline(["body"])),
        "schedule": piped_words(Pipeline(2, "zero")),
        "no sequence": piped_words(Pipeline(2), lambda model: nn.ModuleList([model])[0:1]),
        "tied": piped_words(Pipeline(2), tied),
        "auto": piped_words(Pipeline(2), plan="auto"),
        "bf16": piped_words(Pipeline(2), precision="bf16"),
        "reduction": piped_words(Pipeline(2), micro_batch=2),
        "uneven": piped_words(Pipeline(2), micro_batch=3, reduction="mean"),
        "nan": piped_words(Pipeline(2), loss=lambda model, batch: loss_fn(model, batch) * float("nan")),
    }
else:
    results["piped words"] = {"older": piped_words(Pipeline(2))}
results["accumulated"] = [
    raw(torch.float64, by_count, 2, 0.5),
    parallel(torch.float64, by_count, 2, 0.5, micro_batch=4),
]
distributed.barrier()
(FOLDER / f"{RANK}.json").write_text(json.dumps(results))
