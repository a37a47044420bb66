"""Tests checkpoints on a GPU: trainings killed and resumed, their cost, and a real out-of-memory error.

1. The tutorial's ResNet-18 (augmentation in two loader workers) and the 124M GPT, both with dropout on the
   device and deterministic kernels, in a Loop with checkpoints. SIGKILL hits them at random moments until
   they are done. Weights, optimizer and all random states must equal those of the undisturbed run.
2. The GPT's state of 1.5 GB: steps without checkpoints, with checkpoints at the interval that the Loop
   chooses, with, without, interleaved in one process. The page shows how long the training waited for a copy
   to the host, and how long the writing thread worked.
3. A program whose batch grows until the device is full, under `flatout run --rescue`. `flatout rescue` writes
   the newest checkpoint, torch loads it, and its weights must equal those of the program after that step.

    python bench/gpu/trust.py

``--smoke`` runs the same code at a tiny size, on the CPU without a GPU (the program then raises the error
itself).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from overhead import interval, spell
from provenance import RESULTS, markdown_table, stamp, write_result

NO_GPU = 2
CHILD_S = 240.0
GROWING = Path(__file__).resolve().parent / "programs" / "growing.py"
DROPPED = 0.1


# -- one training --------------------------------------------------------------------------------------------


def made(kind: str, smoke: bool) -> tuple[Any, Any, Any]:
    """Returns model, optimizer and loader: on the device, with dropout after some of its layers."""
    import torch
    from torchvision import models, transforms

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "tutorial":
        from tutorial import MadeUpCIFAR10

        transform = transforms.Compose(
            [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        )
        data = MadeUpCIFAR10(256 if smoke else 10_000, transform)
        loader = torch.utils.data.DataLoader(data, 16 if smoke else 128, shuffle=True, num_workers=2)
        model = models.resnet18(num_classes=10).to(device)
        dropped, optimizer = (
            [model.layer2, model.layer4],
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
        )
    else:
        from gpt import GPT, Windows

        vocabulary, context, shape = (128, 16, (32, 2, 2)) if smoke else (50257, 1024, (768, 12, 12))
        loader = torch.utils.data.DataLoader(
            Windows(4_000 if smoke else 1_000_000, context, vocabulary), 4, shuffle=True, drop_last=True
        )
        model = GPT(vocabulary, context, *shape).to(device)
        dropped, optimizer = (
            list(model.blocks),
            torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1),
        )
    for layer in dropped:
        layer.register_forward_hook(
            lambda module, inputs, output: torch.nn.functional.dropout(output, DROPPED, module.training)
        )
    return model, optimizer, loader


def loss_fn(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def child(kind: str, saves: Path | None, steps: int, out: Path, smoke: bool) -> None:
    """Trains to the end and writes the digest of the final state. A second file holds the current step."""
    import flatout

    flatout.seed(0, deterministic=True)
    model, optimizer, loader = made(kind, smoke)
    loop = flatout.Loop(
        model,
        optimizer,
        loss_fn,
        loader,
        epochs=1000,
        steps=steps,
        **({"checkpoint_dir": saves, "save_every": 20} if saves else {}),
    )
    if loop.resumed is not None and not loop.resumed.exact:
        raise SystemExit("; ".join(loop.resumed.sentences()))
    at, half = out.with_suffix(".at"), out.with_suffix(".half")
    for step in loop:
        half.write_text(str(step.index))
        half.replace(at)  # atomic: a kill leaves a complete number
    out.write_text(digest_of(model, optimizer))


def digest_of(model: Any, optimizer: Any) -> str:
    """Returns the digest of everything learned and of the random states."""
    import numpy as np
    import torch

    digest = hashlib.sha256()
    state = [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    for tensor in (*model.parameters(), *model.buffers(), *state):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else []
    digest.update(
        repr(
            [torch.get_rng_state().tolist(), cuda, random.getstate(), np.random.get_state()[1].tolist()]
        ).encode()
    )
    return digest.hexdigest()


def words(kind: str, saves: Path | None, steps: int, out: Path, smoke: bool) -> list[str]:
    folder = ["--saves", str(saves)] if saves is not None else []
    return [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        kind,
        *folder,
        "--steps",
        str(steps),
        "--to",
        str(out),
        *(["--smoke"] if smoke else []),
    ]


def run_through(command: list[str], **more: Any) -> str:
    """Returns why it did not finish, as its last line of output; empty if it did."""
    try:
        ran = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CHILD_S,
            check=False,
            **more,
        )
    except subprocess.TimeoutExpired:
        return f"it did not finish within {CHILD_S:.0f} s"
    return last_line(ran.stderr, ran.returncode)


def last_line(said: str, code: int) -> str:
    return (said.strip().splitlines() or [f"exit code {code}"])[-1][:300] if code else ""


def killed(kind: str, steps: int, kills: int, smoke: bool, folder: Path) -> dict[str, Any]:
    draw, saves = random.Random(kind), folder / f"{kind} saves"
    plain, again = folder / f"{kind} plain", folder / f"{kind} again"
    began, done, moments = time.monotonic(), 0, list[int]()
    failed = run_through(words(kind, None, steps, plain, smoke))
    whole_s = time.monotonic() - began
    while not failed:
        again.with_suffix(".at").unlink(missing_ok=True)
        process = subprocess.Popen(
            words(kind, saves, steps, again, smoke), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        while done < kills and process.poll() is None and not again.with_suffix(".at").exists():
            time.sleep(0.01)
        if done < kills and process.poll() is None:
            time.sleep(draw.uniform(0.0, whole_s / (kills + 2)))
        if done < kills and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            done += 1
            moments.append(int(again.with_suffix(".at").read_text()))
            continue
        try:
            said = process.communicate(timeout=CHILD_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"{process.communicate()[1]}\nit did not finish within {CHILD_S:.0f} s"
        failed = last_line(said, process.returncode)
        break
    return {
        "training": kind,
        "steps": steps,
        "kills": done,
        "at": moments,
        "whole_s": whole_s,
        "failed": failed,
        "same": not failed and plain.read_text() == again.read_text(),
    }


# -- the cost of checkpoints


def stall(seconds_s: float, smoke: bool, folder: Path) -> dict[str, Any]:
    import torch

    import flatout

    loops = {}
    for side in ("plain", "saves"):
        flatout.seed(0)
        model, optimizer, loader = made("gpt", smoke)
        loops[side] = flatout.Loop(
            model,
            optimizer,
            loss_fn,
            loader,
            epochs=10**6,
            **({"checkpoint_dir": folder / "stall"} if side == "saves" else {}),
        )
    steps, saver = {side: iter(loop) for side, loop in loops.items()}, loops["saves"]._saving.saver

    def block(side: str, length_s: float) -> float:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < length_s:
            for _ in range(5):
                step = next(steps[side])
            float(step.loss)  # waits for the device
            count += 5
        if side == "saves":
            saver.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / count

    for side in loops:
        block(side, 3.0)
    cost = saver.cost
    before, began, rounds = (cost.saves, cost.waited_s, cost.worked_s), time.perf_counter(), []
    length_s = max(2.0, min(2.5 * cost.last_s / saver.share, seconds_s / 4))
    while time.perf_counter() - began < seconds_s:
        rounds.append([block(side, length_s) for side in ("plain", "saves", "saves", "plain")])
    size = sum(stored.bytes for stored in saver.last.manifest.files.values()) if saver.last is not None else 0
    for iterator in steps.values():
        iterator.close()
    return {
        "bytes": size,
        "block_s": length_s,
        "rounds": rounds,
        "saves": cost.saves - before[0],
        "waited_s": cost.waited_s - before[1],
        "worked_s": cost.worked_s - before[2],
        "seconds": 2 * len(rounds) * length_s,
    }


# -- out of memory -------------------------------------------------------------------------------------------


def rescued(smoke: bool, folder: Path) -> dict[str, Any]:
    """Reads the remaining checkpoint and checks that its weights are those of its step."""
    import torch

    command = [
        sys.executable,
        "-m",
        "flatout",
        "run",
        "--plan",
        "none",
        "--rescue",
        sys.executable,
        str(GROWING),
        *(["--raise-at", "12"] if smoke else []),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CHILD_S, check=False)
    metadata = dict(line.split() for line in (folder / "steps").read_text().splitlines())
    listed = subprocess.run(
        [sys.executable, "-m", "flatout", "rescue", "--to", "out"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if listed.returncode:
        return {
            "code": done.returncode,
            "failed": (listed.stderr.strip().splitlines() or ["no words"])[-1][:300],
            "said": done.stderr[-600:],
        }
    state = torch.load(folder / "out" / "model.pt", map_location="cpu", weights_only=True)
    digest = hashlib.sha256(
        b"".join(
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in state.values()
        )
    ).hexdigest()
    steps = [int(step) for step, each in metadata.items() if each == digest]
    memory = "OutOfMemoryError" in done.stderr
    return {
        "code": done.returncode,
        "out_of_memory": memory,
        "steps": len(metadata),
        "of_step": steps[0] if steps else None,
        "failed": "",
    }


# -- all of them ---------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    parts = [
        f"# Checkpoints on a GPU\n\n{(__doc__ or '').split(chr(10), 2)[2].split('    python')[0].strip()}"
    ]
    if found.get("killed"):
        parts.append(
            "## Killed and resumed\n\n"
            + markdown_table(
                ("training", "steps", "kills", "killed in step", "whole run, s", "equal bit for bit"),
                [
                    (
                        each["training"],
                        each["steps"],
                        each["kills"],
                        ", ".join(map(str, each["at"])),
                        f"{each['whole_s']:.0f}",
                        "yes" if each["same"] else f"**no** {each['failed']}",
                    )
                    for each in found["killed"]
                ],
            )
        )
    if cost := found.get("stall"):
        shares = [[100 * ((b + c) / (a + d) - 1) for a, b, c, d in cost["rounds"]]]
        same = [[100 * (d / a - 1) for a, _, _, d in cost["rounds"]]]
        parts.append(
            "## The cost of checkpoints\n\n"
            + markdown_table(
                (
                    "bytes of a checkpoint",
                    "checkpoints",
                    "block, s",
                    "rounds",
                    "plain step",
                    "with checkpoints (goal: 1 %)",
                    "A/A",
                    "waiting (statistics)",
                    "a checkpoint: waiting, writing",
                ),
                [
                    (
                        f"{cost['bytes']:,}",
                        cost["saves"],
                        f"{cost['block_s']:.1f}",
                        len(cost["rounds"]),
                        f"{median((a + d) / 2 for a, _, _, d in cost['rounds']):.2f} ms",
                        f"{spell(interval(shares), 2)} %",
                        f"{spell(interval(same), 2)} %",
                        f"{cost['waited_s'] / cost['seconds']:.2%}",
                        f"{cost['waited_s'] / max(cost['saves'], 1):.3f} s, {cost['worked_s'] / max(cost['saves'], 1):.3f} s",
                    )
                ],
            )
        )
    if kept := found.get("rescued"):
        of = (
            f"the weights of step {kept['of_step']}"
            if kept.get("of_step") is not None
            else f"**not** the weights of a step {kept['failed']}"
        )
        parts.append(
            f"## Out of memory\n\nThe program ended with exit code {kept['code']}{', out of memory' if kept.get('out_of_memory') else ''}, after "
            f"{kept.get('steps', '?')} steps; the newest checkpoint has {of}."
        )
    parts += [f"## {name.capitalize()}\n\n**Failed**: {why}" for name, why in found.get("failed", {}).items()]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run the same code at a tiny size, without a GPU on the CPU; write to a temporary folder",
    )
    parser.add_argument("--kills", type=int, default=6, help="kills of each training (default 6)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="measuring time for the cost of checkpoints (default 120; 12 with --smoke)",
    )
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    for hidden, kind in (("--saves", Path), ("--to", Path), ("--steps", int)):
        parser.add_argument(hidden, type=kind, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.saves, args.steps, args.to, args.smoke)
        return 0
    import torch

    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    theme = "trust_gpu" if torch.cuda.is_available() else "trust_gpu_smoke"
    out = args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS)
    begun, found = stamp(), dict[str, Any](killed=[])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for kind, steps in (("tutorial", 40 if args.smoke else 400), ("gpt", 40 if args.smoke else 300)):
            found["killed"].append(killed(kind, steps, 2 if args.smoke else args.kills, args.smoke, folder))
            write_result(theme, begun, page(found), found, folder=out)
        parts = {
            "rescued": lambda: rescued(args.smoke, folder),
            "stall": lambda: stall(12.0 if args.smoke else args.seconds, args.smoke, folder),
        }
        for name, work in parts.items():
            try:
                found[name] = work()
            except Exception as error:  # keeps earlier results and tries the next part
                found.setdefault("failed", {})[name] = f"{type(error).__name__}: {str(error)[:300]}"
            written = write_result(theme, begun, page(found), found, folder=out)
    print(f"{page(found)}\nwritten: {', '.join(path.name for path in written)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
