"""Alternatives to storing tensors for the backward pass: derive, recompute or offload them.

Runs in: the user's program, and flatout.Loop.
Imports: no other package of flatout.
Start with: rederive.py, blocks.py, host.py; the levers `recompute` and `offload` use them.
"""
