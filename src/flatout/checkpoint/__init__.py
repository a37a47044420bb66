"""Checkpoints: their files, those of an unmodified script (rescue), and exact resume.

A checkpoint is a folder that verifies completely, or it does not count.

Runs in: the user's program, and flatout.Loop; `flatout rescue` reads checkpoints in the terminal.
Imports: schema, job, agent, data, measure.
Start with: checkpoints.py (CheckpointFolder), values.py (states as JSON and tensors), attach.py (the entry of
a run that keeps checkpoints), rescue.py, resume/session.py (ExactSession).
"""
