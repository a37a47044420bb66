"""The command line. Only this package prints or exits; each command has its own file.

Runs in: the terminal. In the user's program: attached.py, exact_resume.py, live_line.py and
crash_explanation.py. On other nodes: agent.py and remote_comparison.py.
Imports: all packages but loop; click and rich.
Start with: main.py, run.py, tune.py.
"""
