"""Runs a script with a fixed seed under another seed: ``with_seed.py N SCRIPT [ARGUMENTS...]``.

The script is not edited.

N is added to every seed that the script gives to torch.manual_seed; with 0 it does what it does alone.
"""

import runpy
import sys
from pathlib import Path

import torch


def main():
    shift, script = int(sys.argv[1]), sys.argv[2]
    seeded = torch.manual_seed
    torch.manual_seed = lambda seed: seeded(int(seed) + shift)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
