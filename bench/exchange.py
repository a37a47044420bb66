"""Measures the traffic between ranks: bytes and waiting time.

flatout's local launcher starts the ranks on this machine, with gloo and one thread each. The model is an MLP
whose exchange is a large part of a step. In each comparison, the same ranks run both sides, interleaved in
the order A B B A, as the levers would apply them. A is always float32 in buckets of 25 MiB that start during
the backward pass. *waiting* is the time that a backward pass waits after it has computed its gradients
(median of all passes of rank 0, and the quartiles). *step* is A's time over B's, with a bootstrap interval
over rounds. The limited link is the loopback of a separate network namespace behind a token bucket (`tc ...
tbf`). All ranks share it in both directions, and it adds no network latency.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import HERE, RESULTS, SRC, markdown_table, read_result, stamp, write_result

from flatout.measure.statistics import Round, block_ms, compare, median, quantile

PROGRAM = HERE / "programs" / "exchange.py"
TIMEOUT_S = 3000.0
CALM = 1.0  # load average above which nothing is timed
A: dict[str, Any] = {"mib": 25}
SIDES: dict[str, dict[str, Any]] = {
    "no early buckets": {"mib": 25, "early": False},
    "buckets of 1 MiB": {"mib": 1},
    "buckets of 5 MiB": {"mib": 5},
    "one bucket": {"mib": "all"},
    "bf16": {"mib": 25, "way": "bf16"},
    "fp16": {"mib": 25, "way": "fp16"},
    "powersgd, rank 2": {"mib": 25, "way": {"kind": "powersgd", "rank": 2, "after": 2}},
    "bf16, buckets of 5 MiB": {"mib": 5, "way": "bf16"},
}


def ranks(job: dict[str, Any], procs: int, rate: str | None) -> dict[str, Any]:
    """Returns the records of the program. ``rate``: the limit of the loopback."""
    folder, space = Path(tempfile.mkdtemp(prefix="exchange-")), f"fo{os.getpid() % 10000}x"
    (folder / "job.json").write_text(json.dumps(job))
    words = [
        sys.executable,
        "-m",
        "flatout.launch.local_launcher",
        "--procs",
        str(procs),
        "--",
        sys.executable,
        str(PROGRAM),
        str(folder / "job.json"),
        str(folder),
    ]
    try:
        if rate is not None:
            for command in (
                f"ip netns add {space}",
                f"ip -n {space} link set lo up",
                f"ip netns exec {space} tc qdisc add dev lo root tbf rate {rate} burst 512kb latency 50ms",
            ):
                subprocess.run(command.split(), check=True, capture_output=True, text=True)
            words = ["ip", "netns", "exec", space, *words]
        done = subprocess.run(
            words,
            env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found
    finally:
        if rate is not None:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def comparisons(procs: int, rate: str | None, args: argparse.Namespace) -> dict[str, Any]:
    job = {
        "width": args.width,
        "layers": args.layers,
        "batch": args.batch * procs,
        "rounds": args.rounds,
        "block": args.block,
        "pairs": [{"name": name, "a": A, "b": side} for name, side in SIDES.items()],
    }
    return {
        **ranks(job, procs, rate),
        "procs": procs,
        "rate": rate,
        "width": args.width,
        "layers": args.layers,
        "batch": args.batch,
    }


def rows_of(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Returns the rows; the first is A itself, over all comparisons."""

    def of(pairs: list[dict[str, Any]], side: str) -> tuple[float, list[float]]:
        blocks = [block for pair in pairs for round_ in pair["rounds"] for block in round_[side]]
        return median([time for times, _ in blocks for time in times]), [
            wait for _, waits in blocks for wait in waits
        ]

    def row(
        name: str, traffic: dict[str, Any], step: float, waits: list[float], ratio: str
    ) -> tuple[Any, ...]:
        return (
            name,
            f"{traffic['sent_bytes'] / 1e6:.2f}",
            f"{traffic['left_early']} of {traffic['buckets']}",
            f"{step:.0f}",
            f"{median(waits):.0f} [{quantile(waits, 0.25):.0f}, {quantile(waits, 0.75):.0f}]",
            ratio,
        )

    pairs = found["pairs"]
    rows = [row("A: float32, 25 MiB, early", pairs[0]["traffic"]["a"], *of(pairs, "a"), "1")]
    for pair in pairs:
        # a round has two blocks a side: the outer and the inner ones
        rounds = [
            Round(block_ms(a[0]), block_ms(b[0]))
            for blocks in pair["rounds"]
            for a, b in zip(blocks["a"], blocks["b"], strict=True)
        ]
        ratio = compare([rounds])
        rows.append(
            row(
                pair["name"],
                pair["traffic"]["b"],
                *of([pair], "b"),
                f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]",
            )
        )
    return rows


def page(links: dict[str, Any]) -> str:
    parts = [f"# Traffic between ranks\n\n{(__doc__ or '').split(chr(10), 2)[2].strip()}\n"]
    header = (
        "side",
        "MB sent a step",
        "early buckets",
        "step, ms",
        "waiting, ms",
        "step, A over it",
    )
    for name, found in links.items():
        parts.append(f"## {name}\n")
        if found is None:
            parts.append("*not run*\n")
            continue
        rounds = found["pairs"][0]["rounds"]
        parts.append(
            f"{found['parameters'] / 1e6:.1f} M parameters ({found['layers']} layers of {found['width']}), {found['batch']} samples for each rank, "
            f"{len(rounds)} rounds of A B B A, {len(rounds[0]['a'][0][0])} passes a block.\n"
        )
        parts.append(markdown_table(header, rows_of(found)) + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="some of loopback, limited, four, separated by commas")
    parser.add_argument("--rate", default="2gbit", help="rate of the limited link, in the notation of tc")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="samples for each rank")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=5, help="passes for each block")
    parser.add_argument(
        "--busy", action="store_true", help="measure even if the machine is busy (to test the benchmark)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made = stamp()
    known = read_result("exchange", made, args.out)
    names = {
        "loopback": "Two ranks, loopback",
        "limited": f"Two ranks, a link of {args.rate} in total",
        "four": "Four ranks on two cores, loopback",
    }
    links: dict[str, Any] = {name: known.get("links", {}).get(name) for name in names.values()}
    wanted = args.only.split(",") if args.only else list(names)
    if not set(wanted) <= names.keys():
        raise SystemExit(f"--only accepts some of {', '.join(names)}, not {args.only!r}")
    calm = args.busy or (made["load_at_start"] or 0.0) < CALM
    if not calm and set(wanted) & set(names):
        print(
            f"nothing is measured because the load average is {made['load_at_start']}; wait until the machine is idle, or add --busy",
            file=sys.stderr,
        )
    for name in wanted:
        print(name, file=sys.stderr, flush=True)
        if calm:
            links[names[name]] = comparisons(
                4 if name == "four" else 2, args.rate if name == "limited" else None, args
            )
        write_result("exchange", made, page(links), {"links": links}, folder=args.out)
    print(page(links))


if __name__ == "__main__":
    main()
