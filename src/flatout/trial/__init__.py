"""One measured run of a program: its folder, its worker inside the program, and its parent outside.

Runs in: the user's program (worker, probes) and the flatout command (parent).
Imports: all packages with the numbers 0 to 2 (tests/test_arrows.py).
Start with: parent.py (Trial), worker.py (Worker and its commands), probes.py.
"""
