"""Probes: each observes some whole ticks of the running program, returns JSON, and undoes its changes.

Runs in: the user's program.
Start with: probe.py (Probe), then active.py, which opens them by name.
"""
