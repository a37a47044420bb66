"""Options that several commands share, with their checks, and the output of commands that measure.

Runs in: the terminal.
Start with: arguments.py (types of options), configuration.py (pyproject.toml, environment), ranks.py (--procs, --gpus).
"""
