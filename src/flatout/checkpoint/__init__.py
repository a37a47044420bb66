"""Writes and restores checkpoints exactly.

A checkpoint is a folder that verifies completely, or it does not count.

Runs in: the user's program, and flatout.Loop; `flatout rescue` reads checkpoints in the terminal.
Imports: plan.
Start with: checkpoints.py (CheckpointFolder), values.py (states as JSON and tensors), saver.py, loading.py.
"""
