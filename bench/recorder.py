"""Runs a script as ``__main__`` with seeds set and records its losses. Independent of flatout.

    python recorder.py LOG COUNT [-m] SCRIPT [ARGUMENT...]

It seeds ``random``, numpy and torch with 0 when the script imports them. Every call of
``torch.autograd.backward`` (which ``Tensor.backward`` uses) adds a line to LOG: the loss as a hexadecimal
float, or the sum of the means of several losses. The process ends after COUNT backward passes; with COUNT 0
the script runs to its end. Only the started process writes: loader workers and other subprocesses of the
script are not recorded.
"""

import os
import random
import runpy
import sys


def main():
    if len(sys.argv) < 4 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    log, count, rest = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    as_module = rest[0] == "-m"
    if as_module:
        rest = rest[1:]
    random.seed(0)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(0)
    import torch

    torch.manual_seed(0)
    owner, seen = os.getpid(), 0
    really = torch.autograd.backward

    def backward(tensors, *args, **kwargs):
        nonlocal seen
        if os.getpid() != owner:
            return really(tensors, *args, **kwargs)
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        value = float(sum(float(loss.detach().double().mean()) for loss in losses))
        result = really(tensors, *args, **kwargs)
        out.write(value.hex() + "\n")
        seen += 1
        if count and seen >= count:
            out.flush()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        return result

    with open(log, "w", encoding="utf-8", buffering=1) as out:
        torch.autograd.backward = backward
        sys.argv = rest
        if as_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
            runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
