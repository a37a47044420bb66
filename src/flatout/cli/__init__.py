"""The command line: one command per file. Only this package prints or exits, apart from a few start-up files.

Options that several commands share, and what they do with them, are in options/.

Runs in: the terminal.
Imports: all packages but loop and integrations; click and rich.
Start with: main.py, run.py, tune.py, options/arguments.py.
"""
