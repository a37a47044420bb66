"""The program of bench/supervise.py: a small training with checkpoints that resumes by itself.

It runs with a fault, with jitter, with and without heartbeat, or with a Loop. Only the last two use
flatout."""

import argparse
import ctypes
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn


class Data(torch.utils.data.Dataset):
    def __init__(self, fault="", at=-1):
        self.fault, self.at = fault, at

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index == self.at:
            strike(self.fault)
        return torch.full((8,), index / 4000)


def strike(fault):
    """Returns True once: a file records it, with the time."""
    try:
        with open("struck", "x") as out:
            out.write(str(time.monotonic()))
    except FileExistsError:
        return
    if fault == "loop":
        while True:
            pass
    elif fault == "lock":  # in C, with the interpreter held
        lock = ctypes.create_string_buffer(64)
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
    elif fault == "wait":
        time.sleep(3600)
    elif fault == "exit":
        os._exit(5)
    else:
        os.kill(os.getpid(), getattr(signal, fault))


def make():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(8, 1)
    return model, [torch.zeros_like(p) for p in model.parameters()]


def step(model, speed, batch):
    model.zero_grad()
    (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
    with torch.no_grad():
        for p, v in zip(model.parameters(), speed, strict=True):
            v.mul_(0.9).add_(p.grad)
            p -= 0.01 * v


def save(model, speed, done):
    torch.save(
        {"model": model.state_dict(), "speed": speed, "step": done, "random": torch.get_rng_state()},
        "last.new",
    )
    os.replace("last.new", "last.pt")


def fault(kind, where, at):
    """Runs 200 steps with one fault; on SIGTERM it finishes the step and saves a checkpoint."""
    model, speed = make()
    begin, asked = 0, []
    if Path("last.pt").exists():
        kept = torch.load("last.pt")
        model.load_state_dict(kept["model"])
        speed, begin = kept["speed"], kept["step"]
        torch.set_rng_state(kept["random"])
    if kind == "sigterm":
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    loader = torch.utils.data.DataLoader(
        Data(kind, at * 8) if where == "worker" else Data(),
        batch_size=8,
        num_workers=2 if where == "worker" else 0,
    )
    batches = iter(loader) if where == "worker" else None  # creating one consumes a random number
    for done in range(begin, 200 if kind != "sigterm" else 10**9):
        batch = next(batches) if where == "worker" else torch.randn(8, 8)
        if where == "main" and done == at:
            strike(kind)
        step(model, speed, batch)
        time.sleep(0.005)
        if done == begin + 3:
            Path("trains").write_text(str(os.getpid()))
        if done % 10 == 9 or asked:
            save(model, speed, done + 1)
        if asked:
            sys.exit(143)
    print(json.dumps([p.tolist() for p in model.parameters()]))


def jitter(seed, seconds, compiles):
    """Runs steps of 5 ms to 1 s with pauses of up to 7 s, and recompilation on request.

    Evaluations of 12 to 45 s, and gaps as long between epochs, show no progress.
    """
    draw, (model, speed) = random.Random(seed), make()
    end = time.monotonic() + seconds
    loader = torch.utils.data.DataLoader(Data(), batch_size=80, num_workers=seed % 3)
    forward = torch.compile(model, dynamic=False) if compiles else model
    pauses = {"pauses": 0, "evaluations": 0, "between": 0, "compiled": 0}
    while time.monotonic() < end:
        for batch in loader:
            step(forward if compiles else model, speed, batch)
            time.sleep(min(draw.lognormvariate(-4, 1.2), 1.0))
            if draw.random() < 0.01:
                pauses["pauses"] += 1
                time.sleep(draw.uniform(2, 7))
            if compiles and draw.random() < 0.02:
                pauses["compiled"] += 1
                torch._dynamo.reset()
                step(forward, speed, batch[: draw.randint(2, 79)])
            if time.monotonic() > end:
                break
        model.eval()
        pauses["evaluations"] += 1
        with torch.no_grad():
            model(torch.zeros(4, 8))
            time.sleep(draw.uniform(12, 45))
        model.train()
        for batch in loader:
            step(model, speed, batch)
            if draw.random() < 0.05:
                break
        else:
            pauses["between"] += 1
            time.sleep(draw.uniform(12, 30))
    print(json.dumps(pauses))


def on_and_off(seconds, layers):
    """Runs rounds of four blocks of steps: without the heartbeat's hooks, with, with, without.

    With 24 layers, a step takes about 5 ms.
    """
    from flatout.agent import heartbeat
    from flatout.agent.heartbeat import StepCounters
    from flatout.agent.ledger import Ledger

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(torch.randn(1 << 16, 256), batch_sampler=[list(range(64))] * 100_000)
    batches = iter(loader)
    words, counters, ledger = heartbeat._installed.page, StepCounters(), Ledger()
    counters.page = words
    heartbeat._installed.counters._backward_hook.restore()  # the hooks of this process

    def block(count):
        lengths = []
        for _ in range(count):
            start = time.perf_counter()
            optimizer.zero_grad()
            model(next(batches)).square().mean().backward()
            optimizer.step()
            lengths.append(time.perf_counter() - start)
        return statistics.median(lengths)

    block(50)
    rounds, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        times = []
        for on in (False, True, True, False):
            if on and not ledger.entries():
                counters.install(torch, ledger)
            elif not on:
                ledger.restore()
                counters._backward_hook.restore()
            block(2)
            times.append(1e6 * block(8 if layers > 4 else 64))
        rounds.append(times)
    print(json.dumps({"rounds": rounds, "heartbeats": words[1]}))


def goodput(seconds):
    """Trains with `flatout.Loop` for the given time, over any number of starts; records each step time."""
    import flatout

    flatout.seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(24)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(torch.randn(1 << 16, 256), 64, shuffle=True)
    goal = Path("goal")
    if not goal.exists():
        lengths, x, first = [], torch.randn(64, 256), time.perf_counter()
        for _ in range(100):
            began = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.zero_grad()
            lengths.append(time.perf_counter() - began)
        goal.write_text(f"{int(seconds / statistics.median(lengths))} {time.perf_counter() - first}")
        flatout.seed(0)
    loop = flatout.Loop(
        model,
        optimizer,
        lambda m, x: m(x).square().mean(),
        loader,
        epochs=10**6,
        steps=int(goal.read_text().split()[0]),
        checkpoint_dir="saves",
    )
    with open("steps", "a", buffering=1) as out:
        Path("trains").write_text(str(os.getpid()))
        last = time.monotonic()
        for done in loop:
            now = time.monotonic()
            out.write(f"{done.index} {now - last:.6f}\n")
            last = now
    Path("trains").unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", nargs=3, metavar=("KIND", "WHERE", "AT"))
    parser.add_argument("--jitter", nargs=3, type=int, metavar=("SEED", "SECONDS", "COMPILES"))
    parser.add_argument("--on-and-off", nargs=2, metavar=("SECONDS", "LAYERS"))
    parser.add_argument("--goodput", type=float, metavar="SECONDS")
    args = parser.parse_args()
    if args.fault:
        fault(args.fault[0], args.fault[1], int(args.fault[2]))
    elif args.jitter:
        jitter(args.jitter[0], args.jitter[1], bool(args.jitter[2]))
    elif args.goodput:
        goodput(args.goodput)
    else:
        on_and_off(float(args.on_and_off[0]), int(args.on_and_off[1]))


if __name__ == "__main__":
    main()
