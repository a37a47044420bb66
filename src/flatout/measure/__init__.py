"""Clocks, statistics, phases, parity. Nothing here starts a process or touches a script."""
