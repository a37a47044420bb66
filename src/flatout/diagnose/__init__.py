"""Turns source, profiles and exceptions into Findings.

To add a rule, add one file in rules/ and one line to its table.

Runs in: the flatout command; in the user's program after a crash.
Imports: plan, probe, levers, measure, trial, engine, launch.
Start with: rule.py (Rule), kind.py (FailureKind), profiling.py (Profiling), doctor/check.py (MachineCheck).
"""
