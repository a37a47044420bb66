"""Sends the live figures of a run to experiment trackers, through their own clients.

Runs in: a process of its own beside the program, started by the flatout command.
Imports: schema, measure; the trackers' clients.
Start with: trackers.py (one class for each tracker; reads the figures that the program writes).
"""
