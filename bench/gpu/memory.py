"""Measures the memory of a 124M GPT on a GPU: what fits, its cost, and the Loop's behaviour out of memory.

1. Frontier: sequences a step for each recompute setting; tokens/s and the allocator's peak of each,
   interleaved in one process.
2. Real out-of-memory errors: the process may use only a given share of the device, and a Loop gets a step
   that does not fit. It must finish in micro-batches, with the gradient of the undisturbed step.
3. The batch finder: the choice of ``micro_batch="auto"``, compared with an exhaustive sweep over
   micro-batches.

    python bench/gpu/memory.py

The page is written after each part, so that an interrupted run keeps its results. ``--smoke`` runs the same
code at a tiny size, on the CPU without a GPU; part 2 is left out there, because memory does not run out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from provenance import RESULTS, markdown_table, stamp, write_result

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers import TABLE
from flatout.loop.loop import Loop
from flatout.measure.clock import seconds
from flatout.measure.statistics import median, quantile

NO_GPU = 2
LEVERS = {lever.name: lever for lever in TABLE}
WAYS: dict[str, tuple[str, Any] | None] = {
    "plain": None,
    "plain again": None,
    "blocks, half": ("recompute", {"blocks": 0.5}),
    "blocks": ("recompute", {"blocks": 1.0}),
}
BATCHES = (4, 8, 16, 32, 64)
LIMITS = (0.5, 0.35, 0.25)  # share of the step's memory above parameters and state
ROUNDS = 5
CLOSE = 1e-5  # relative, of gradients: other micro-batches sum in another order


class Bench:
    def __init__(self, torch: Any, smoke: bool, out: Path, limit_s: float) -> None:
        from gpt import GPT

        self.torch, self.smoke, self.out, self.end_s = torch, smoke, out, seconds() + limit_s
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.vocabulary, self.context = (128, 32) if smoke else (50304, 1024)
        width, heads, layers = (32, 2, 2) if smoke else (768, 12, 12)
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.model = GPT(self.vocabulary, self.context, width, heads, layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.training_context = TrainingContext(torch, Listener(), Ledger())
        self.training_context.register_objects([self.model], [self.optimizer], [])
        self.training_context.first_step_done(1)
        self.made, self.found = stamp(), dict[str, Any](frontier=[], out_of_memory=[], finder={})

    # -- one step --------------------------------------------------------------------------------------------

    def batch(self, size: int) -> Any:
        tokens = self.torch.randint(0, self.vocabulary, (size, self.context + 1), device=self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def loss_fn(self, model: Any, batch: Any) -> Any:
        with self.torch.autocast(self.device.type, self.torch.bfloat16):
            logits = model(batch[0])
        return self.torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss_fn(self.model, batch).backward()
        self.optimizer.step()

    def sync(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def peak(self, work: Any) -> int | None:
        """Returns the allocator's peak while it runs; None on a CPU."""
        if self.device.type != "cuda":
            work()
            return None
        self.sync()
        self.torch.cuda.reset_peak_memory_stats()
        work()
        self.sync()
        return int(self.torch.cuda.max_memory_allocated())

    def timed(self, work: Any) -> float:
        self.sync()
        start = seconds()
        work()
        self.sync()
        return 1000 * (seconds() - start)

    def empty(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()

    # -- the three parts -------------------------------------------------------------------------------------

    def frontier(self) -> None:
        for size in BATCHES[:2] if self.smoke else BATCHES:
            if seconds() > self.end_s - 60:
                break
            batch, here = self.batch(size), {}
            for name, way in WAYS.items():
                try:
                    undo = self.on(way)
                except LookupError as error:
                    self.found["frontier"].append({"batch": size, "way": name, "why_not": str(error)})
                    continue
                try:
                    for _ in range(2):
                        self.step(batch)
                    here[name] = self.peak(lambda batch=batch: self.step(batch))
                except self.torch.OutOfMemoryError:
                    self.found["frontier"].append({"batch": size, "way": name, "why_not": "out of memory"})
                finally:
                    undo()
                    self.empty()
            ms: dict[str, list[float]] = {name: [] for name in here}
            for turn in range(2 if self.smoke else ROUNDS):
                for name in list(ms) if turn % 2 == 0 else list(ms)[::-1]:
                    undo = self.on(WAYS[name])
                    for _ in range(2):
                        self.step(batch)
                    ms[name].append(self.timed(lambda batch=batch: self.step(batch)))
                    undo()
            self.found["frontier"] += [
                {"batch": size, "way": name, "peak_bytes": here[name], "ms": ms[name]} for name in here
            ]
            self.write()

    def on(self, way: tuple[str, Any] | None) -> Any:
        if way is None:
            return lambda: None
        return LEVERS[way[0]].apply(self.training_context, way[1], Ledger())

    def out_of_memory(self) -> None:
        """Runs the same step with the whole device, and with less memory than it needs."""
        if self.device.type != "cuda":
            return
        cuda, size = self.torch.cuda, 4 if self.smoke else 32
        batch = self.batch(size)
        self.empty()
        fixed = cuda.memory_allocated()
        peak = self.peak(lambda: self.loss_fn(self.model, batch).backward())
        true = self.torch.cat([p.grad.flatten().float() for p in self.model.parameters()])
        assert peak is not None
        for share in LIMITS:
            self.empty()
            cap = true.numel() * 4 + fixed + share * (peak - fixed)
            cuda.set_per_process_memory_fraction(
                min(1.0, (cap + 2**28) / cuda.get_device_properties(0).total_memory)
            )
            frozen = self.torch.optim.SGD(self.model.parameters(), lr=0.0)
            entry: dict[str, Any] = {"batch": size, "cap_bytes": int(cap), "plain_peak_bytes": peak}
            try:
                loop = Loop(self.model, frozen, self.loss_fn, [batch], reduction="mean")
                start = seconds()
                step = next(iter(loop))
                self.sync()
                mine = self.torch.cat([p.grad.flatten().float() for p in self.model.parameters()])
                entry |= {
                    "parts": step.parts,
                    "seconds": seconds() - start,
                    "error": float((mine - true).norm() / true.norm()),
                }
                del mine
            except Exception as error:  # a failure of the Loop is a result, too
                entry["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                cuda.set_per_process_memory_fraction(1.0)
            self.found["out_of_memory"].append(entry)
            self.write()

    def finder(self) -> None:
        """Times every micro-batch, interleaved, then records the Loop's own choice."""
        size = 8 if self.smoke else 64
        batch = self.batch(size)
        micro_batches = [size // 2**at for at in range(size.bit_length()) if size // 2**at >= 1]

        def loop(micro_batch: Any) -> Any:
            def batches() -> Any:
                while True:
                    yield batch

            return Loop(
                self.model, self.optimizer, self.loss_fn, batches(), micro_batch=micro_batch, reduction="mean"
            )

        loops, ms = {each: iter(loop(each)) for each in micro_batches}, dict[int, list[float]]()
        for each, steps in list(loops.items()):
            try:
                for _ in range(2):
                    step = next(steps)
                if step.parts == size // each:
                    ms[each] = []
            except Exception:
                pass
            self.empty()
        for turn in range(2 if self.smoke else 4):
            for each in list(ms) if turn % 2 == 0 else list(ms)[::-1]:
                next(loops[each])
                ms[each].append(self.timed(lambda each=each: next(loops[each])))
        auto = loop("auto")
        for taken, _ in enumerate(auto):
            if auto.sized is not None or taken > 200:
                break
        chosen = auto.sized.micro_batch if auto.sized is not None else None
        self.found["finder"] = {
            "batch": size,
            "ms": {str(each): times for each, times in ms.items()},
            "chosen": chosen,
            "said": auto.sized.sentence() if auto.sized is not None else "no decision after 200 steps",
        }
        self.write()

    # -- the page --------------------------------------------------------------------------------------------

    def write(self) -> tuple[Path, ...]:
        return write_result(
            "memory_gpu" if self.device.type == "cuda" else "memory_gpu_smoke",
            self.made,
            self.page(),
            self.found,
            folder=self.out,
        )

    def page(self) -> str:
        rows = []
        plain = {
            entry["batch"]: median(entry["ms"])
            for entry in self.found["frontier"]
            if entry["way"] == "plain" and entry.get("ms")
        }
        for entry in self.found["frontier"]:
            if "why_not" in entry:
                rows.append((entry["batch"], entry["way"], "-", "-", entry["why_not"]))
                continue
            ms, peak = entry["ms"], entry["peak_bytes"]
            rate = entry["batch"] * self.context / median(ms) * 1000
            spread = f"[{quantile(ms, 0.25):.4g}, {quantile(ms, 0.75):.4g}], n={len(ms)}"
            times = (
                f"{median(ms) / plain[entry['batch']]:.2f}x"
                if entry["batch"] in plain
                else "plain does not fit"
            )
            rows.append(
                (
                    entry["batch"],
                    entry["way"],
                    "-" if peak is None else f"{peak / 2**30:.2f}",
                    f"{rate:,.0f}",
                    f"{median(ms):.4g} {spread}, {times}",
                )
            )
        failed = [
            (
                f"{e['cap_bytes'] / 2**30:.1f} of {e['plain_peak_bytes'] / 2**30:.1f}",
                e.get("parts", "-"),
                f"{e['error']:.1e}, {'same' if e['error'] <= CLOSE * 100 else '**different gradient**'}"
                if "error" in e
                else e["failed"],
                f"{e['seconds']:.2f}" if "seconds" in e else "-",
            )
            for e in self.found["out_of_memory"]
        ]
        finder = self.found["finder"]
        sweep = {int(each): median(ms) for each, ms in finder.get("ms", {}).items() if ms}
        best = min(sweep, key=lambda each: sweep[each]) if sweep else None
        beside = (
            f"Chosen: {finder.get('chosen')}; the sweep's fastest: {best}"
            + (
                f"; chosen over fastest: {sweep[finder['chosen']] / sweep[best]:.3f}"
                if best and finder.get("chosen") in sweep
                else ""
            )
            if finder
            else "not run"
        )
        return "\n".join(
            [
                f"# Memory of a 124M GPT\n\n{(__doc__ or '').split(chr(10), 2)[2].split('    python')[0].strip()}\n",
                "## Frontier (bfloat16 autocast, TF32, AdamW)\n",
                markdown_table(
                    (
                        "sequences",
                        "method",
                        "peak, GiB",
                        "tokens/s",
                        "ms a step [quartiles], relative to plain",
                    ),
                    rows,
                ),
                "",
                "## Out of memory\n",
                markdown_table(
                    ("allowed GiB of the step's GiB", "micro-batches", "error of the gradient", "seconds"),
                    failed,
                )
                if failed
                else "not run",
                "",
                "## The batch finder\n",
                beside + (f". {finder['said']}" if finder else ""),
                "",
                markdown_table(
                    ("micro-batch", "ms a step"), [(each, f"{ms:.4g}") for each, ms in sweep.items()]
                )
                if sweep
                else "",
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
    parser.add_argument(
        "--limit-s", type=float, default=440.0, help="start no new measurement after this many seconds"
    )
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    bench = Bench(
        torch,
        args.smoke,
        args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS),
        args.limit_s,
    )
    for part in (bench.out_of_memory, bench.finder, bench.frontier):
        if seconds() < bench.end_s:
            part()
    print(f"{bench.page()}\n\nwritten: {', '.join(path.name for path in bench.write())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
