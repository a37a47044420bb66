"""The table of checks, with one file per theme.

To add a check, write a function and add it to its file's QUESTIONS.

Each theme begins with a code FD0x0. Codes never change and are never reused.
"""

from flatout.diagnose.doctor import compilers, disks, driver, gpus, memory, processor, python, resources, switches, system, torch_build, torch_import
from flatout.diagnose.doctor.check import Question
from flatout.diagnose.doctor.graphics import gpu_is_here
from flatout.plan.sight import Check, Sight, Verdict

TABLE: tuple[Question, ...] = tuple(
    question for theme in (python, torch_import, torch_build, driver, gpus, compilers, system, processor, memory, resources, disks, switches)
    for question in theme.QUESTIONS)
THEMES = tuple(dict.fromkeys(question.theme for question in TABLE))


def examine(sight: Sight) -> list[Check]:
    """The result of every check, in table order. Checks of GPUs are left out if there is no GPU."""
    none_here = gpu_is_here(sight) is False
    return [_checked(question, sight) for question in TABLE if not (question.gpu and none_here)]


def _checked(question: Question, sight: Sight) -> Check:
    """A check that raises must neither stop the others nor count as fine."""
    try:
        return question.answer(sight)
    except Exception as error:
        return Check(question.code, question.name, question.theme, Verdict.UNSEEN, f"bug in flatout: {type(error).__name__}: {error}")
