"""Is this machine ready. Nothing is imported here: the child that imports torch begins with this file, and everybody waits for it.

    seeing.py       takes the Sight; torch_child.py is its child, ceilings.py has the ceilings measured
    examining.py    every question, asked of a Sight; the questions are in one file a theme, beside it
    check.py        what a question and its answer are
    graphics.py     what nvidia-smi says, as values; versions.json and versions.py what fits what; packages.py the commands of this system
"""
