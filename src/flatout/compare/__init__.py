"""Compares two programs: two commands, revisions, environments or plans, or one with a stored baseline.

Also reads what earlier commands left in a project (history.py).

Runs in: the flatout command.
Imports: schema, job, guard, launch, measure, probe, trial, tune.
Start with: sides.py (what is compared), pairs.py (how it is measured), evaluate.py (intervals, losses, gates).
"""
