"""Searches for the best plan: measures levers and chooses between plans.

Runs in: the flatout command; comparisons also on other nodes (remote.py).
Imports: schema, job, guard, launch, levers, measure, probe, trial, numpy.
Start with: search.py (the stages), explore.py (how many programs a wave starts), design.py (which levers
each of them has on),
comparison.py (how programs are compared), effects.py (the regression).
"""
