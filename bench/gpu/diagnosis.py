"""Compares `flatout profile` on a GPU with direct measurements, and tests a leak and an out-of-memory error.

    python bench/gpu/diagnosis.py

It profiles two unmodified programs, the tutorial ResNet-18 and GPT-2 124M: step time, synchronisations and
their lines, peak memory, Tensor Core use. Next to each profile, the page shows the figures of torch alone in
a separate process (bench/gpu/truth.py): CUDA events around each step, torch's sync debug mode for the waiting
lines, the allocator's peak. If Nsight Compute is installed, it counts the Tensor Core instructions of GPT's
kernels. Another program keeps every loss, and a last one grows until memory is full.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from provenance import RESULTS, look, markdown_table, stamp, write_result

from flatout.measure.statistics import median, quantile
from flatout.schema.profile import ProfileRecord

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
NO_GPU = 2
TINY = {
    "tutorial.py": ("--batch-size", "8", "--images", "2000"),
    "gpt.py": (
        "--batch-size",
        "1",
        "--context",
        "32",
        "--vocabulary",
        "211",
        "--width",
        "32",
        "--heads",
        "2",
        "--layers",
        "2",
        "--tokens",
        "20000",
    ),
}
TENSOR_CORES = "sm__inst_executed_pipe_tensor.sum"
LAUNCHES = 400  # kernels that Nsight Compute profiles, after skipping as many
LIMIT_S = 200.0


class Failed(Exception):
    """Raised for a command that gave no figures, with its output."""


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def run(
    *words: str, limit_s: float = LIMIT_S, codes: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[str]:
    print(
        f"  {' '.join(Path(word).name if '/' in word else word for word in words)[:150]}",
        file=sys.stderr,
        flush=True,
    )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"not finished after {limit_s:.0f} s") from None
    if codes and done.returncode not in codes:
        raise Failed(f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done


def profiled(place: Path, budget: str, script: str, *arguments: str) -> ProfileRecord:
    flags = ("--json", "--job", str(place / script), "--steps", "40", "--budget", budget)
    done = run(
        sys.executable, "-m", "flatout", "profile", *flags, sys.executable, str(PROGRAMS / script), *arguments
    )
    return ProfileRecord.from_json(json.loads(done.stdout))


def truth(script: str, *arguments: str) -> dict[str, Any]:
    done = run(sys.executable, str(HERE / "truth.py"), "40", str(PROGRAMS / script), *arguments)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def tensor_core_kernels(script: str, *arguments: str) -> dict[str, bool]:
    """Returns kernel name -> whether it executed Tensor Core instructions, by the hardware's counter."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Failed("Nsight Compute is not installed")
    done = run(
        ncu,
        "--csv",
        "--metrics",
        TENSOR_CORES,
        "--clock-control",
        "none",
        "--launch-skip",
        str(LAUNCHES),
        "--launch-count",
        str(LAUNCHES),
        sys.executable,
        str(HERE / "truth.py"),
        "3",
        str(PROGRAMS / script),
        *arguments,
        codes=(),
    )
    lines = done.stdout.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise Failed(f"Nsight Compute counted nothing: {(done.stderr or done.stdout).strip()[-300:]}")
    found: dict[str, bool] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row.get("Metric Name") == TENSOR_CORES:
            used = float((row.get("Metric Value") or "0").replace(",", "")) > 0
            found[row["Kernel Name"]] = found.get(row["Kernel Name"], False) or used
    return found


def beside_truth(record: ProfileRecord, true: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns rows with the figure's name, the profile's figure, and the figure of torch alone."""
    step = true["step_ms"]
    of_profile = record.step_ms_list
    rows = [
        (
            "step, ms [quartiles]",
            f"{record.step_ms:.3g} [{quantile(of_profile, 0.25):.3g}, {quantile(of_profile, 0.75):.3g}], n={len(of_profile)}",
            f"{median(step):.3g} [{quantile(step, 0.25):.3g}, {quantile(step, 0.75):.3g}], n={len(step)}",
        )
    ]
    observed = {}
    for synchronisation in record.synchronisations:
        if synchronisation.place is not None and not synchronisation.non_blocking:
            observed[synchronisation.place.line] = (
                observed.get(synchronisation.place.line, 0.0) + synchronisation.calls
            )
    syncs = {int(line): calls for line, calls in true["syncs"].items()} if true["syncs"] is not None else None
    spelled = _lines(syncs) if syncs is not None else "not on a CPU"
    rows.append(("synchronisations, calls a step by line", _lines(observed), spelled))
    if record.memory is not None:
        peak = f"{true['peak_bytes'] / 2**20:.0f}" if true["peak_bytes"] else "not on a CPU"
        rows.append(("peak memory, MiB", f"{record.memory.peak_bytes / 2**20:.0f}", peak))
    return rows


def _lines(calls: dict[int, float]) -> str:
    return ", ".join(f"line {line}: {count:.2g}" for line, count in sorted(calls.items())) or "none"


def of_profile(record: ProfileRecord) -> str:
    rows = [
        (
            o.name,
            f"{o.calls:.3g}",
            "-" if o.device_ms is None else f"{o.device_ms:.3g}",
            f"{100 * o.share:.0f} %",
            "-" if o.roofline is None else f"{100 * o.roofline:.0f} %",
            o.limit or "-",
            {True: "yes", False: "no", None: "-"}[o.tensor_cores],
            f"{Path(o.place.file).name}:{o.place.line}" if o.place else "-",
        )
        for o in record.operations[:8]
    ]
    what_ifs = [
        (w.name, f"{w.ratio.median:.2f}x [{w.ratio.low:.2f}, {w.ratio.high:.2f}]" if w.ratio else w.why_not)
        for w in record.what_ifs
    ]
    gaps = ", ".join(f"{gap.host_activity} {gap.ms:.3g} ms" for gap in record.idle_gaps[:4])
    idle = f"{record.idle_ms:.3g} ms a step ({gaps})" if record.idle_ms is not None else "not measured"
    overhead = f"{record.overhead.median:.2f}x" if record.overhead else "not measured"
    return "\n".join(
        [
            f"Bound: **{record.bound}**: {record.bound_why}  ",
            f"Device idle: {idle}. A profiled step compared with an undisturbed one: {overhead}.\n",
            markdown_table(
                (
                    "operator",
                    "calls",
                    "device ms",
                    "share",
                    "share of its roofline",
                    "limit",
                    "Tensor Cores",
                    "line",
                ),
                rows,
            ),
            "",
            markdown_table(("without", "as fast"), what_ifs),
            "",
            *(f"* {f.rule} {f.message}" for f in record.findings),
            *(f"* note: {note}" for note in record.notes),
            "",
        ]
    )


def attempt(parts: list[str], raw: dict[str, Any], name: str, work: Callable[[], tuple[str, Any]]) -> None:
    """Adds a section to the page; a failure becomes a line of it, and the others still run."""
    try:
        text, raw[name] = work()
    except Failed as failure:
        text, raw[name] = f"**failed**: {failure}\n", {"failure": str(failure)}
    parts += [f"## {name}\n", text]


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
        "--budget", default=None, help="time budget of each profile (default 60s; 15s with --smoke)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    if not args.smoke and not has_gpu():
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    budget = args.budget or ("15s" if args.smoke else "60s")
    made = stamp(look())
    folder = args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS)
    parts, raw = ["# `flatout profile` on a GPU, compared with direct measurements\n"], dict[str, Any]()
    if args.smoke:
        parts.append(
            "**A smoke run at a tiny size: it only shows that the benchmark works. Its figures are meaningless.**\n"
        )
    with tempfile.TemporaryDirectory(prefix="profile-") as home:
        place = Path(home)

        def program(script: str) -> Callable[[], tuple[str, Any]]:
            def work() -> tuple[str, Any]:
                arguments = TINY[script] if args.smoke else ()
                record, true = profiled(place, budget, script, *arguments), truth(script, *arguments)
                text = markdown_table(("", "flatout profile", "torch alone"), beside_truth(record, true))
                return f"{text}\n\n{of_profile(record)}", {"profile": record.to_json(), "truth": true}

            return work

        def counted() -> tuple[str, Any]:
            kernels = tensor_core_kernels("gpt.py", *(TINY["gpt.py"] if args.smoke else ()))
            rows = [(name[:120], "yes" if used else "no") for name, used in kernels.items()]
            return f"{markdown_table(('kernel', 'Tensor Core instructions'), rows)}\n", kernels

        def leak() -> tuple[str, Any]:
            found = profiled(place, budget, "leaking.py").tensor_growth
            if found is None:
                raise Failed("the profile did not search for a leak")
            line = (
                f"{Path(found.place.file).name}:{found.place.line}: {found.place.text.strip()}"
                if found.place
                else "no line"
            )
            return (
                f"{found.bytes_a_step / 1024:.1f} KiB a step on the {found.where}, leaking: {found.leaking}; {found.holder}; {line}\n",
                found.to_json(),
            )

        def too_large() -> tuple[str, Any]:
            done = run(
                sys.executable,
                "-m",
                "flatout",
                "run",
                sys.executable,
                str(PROGRAMS / "too_large.py"),
                codes=(),
            )
            return f"```\n{done.stderr.strip()[-2500:]}\n```\n", {
                "code": done.returncode,
                "stderr": done.stderr[-6000:],
            }

        steps = {
            "Tutorial ResNet-18": program("tutorial.py"),
            "GPT-2 124M": program("gpt.py"),
            "A loop that keeps its losses": leak,
        }
        if has_gpu():
            steps |= {"Tensor Cores of GPT-2, by Nsight Compute": counted, "Out of memory": too_large}
        for name, work in steps.items():
            print(name, file=sys.stderr, flush=True)
            attempt(parts, raw, name, work)
            written = write_result("diagnosis_gpu", made, "\n".join(parts), raw, folder=folder)
    print("\n".join(parts))
    print("written:", *(path.name for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
