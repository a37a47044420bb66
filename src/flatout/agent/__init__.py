"""Attaches to the script and observes its training.

Importing this package patches nothing; only the ledger patches, on request.

Runs in: the user's program, in each of its Python processes, and flatout.Loop.
Imports: plan.
Start with: site/sitecustomize.py and bootstrap.py (entry), training_context.py, listener.py, ledger.py.
"""
