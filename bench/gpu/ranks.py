"""Compares several ranks on one GPU with one process: first gradient, losses and memory of a GPT.

1. One process: the baseline of all others.
2. Two ranks that share the device (through gloo, since NCCL requires a device for each), with the batch
   split, as `flatout run --procs 2` does it.
3. The same with the lever `sharding`: each rank keeps half of weights, gradients and optimizer state.
4. One rank over NCCL; torch's FSDP2, configured by hand, with one rank, and with everything offloaded to the
   host.

    python bench/gpu/ranks.py

``--smoke`` runs the same code at a tiny size, on the CPU and through gloo without a GPU. The row of a failed
configuration says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from provenance import RESULTS, markdown_table, stamp, write_result

NO_GPU, CHILD_S = 2, 300
WAYS = {
    "one process": 1,
    "two ranks": 2,
    "two ranks, sharding": 2,
    "one rank, NCCL": 1,
    "FSDP2, one rank": 1,
    "FSDP2, one rank, offloaded": 1,
}
STEPS = 8
SAME = 1e-4  # relative: float32, different order of sums


# -- one rank ------------------------------------------------------------------------------------------------


def child(way: str, out: Path, smoke: bool) -> None:
    """Trains some steps in this configuration, and writes the results."""
    import torch
    from gpt import GPT

    from flatout.job.rank_environment import this_rank
    from flatout.trial.reference_run import sketch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary, context, batch = (128, 16, 4) if smoke else (50304, 512, 8)
    here = this_rank()
    training_context = _as_a_rank(torch, way.endswith("sharding")) if here is not None else None
    torch.manual_seed(0)
    model = GPT(vocabulary, context, *((32, 2, 2) if smoke else (768, 12, 12))).to(device)
    tokens = torch.randint(
        0, vocabulary, (STEPS * batch, context + 1), generator=torch.Generator().manual_seed(1)
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch
    )
    if here is None and way != "one process":
        _by_hand(torch, model, device, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gradients: list[list[float]] = []
    losses = []
    for x, y in loader:
        logits = model(x.to(device))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [sketch(torch, p.grad) for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    whole = way.endswith("sharding") and not all(hasattr(p, "_local_tensor") for p in model.parameters())
    if training_context is not None and (training_context.data_parallel.batches.share is None or whole):
        raise RuntimeError("nothing was sharded")
    state = [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    found = {
        "losses": losses,
        "gradients": gradients,
        "weights_bytes": _bytes(model.parameters()),
        "gradients_bytes": _bytes(p.grad for p in model.parameters() if p.grad is not None),
        "state_bytes": _bytes(state),
        "on": sorted({_local(p).device.type for p in model.parameters()}),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
    out.with_suffix(f".{here.rank if here is not None else 0}.json").write_text(json.dumps(found))


def _as_a_rank(torch: Any, shards: bool) -> Any:
    from flatout.agent.ledger import Ledger
    from flatout.agent.listener import Listener
    from flatout.agent.training_context import TrainingContext
    from flatout.levers import TABLE

    levers = {lever.name: lever for lever in TABLE}
    training_context = TrainingContext(torch, Listener(), Ledger())
    training_context.install()
    for name, value in (
        ("data_parallel", {"reduction": "mean"}),
        *((("sharding", {"over": "node"}),) if shards else ()),
    ):
        levers[name].apply(training_context, value, Ledger())
    return training_context


def _by_hand(torch: Any, model: Any, device: Any, way: str) -> None:
    """Sets up one rank as a user would write it."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    if way == "one rank, NCCL":
        for p in model.parameters():
            torch.distributed.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(lambda p: torch.distributed.all_reduce(p.grad))
        return
    offloaded = way.endswith("offloaded")
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloaded else OffloadPolicy()
    mesh = torch.distributed.init_device_mesh(device.type, (1,))
    from flatout.levers.recompute import repeated

    for module in (*repeated(torch, model), model):
        fully_shard(module, mesh=mesh, offload_policy=policy)


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _bytes(tensors: Any) -> int:
    """Returns the bytes that this rank holds of the tensors."""
    return sum(_local(t).numel() * t.element_size() for t in tensors)


# -- all of them ---------------------------------------------------------------------------------------------


def run_way(way: str, procs: int, smoke: bool, folder: Path) -> dict[str, Any]:
    out = folder / way.replace(" ", "_").replace(",", "")
    words = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        way,
        "--out",
        str(out),
        *(["--smoke"] if smoke else []),
    ]
    if procs > 1:
        words = [sys.executable, "-m", "flatout.launch.local_launcher", "--procs", str(procs), "--", *words]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CHILD_S, check=False)
    except subprocess.TimeoutExpired:
        return {"way": way, "failed": f"not finished after {CHILD_S} s"}
    if done.returncode:
        lines = (
            [line for line in done.stderr.strip().splitlines() if "Error" in line]
            or done.stderr.strip().splitlines()
            or ["no words"]
        )
        return {"way": way, "failed": lines[-1][:300]}
    return {
        "way": way,
        "ranks": [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(procs)],
    }


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    """Returns the distance of two lists of vectors, relative to the length of the second."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return (sum((x - y) ** 2 for x, y in pairs) / (sum(y * y for _, y in pairs) or 1.0)) ** 0.5


def page(found: list[dict[str, Any]]) -> str:
    rows = []
    one = found[0]["ranks"][0] if found and "ranks" in found[0] else None
    for entry in found:
        if "failed" in entry:
            rows.append((entry["way"], f"failed: {entry['failed']}", *["-"] * 6))
            continue
        for rank, seen in enumerate(entry["ranks"]):
            gradient = distance(seen["gradients"], one["gradients"]) if one else float("nan")
            losses = (
                max(abs(x / y - 1) for x, y in zip(seen["losses"], one["losses"], strict=True))
                if one
                else float("nan")
            )
            peak = seen["peak_bytes"]
            rows.append(
                (
                    entry["way"] + (f", rank {rank}" if len(entry["ranks"]) > 1 else ""),
                    "same" if max(gradient, losses) <= SAME else "**differs**",
                    f"{gradient:.1e}",
                    f"{losses:.1e}",
                    *(
                        f"{seen[kind] / 2**20:.4g}"
                        for kind in ("weights_bytes", "gradients_bytes", "state_bytes")
                    ),
                    f"{peak / 2**20:.4g}" if peak is not None else "-",
                )
            )
    return "\n".join(
        [
            f"# Ranks on one GPU\n\n{(__doc__ or '').split(chr(10), 2)[2].split('    python')[0].strip()}\n",
            markdown_table(
                (
                    "configuration",
                    f"compared with one process (at most {SAME:g})",
                    "error of the first gradient",
                    "error of the losses",
                    "weights, MiB",
                    "gradients, MiB",
                    "optimizer state, MiB",
                    "allocator's peak, MiB",
                ),
                rows,
            ),
            "",
            f"GPT-2 124M (a tiny one with --smoke), float32, AdamW, {STEPS} steps. Memory that each rank holds, and its own peak; two ranks share the device.",
            "",
        ]
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
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.out, args.smoke)
        return 0
    import torch

    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    out = args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS)
    made, found, written = stamp(), list[dict[str, Any]](), tuple[Path, ...]()
    with tempfile.TemporaryDirectory() as folder:
        for way, procs in WAYS.items():
            found.append(run_way(way, procs, args.smoke, Path(folder)))
            written = write_result(
                "ranks_gpu" if torch.cuda.is_available() else "ranks_gpu_smoke",
                made,
                page(found),
                {"ways": found},
                folder=out,
            )
    print(f"{page(found)}\n\nwritten: {', '.join(path.name for path in written)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
