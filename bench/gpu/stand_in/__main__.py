"""Runs a command on stand-in GPUs.

Usage: ``python bench/gpu/stand_in [--cards 2] [--mib 2048] [--waits FILE] [--empty-kernels] COMMAND...``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stand_in import CARDS, MIB, environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="stand_in")
    parser.add_argument("--cards", type=int, default=CARDS)
    parser.add_argument("--mib", type=int, default=MIB, help="memory of each card in MiB")
    parser.add_argument(
        "--waits", type=Path, help="write to this file how often each line waited for the card"
    )
    parser.add_argument(
        "--kernel-us", type=int, default=0, help="time for which each kernel keeps the card busy"
    )
    parser.add_argument(
        "--empty-kernels", action="store_true", help="kernels do nothing: for the time of the host alone"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("which command?")
    try:
        values = environment(None, args.cards, args.mib, args.waits, args.kernel_us, args.empty_kernels)
    except RuntimeError as error:
        sys.exit(f"stand_in: {error}")
    os.execvpe(args.command[0], args.command, values)


if __name__ == "__main__":
    main()
