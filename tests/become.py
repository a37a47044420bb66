"""Becomes the program of its arguments, after their environment as JSON, and the leader of a new session."""

import json
import os
import shutil
import sys

environment, *argv = json.loads(sys.argv[1]), *sys.argv[2:]
os.setsid()
os.execve(shutil.which(argv[0], path=environment.get("PATH")), argv, environment)
