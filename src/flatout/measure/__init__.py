"""Clocks, statistics, phases, parity, and models of links and memory. Touches no script.

Runs in: every process.
Imports: schema, job.
Start with: clock.py (the only reader of clocks), statistics.py, phases.py, parity.py.
"""
