"""Applies a Plan to a training context in a fixed order, guards it, and keeps checkpoints. Imports no lever.

Runs in: the user's program, and flatout.Loop; the guard's verdict in the flatout command.
Imports: plan, capture, measure, state.
Start with: applier.py (Applier), guard.py (verdict), replica.py (StepReplica), rescue.py (Rescue).
"""
