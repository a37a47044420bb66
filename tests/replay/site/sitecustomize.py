"""Comes into a program under flatout through PYTHONPATH. When saves are due, and when the program is killed, is said by the environment:

    TRAP_SAVE=10    besides the first one, saves are due when 10 and more steps are done
    TRAP_KILL=16    where 16 steps are done, and everything that was begun is written, the process is ended by SIGKILL
    TRAP_OFF=byte   this check of ``mutants.py`` is switched off; several with commas
"""

import os
import runpy


def due(saver, step):
    if step >= int(os.environ.get("TRAP_KILL", "1000000")):
        saver.wait()
        os.kill(os.getpid(), 9)
    return saver.last_step < int(os.environ["TRAP_SAVE"]) <= step


if "TRAP_SAVE" in os.environ:
    __import__("flatout.state.saver").state.saver.Saver.due = due
if os.environ.get("TRAP_OFF"):  # not as a module, because modules are inspected
    runpy.run_path(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "mutants.py"))["switch_off"](os.environ["TRAP_OFF"])
