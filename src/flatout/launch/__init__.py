"""Parses a command, prepares its environment, starts and supervises its processes, here and on other nodes.

Runs in: the flatout command, the local launcher, the supervisor, and the agent of each node.
Imports: schema, job, measure, psutil.
Start with: command.py, environment.py, local_launcher.py, supervisor.py, torchrun.py.
"""
