"""Programs run one after another in one process that imports torch once:

``several.py NAME ARGUMENTS... + NAME ARGUMENTS...``; a line `== N` precedes each.
"""

import runpy
import sys

import torch

given, programs = sys.argv[1:], [[]]
for argument in given:
    if argument == "+":
        programs.append([])
    else:
        programs[-1].append(argument)
for number, program in enumerate(programs):
    print(f"== {number}", flush=True)
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
    torch.set_default_device(None)
