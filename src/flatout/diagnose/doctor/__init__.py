"""Checks whether this machine is ready for training.

This file imports nothing: the child that imports torch loads it first, and its start-up time counts.

    snapshot.py     takes the machine snapshot; torch_child.py is its child, ceilings.py measures the ceilings
    checks.py       runs every check on a snapshot; each theme has its own file of checks
    check.py        the types of a check and its answer
    nvidia_smi.py   parses the output of nvidia-smi
    versions.py     compatible versions, from versions.json
"""
