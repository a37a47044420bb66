"""Searches for the best plan: measures levers and chooses between plans.

Runs in: the flatout command; comparisons also on other nodes (remote_comparison.py).
Imports: schema, job, guard, launch, levers, measure, probe, trial, numpy.
Start with: search.py (the stages), explore.py (the waves of programs), design.py (what a wave measures),
comparison.py (how programs are compared), effects.py (the regression).
"""
