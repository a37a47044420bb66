"""Instruments a public script through PYTHONPATH, for ``bench/rescue.py``. Independent of flatout.

The environment controls it:

    RESCUE_SEED=1              random, numpy and torch are seeded with 0
    RESCUE_FAILS=1             SIGUSR2 raises RuntimeError at the script's current instruction
    RESCUE_TRACE=FILE          after each optimizer step (RESCUE_BY_HAND=1: before each backward pass but the
                               first) a line with the SHA-256 of each weight, and in FILE.at the current
                               length of its output, a file
    RESCUE_COUNT=N             the process ends after this many lines
    RESCUE_LOAD=FILE           the first backward pass executes the lines of Python in FILE among the script's
                               variables, writes the SHA-256 of all loaded weights to FILE.loaded, and ends
                               the process
"""

import os
import random
import sys


def digests(tensors):
    import hashlib

    import torch

    found = []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.append(hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:24])
    return found


def seed():
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def fail():
    import signal

    def raises(number, frame):
        raise RuntimeError("the bench wants this script to fail")

    signal.signal(signal.SIGUSR2, raises)


def trace(path, count, by_hand):
    import gc

    import torch

    owner, lines = os.getpid(), 0
    out = open(path, "w", buffering=1)  # noqa: SIM115
    places = open(f"{path}.at", "w", buffering=1)  # noqa: SIM115

    def write(tensors):
        nonlocal lines
        if os.getpid() != owner:
            return
        out.write(" ".join(sorted(set(digests(tensors)))) + "\n")
        places.write(f"{os.lseek(1, 0, os.SEEK_CUR)}\n")
        lines += 1
        if lines >= count:
            os._exit(0)

    if by_hand:
        backward, trained = torch.autograd.backward, []

        def traced(*args, **kwargs):
            if trained:
                write(trained)
            result = backward(*args, **kwargs)
            trained[:] = [
                thing
                for thing in gc.get_objects()
                if isinstance(thing, torch.nn.Parameter) and thing.grad is not None
            ]
            return result

        torch.autograd.backward = traced
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: write(
            [p for group in optimizer.param_groups for p in group["params"]]
        )
    )


def load(path):
    import gc
    import json
    import re

    import torch

    backward = torch.autograd.backward

    def loaded(*args, **kwargs):
        names, frame = {}, sys._getframe(1)
        while frame is not None:
            names = {**frame.f_globals, **frame.f_locals, **names}
            frame = frame.f_back
        names = {**names, **vars(sys.modules["__main__"])}
        for thing in gc.get_objects():  # objects without a name in the script get the name of their class
            if isinstance(
                thing, (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
            ):
                kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(thing).__name__).lower()
                names.setdefault(kind, thing)
        text = open(path).read()  # noqa: SIM115
        exec(text, names)  # what a user would paste
        modules = [
            names[each]
            for each in re.findall(r"^(\w+)\.load_state_dict", text, re.M)
            if isinstance(names[each], torch.nn.Module)
        ]
        with open(f"{path}.loaded", "w") as out:
            json.dump(digests([p for module in modules for p in module.parameters()]), out)
        os._exit(0)

    torch.autograd.backward = loaded
    del backward


if os.environ.get("RESCUE_SEED"):
    seed()
if os.environ.get("RESCUE_FAILS"):
    fail()
if os.environ.get("RESCUE_TRACE"):
    trace(
        os.environ.pop("RESCUE_TRACE"),
        int(os.environ["RESCUE_COUNT"]),
        bool(os.environ.get("RESCUE_BY_HAND")),
    )
if os.environ.get("RESCUE_LOAD"):
    load(os.environ.pop("RESCUE_LOAD"))
