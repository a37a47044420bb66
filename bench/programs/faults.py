"""Trainings with `flatout.Loop` that run out of memory at one place.

Usage: ``faults.py PHASE EVERY|MIB``. Prints one JSON record a line. bench/loop_faults.py reads
them and explains the verdicts.
"""

import gc
import json
import resource
import sys
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout import Loop
from flatout.schema.errors import LoopError

PHASE, EVERY = sys.argv[1], int(sys.argv[2])
STEPS, SAMPLES, AT, MOST = 4, 8, 2, 2000
ENGINE = torch.autograd.Variable._execution_engine


class Injector(TorchDispatchMode):
    def __init__(self, number):
        super().__init__()
        self.left, self.armed, self.fired = number, False, ""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.armed:
            self.left -= 1
            if self.left == 0:
                self.armed, self.fired = False, str(operator)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return operator(*args, **(kwargs or {}))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cell, self.head = (
            nn.Embedding(11, 12),
            nn.GRU(12, 8, batch_first=True),
            nn.Linear(8, 11),
        )

    def forward(self, tokens):
        return self.head(self.cell(self.table(tokens))[0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = (
            nn.Embedding(11, 8),
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
            nn.Linear(8, 11),
        )

    def forward(self, tokens):
        return self.head(self.block(self.table(tokens)))


def perceptron():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


def classes(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def tokens(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0), (
        batch[1] != 0
    ).sum()


def data(kind, dtype, seed):
    generator = torch.Generator().manual_seed(100 * seed)
    if kind is tokens:
        return [
            (
                torch.randint(1, 11, (SAMPLES, 5), generator=generator),
                torch.randint(0, 11, (SAMPLES, 5), generator=generator),
            )
            for _ in range(STEPS)
        ]
    return [
        (
            torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 5, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]


MODELS = {
    "perceptron": (perceptron, classes),
    "convolution": (convolutional, classes),
    "GRU": (Tagger, tokens),
    "attention": (Attention, tokens),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}
# Adam's first step divides each gradient by its own size, so the rounding of the smallest ones counts fully.
# A wrong step has a far larger error.
TIGHT = {
    "float64": 1e-9,
    "float32": 2e-4,
    "bf16": 0.1,
    "fp16": 0.1,
}  # distance over how far the weights have moved
CASES = [
    ("perceptron", "SGD", "float64", 0),
    ("perceptron", "AdamW", "float32", 1),
    ("convolution", "AdamW", "float64", 0),
    ("GRU", "SGD", "float64", 1),
    ("attention", "AdamW, foreach", "float64", 0),
    ("convolution", "SGD", "bf16", 0),
    ("perceptron", "SGD", "fp16", 1),
]
OF_OPTIMIZERS = [("perceptron", name, "float64", seed) for name in OPTIMIZERS for seed in (0, 1)] + [
    ("GRU", "AdamW", "float32", 0)
]


def live_bytes():
    gc.collect()
    return sum(
        t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) is torch.Tensor and t.device.type == "cpu"
    )


def train(case, number=-1, at=AT):
    """Returns weights after each step, parts of each, the error, the failed operator, and leaked outputs."""
    name, optimizer, precision, seed = case
    make, kind = MODELS[name]
    dtype = torch.float64 if precision == "float64" else torch.float32
    torch.manual_seed(seed)
    model = make().to(dtype)
    kept = []
    next(model.children()).register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out)))
    updates, injector = OPTIMIZERS[optimizer](model.parameters()), Injector(number)

    def arm(phase):
        injector.armed = phase == PHASE and loop.index == at and not injector.fired

    if PHASE == "optimizer":
        updates.register_step_pre_hook(lambda *_: arm("optimizer"))
        updates.register_step_post_hook(lambda *_: setattr(injector, "armed", False))

    def loss(given, batch):
        arm("gradients")
        found = kind(given, batch)
        first = found[0] if isinstance(found, tuple) else found
        if first.requires_grad:
            first.register_hook(lambda _: ENGINE.queue_callback(lambda: setattr(injector, "armed", False)))
        return found

    batches = data(kind, dtype, seed)
    precise = {} if precision in ("float32", "float64") else {"precision": precision}
    loop = Loop(model, updates, loss, batches, reduction="mean", on_nan="ignore", **precise)
    weights, parts, words = [[p.detach().double().clone() for p in model.parameters()]], [], ""
    with injector:
        try:
            for step in loop:
                parts.append(step.parts)
                weights.append([p.detach().double().clone() for p in model.parameters()])
                if PHASE == "evaluation" and step.index == at:
                    injector.armed = not injector.fired
                    try:
                        with torch.no_grad():
                            kind(model, batches[0])
                    except torch.OutOfMemoryError:
                        pass
                    injector.armed = False
        except LoopError as error:
            words = str(error)
    injector.armed = False
    alive = sum(reference() is not None for reference in kept[:-1])
    loop.close()
    return weights, parts, words, injector.fired, alive


def apart(ours, theirs):
    """Returns the largest distance over the steps, relative to the undisturbed movement, and equality."""
    start = torch.cat([p.flatten() for p in theirs[0]])
    worst, same = 0.0, True
    for x, y in zip(ours, theirs, strict=True):
        x, y = (torch.cat([p.flatten() for p in each]) for each in (x, y))
        same &= torch.equal(x, y)
        worst = max(
            worst,
            float((x - y).norm() / max(float((y - start).norm()), 1e-12)) if not torch.equal(x, y) else 0.0,
        )
    return worst, same


def judged(case, reference, seen):
    weights, parts, words, _, alive = seen
    if words:
        good = PHASE == "optimizer" and ("half a step" in words or "before it changed" in words)
        return ("refused" if good else "wrong"), words[:200]
    if len(weights) != len(reference):
        return "wrong", f"{len(weights) - 1} steps in the place of {len(reference) - 1}"
    distance, same = apart(weights, reference)
    if alive:
        return "wrong", f"{alive} tensors of a failed attempt live on"
    if max(parts) == 1 and not same:
        return "wrong", f"no micro-batch was needed, and the weights differ by {distance:.2g}"
    return (
        ("done again", f"{distance:.2g}")
        if distance <= TIGHT[case[2]]
        else ("wrong", f"the weights differ by {distance:.2g} of their way")
    )


def tell(case, at, fired, verdict, why):
    case = f"{', '.join(map(str, case))}, step {at}"
    record = {"phase": PHASE, "case": case, "site": fired, "verdict": verdict, "why": why}
    print(json.dumps(record), flush=True)


def campaign(cases, moments):
    gc.collect()
    gc.freeze()
    for case in cases:
        reference = train(case)[0]
        for at in moments:
            before = live_bytes()
            for number in range(1, MOST, EVERY):
                seen = train(case, number, at)
                fired, verdict = seen[3], judged(case, reference, seen)
                del seen
                if not fired:
                    break
                after = live_bytes() if number % (4 * EVERY) == 1 else before
                if after > before:
                    verdict = "wrong", f"{after - before} bytes of tensors more than before"
                tell(case, at, fired, *verdict)


def real():
    """Limits the address space until the allocator itself fails."""

    def trained(limit):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 8)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        batches = [
            (torch.randn(4096, 64, generator=generator), torch.randint(0, 8, (4096,), generator=generator))
            for _ in range(3)
        ]
        if limit:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + limit * 2**20, resource.RLIM_INFINITY))
        parts = [
            step.parts
            for step in Loop(
                model, optimizer, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batches
            )
        ]
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return parts, torch.cat([p.detach().flatten() for p in model.parameters()])

    parts, weights = trained(EVERY)  # first: what an undisturbed run has freed would be there to be used
    _, whole = trained(0)
    distance = float((weights - whole).norm() / whole.norm())
    good = distance < 1e-5 and max(parts) > 1
    tell((f"{EVERY} MiB left",), 0, f"parts {parts}", "done again" if good else "wrong", f"{distance:.2g}")


if PHASE == "real":
    torch.set_num_threads(1)
    real()
else:
    campaign(OF_OPTIMIZERS if PHASE == "optimizer" else CASES, [0, AT] if PHASE != "evaluation" else [AT])
