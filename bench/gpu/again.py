"""Tests exact resume of a plain script on a GPU: kills it at random under `flatout run --resume`.

The tutorial's ResNet-18 (augmentation in two loader workers) and the 124M GPT train in a loop of plain
PyTorch, both with dropout on the device and deterministic kernels. The final weights, buffers, optimizer
state and all random states must equal those of an undisturbed run without flatout. The page also compares the
seconds from a start to the resume point with the seconds of the original steps before it.

    python bench/gpu/again.py

``--smoke`` runs the same code at a tiny size, on the CPU without a GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from provenance import RESULTS, markdown_table, read_json, stamp, write_result
from trust import CHILD_S, NO_GPU, digest_of, loss_fn, made, run_through

SEAM = re.compile(r"resumed exactly after step (\d+)")


def child(kind: str, steps: int, out: Path, smoke: bool) -> None:
    import numpy as np
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, optimizer, loader = made(kind, smoke)
    device = next(model.parameters()).device
    step = 0
    while step < steps:
        for x, y in loader:
            loss = loss_fn(model, (x.to(device), y.to(device)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} {loss.item():.6f}", flush=True)
            if step >= steps:
                break
    out.write_text(digest_of(model, optimizer))


def killed(kind: str, steps: int, kills: int, smoke: bool, folder: Path) -> dict[str, Any]:
    draw, plain, again = random.Random(kind), folder / f"{kind} plain", folder / f"{kind} again"
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}

    def words(out: Path) -> list[str]:
        return [
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            kind,
            "--steps",
            str(steps),
            "--to",
            str(out),
            *(["--smoke"] if smoke else []),
        ]

    began, resume_points, done = time.monotonic(), [], 0
    failed = run_through(words(plain), cwd=folder, env=environment)
    whole_s = time.monotonic() - began
    while not failed:
        began = time.monotonic()
        with open(folder / "said", "w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "flatout", "run", "--plan", "none", "--resume", *words(again)],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        expected, resume_point = bool(done), None
        wait = draw.uniform(0.1, whole_s / (kills + 1))
        while process.poll() is None and time.monotonic() - began < CHILD_S:
            found = SEAM.search((folder / "said").read_text())
            if found and resume_point is None:
                resume_point = int(found[1])
                resume_points.append([resume_point, round(time.monotonic() - began, 2)])
            manifests = folder.glob(".flatout/*/rescue/*/manifest.json")
            ready = (
                resume_point is not None
                if expected
                else any(read_json(path)["metadata"].get("exact") == "" for path in manifests)
            )
            if ready and done < kills:
                time.sleep(wait)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                done += 1
                break
            time.sleep(0.02)
        else:
            failed = "" if process.poll() == 0 else (folder / "said").read_text().strip()[-300:]
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                failed = "it did not finish in time"
            break
    return {
        "training": kind,
        "steps": steps,
        "kills": done,
        "resume_points": resume_points,
        "whole_s": whole_s,
        "failed": failed,
        "same": not failed and plain.read_text() == again.read_text(),
    }


def page(found: dict[str, Any]) -> str:
    return (
        f"# Exact resume of a plain script on a GPU\n\n{(__doc__ or '').split(chr(10), 2)[2].split('    python')[0].strip()}\n\n"
        + markdown_table(
            (
                "training",
                "steps",
                "kills",
                "resumed at step (s after the start)",
                "whole run, s",
                "equal bit for bit",
            ),
            [
                (
                    each["training"],
                    each["steps"],
                    each["kills"],
                    ", ".join(f"{step} ({seconds})" for step, seconds in each["resume_points"]),
                    f"{each['whole_s']:.0f}",
                    "yes" if each["same"] else f"**no** {each['failed']}",
                )
                for each in found["killed"]
            ],
        )
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run the same code at a tiny size, without a GPU on the CPU; write to a temporary folder",
    )
    parser.add_argument("--kills", type=int, default=5, help="kills of each training (default 5)")
    for hidden, kind in (("--child", str), ("--to", Path), ("--steps", int)):
        parser.add_argument(hidden, type=kind, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.steps, args.to, args.smoke)
        return 0
    import torch

    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    theme, begun, found = (
        "again_gpu" if torch.cuda.is_available() else "again_gpu_smoke",
        stamp(),
        dict[str, Any](killed=[]),
    )
    out = args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS)
    with tempfile.TemporaryDirectory() as name:
        for kind, steps in (("tutorial", 40 if args.smoke else 400), ("gpt", 60 if args.smoke else 300)):
            place = Path(name) / kind
            place.mkdir()
            found["killed"].append(killed(kind, steps, 2 if args.smoke else args.kills, args.smoke, place))
            written = write_result(theme, begun, page(found), found, folder=out)
    print(f"{page(found)}\nwritten: {', '.join(path.name for path in written)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
