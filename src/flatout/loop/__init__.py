"""The library for users who write their own training loop: `flatout.Loop` and its parts.

Runs in: a script that imports flatout.
Imports: all packages but cli, compare and integrations.
Start with: loop.py (Loop), gradient.py, update.py, saving.py.
"""
