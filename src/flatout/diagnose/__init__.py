"""Turns source, profiles and exceptions into Findings, and profiles into predictions.

To add a rule, add one file in rules/.

Runs in: the flatout command; in the user's program after a crash (explain.py).
Imports: schema, job, agent, guard, launch, measure, probe, trial.
Start with: rule.py (Rule), kind.py (FailureKind), profiling.py (run_profile), doctor/check.py (MachineCheck).
"""
