"""Runs of trainings, forked from one process that has torch and ended by random kills or by signals.

Kills the trainings with the numbers of its arguments (SETTINGS) and prints all results as JSON.
"""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import flatout  # before those of bench/, which would take the source tree's

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "programs")]

import resume  # noqa: E402
from resuming import Setting, Told, live  # noqa: E402

KILLED = Setting(
    3,
    workers=2,
    start="fork",
    persistent=True,
    shuffle=True,
    augment=True,
    accumulate=2,
    ranks=1,
    every=1,
    optimizer="AdamW",
    clip=True,
    epochs=2,
)
SETTINGS = [
    KILLED,
    replace(KILLED, seed=4, workers=0, accumulate=1, every=4, optimizer="SGD"),
    replace(KILLED, seed=5, workers=0, accumulate=1, ranks=2),
]


def asked(scratch, numbers, own_handler=False, ranks=1):
    """A training that gets these signals, on its last rank, as soon as it steps.

    Returns the exit codes, the step of the newest checkpoint, the completed steps, whether a handler of the
    program was called, and the seconds until all have ended.
    """
    setting = replace(KILLED, seed=6, workers=0, accumulate=1, every=0, ranks=ranks, epochs=60)
    folder, progress, store = Path(tempfile.mkdtemp(dir=scratch)), Told(ranks), tempfile.mktemp(dir=scratch)
    handled = Path(tempfile.mktemp(dir=scratch))
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_RDWR), 2)
                if own_handler:
                    signal.signal(signal.SIGTERM, lambda *_: handled.write_text("handled"))
                live(setting, folder, store, rank, progress)
                code = 0
            except SystemExit as ended:
                code = ended.code
            except KeyboardInterrupt:
                code = 99
            finally:
                os._exit(code)
        pids.append(pid)
    while progress.get(0, 0) < 7:
        time.sleep(0.002)
    began = time.monotonic()
    for number in numbers:
        os.kill(pids[-1], number)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    saves = sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))
    return {
        "codes": codes,
        "saved": saves[-1] if saves else None,
        "done": progress.get(0, 0),
        "handled": handled.exists(),
        "seconds": time.monotonic() - began,
    }


def insisted(scratch):
    """A training with a long fourth step that gets two signals to end."""
    import torch

    progress = Told(1)
    pid = os.fork()
    if pid == 0:
        model = torch.nn.Linear(2, 1)

        def loss_fn(model, batch):
            progress.put(0, 0, progress.get(0, 0) + 1)
            if progress.get(0, 0) == 4:
                time.sleep(30)
            return model(batch).sum()

        batches = [torch.ones(3, 2)] * 9
        list(
            flatout.Loop(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                loss_fn,
                batches,
                checkpoint_dir=Path(tempfile.mkdtemp(dir=scratch)),
            )
        )
        os._exit(0)
    while progress.get(0, 0) < 4:
        time.sleep(0.002)
    began = time.monotonic()
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.3)
    return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "seconds": time.monotonic() - began}


def main(killed):
    resume.warm()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        found = {
            "killed": {number: resume.training(SETTINGS[int(number)], scratch, most=3) for number in killed},
            "SIGTERM": asked(scratch, [signal.SIGTERM]),
            "own handler": asked(scratch, [signal.SIGTERM], own_handler=True),
            "SIGUSR1": asked(scratch, [signal.SIGUSR1]),
            "SIGINT": asked(scratch, [signal.SIGINT]),
            "insisted": insisted(scratch),
            "two ranks": asked(scratch, [signal.SIGTERM], ranks=2),
        }
    print(json.dumps(found))


main(sys.argv[1:])
