"""Enters a program under flatout through PYTHONPATH. The environment schedules checkpoints and the kill:

TRAP_SAVE=10    after the first checkpoint, another is due when 10 or more steps are done
TRAP_KILL=16    after 16 steps, once all pending writes are done, the process gets SIGKILL
TRAP_OFF=byte   switches off this check of ``bench/again_mutants.py``; separate several with commas
"""

import os
import runpy


def due(saver, step):
    if step >= int(os.environ.get("TRAP_KILL", "1000000")):
        saver.wait()
        os.kill(os.getpid(), 9)
    return saver.last_step < int(os.environ["TRAP_SAVE"]) <= step


if "TRAP_SAVE" in os.environ:
    __import__("flatout.checkpoint.saver", fromlist=["saver"]).CheckpointWriter.due = due
if os.environ.get("TRAP_OFF"):  # not as a module, because modules are inspected
    mutants = os.path.join(os.path.dirname(__file__), "..", "..", "..", "bench", "again_mutants.py")
    runpy.run_path(mutants)["switch_off"](os.environ["TRAP_OFF"])
