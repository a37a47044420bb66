"""Inspects the machine and the script without changing anything. Works with torch broken or absent.

Runs in: the flatout command, here and on other nodes, and flatout.Loop.
Imports: schema, job.
Start with: machine.py (Facts), snapshot.py (machine snapshot), script.py and program.py (source code).
"""
