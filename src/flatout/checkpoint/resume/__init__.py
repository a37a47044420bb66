"""Exact resume of an unmodified script.

A replay runs the script's control flow again, on fake tensors without values, up to the step of a checkpoint.

Runs in: the user's program.
Imports: schema, job, agent, data, measure, torch.
Start with: session.py (ExactSession), `checkpoint/metadata.py` (which checkpoint, and whether its environment
still fits), value_log.py, fake_operators.py, resume_point.py.
"""
