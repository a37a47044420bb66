"""Runs a program and reports at its end, on standard error, how many CUDA graphs were recorded and how often
they were replayed.
"""

import atexit
import runpy
import sys

import torch

COUNT = {"recorded": 0, "replayed": 0}
begin, replay = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.replay


def capture_begin(graph, *args, **kwargs):
    COUNT["recorded"] += 1
    begin(graph, *args, **kwargs)


def counted_replay(graph):
    COUNT["replayed"] += 1
    replay(graph)


torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.replay = capture_begin, counted_replay
atexit.register(
    lambda: print(f"graphs: {COUNT['recorded']} recorded, {COUNT['replayed']} replayed", file=sys.stderr)
)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
