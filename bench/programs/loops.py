"""One training step run by different loops in one process, interleaved block by block.

Prints one JSON object: name -> milliseconds a step of each block.

    python loops.py WIDTH LAYERS BATCH BLOCK_STEPS ROUNDS NAME [NAME...]

Each candidate has its own copy of one model, AdamW and the same list of batches, and runs the requested
steps.
"""

import contextlib
import json
import logging
import os
import random
import sys
import time
import warnings

import torch
from torch import nn

WIDTH, LAYERS, BATCH, STEPS, ROUNDS = map(int, sys.argv[1:6])
BATCHES = 64


def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        *[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())], nn.Linear(WIDTH, 10)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Batches:
    """The same batches again and again, without a loader's own cost."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (
                torch.randn(BATCH, WIDTH, generator=generator),
                torch.randint(0, 10, (BATCH,), generator=generator),
            )
            for _ in range(BATCHES)
        ]

    def __iter__(self):
        while True:
            yield from self.batches


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def raw():
    model, optimizer = make()
    for batch in Batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        yield


def flatout_loop():
    from flatout import Loop

    model, optimizer = make()
    return iter(Loop(model, optimizer, loss_of, Batches()))


def flatout_safe():
    """A complete raw loop: with clipping and a scheduler."""
    from flatout import Loop

    model, optimizer = make()
    return iter(
        Loop(
            model,
            optimizer,
            loss_of,
            Batches(),
            clip=1.0,
            scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        )
    )


def raw_safe():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for batch in Batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield


def accelerate():
    from accelerate import Accelerator

    model, optimizer = make()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in Batches():
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
        yield


def fabric():
    from lightning.fabric import Fabric

    model, optimizer = make()
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    for batch in Batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        optimizer.step()
        yield


def threaded(run):
    """Steps of a loop that cannot be suspended: a thread runs it and waits after each block for the next."""
    import threading

    go, done = threading.Semaphore(0), threading.Semaphore(0)
    left = [0]

    def after_step():
        left[0] -= 1
        if left[0] <= 0:
            done.release()
            go.acquire()

    thread = threading.Thread(target=run, args=(after_step,), daemon=True)

    def block(steps):
        left[0] = steps
        if not thread.is_alive():
            thread.start()
        else:
            go.release()
        done.acquire()

    return block


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer = make()

        def training_step(self, batch, index):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return self.optimizer

    class After(lightning.Callback):
        def __init__(self, after):
            self.after = after

        def on_train_batch_end(self, *_):
            self.after()

    def run(after):
        lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=-1,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[After(after)],
        ).fit(Module(), Batches())

    return threaded(run)


def ignite():
    from ignite.engine import Engine, Events

    model, optimizer = make()
    model.train()

    def update(engine, batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run(after):
        engine = Engine(update)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: after())
        engine.run(Batches(), max_epochs=1, epoch_length=10**9)

    return threaded(run)


CONTESTANTS = {
    "raw": raw,
    "Loop": flatout_loop,
    "raw, clipped and scheduled": raw_safe,
    "Loop, clipped and scheduled": flatout_safe,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Ignite": ignite,
}


def blocks_of(made):
    if callable(made):
        return made

    def block(steps):
        for _ in range(steps):
            next(made)

    return block


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    blocks = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name in sys.argv[6:]:
            blocks[name] = blocks_of(CONTESTANTS[name]())
        blocks["raw again"] = blocks_of(raw())  # the A/A
        for block in blocks.values():
            block(50)
        times = {name: [] for name in blocks}
        for turn in range(ROUNDS):
            for name in random.Random(f"{os.getpid()} {turn}").sample(list(blocks), len(blocks)):
                start = time.perf_counter()
                blocks[name](STEPS)
                times[name].append(1000 * (time.perf_counter() - start) / STEPS)
    print(json.dumps(times), flush=True)
    os._exit(0)  # threads that wait for another block do not end


if __name__ == "__main__":
    main()
