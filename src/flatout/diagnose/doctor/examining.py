"""Questions to a Sight, one file a theme. Adding one is one function and one line in its file's QUESTIONS.

FD0x0 begins a theme; a code never changes and is never given twice.
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
    """Every question's check, in the order of the table. Questions about GPUs are left out where there is none."""
    none_here = gpu_is_here(sight) is False
    return [_checked(question, sight) for question in TABLE if not (question.gpu and none_here)]


def _checked(question: Question, sight: Sight) -> Check:
    """A question that breaks over what it reads must not end the others, and does not make anything fine."""
    try:
        return question.answer(sight)
    except Exception as error:
        return Check(question.code, question.name, question.theme, Verdict.UNSEEN, f"flatout's own mistake: {type(error).__name__}: {error}")
