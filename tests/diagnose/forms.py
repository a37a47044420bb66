"""Programs with a fault and twins without it, made of templates; the fault is on the lines that end with ``# <-``."""

import re
import textwrap

import pytest

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

TEXT = "{line}"  # a program without a template
FIELD = re.compile(r"\{(\w+)(?:=([^{}]*))?\}")
DESCENDS = re.compile(r"^( *)DESCEND (\w[\w.]*) (.+)$", re.MULTILINE)


def filled(template, given=None):
    """The template with its ``{fields}``; a text alone is the field ``line``.

    A field that is not given is its default (``{test=x > 0}``), or ``pass`` where it is the whole line, or nothing.
    ``DESCEND optimizer loss`` is the usual step, in three lines.
    """
    given = {"line": given} if isinstance(given, str) else given or {}
    assert given.keys() <= {name for name, _ in FIELD.findall(template)}, given

    def field(match):
        alone = not (match.string[: match.start()] + "\n").splitlines()[-1].strip()
        alone = alone and match.string[match.end() :].startswith("\n")
        return given.get(match[1], match[2] or ("pass" if alone else ""))

    text = FIELD.sub(field, template) if "{" in template else template
    return DESCENDS.sub(r"\1\2.zero_grad()\n\1\3.backward()\n\1\2.step()", text)


def cases(forms):
    """The cases of a table: rule and template -> name -> the fields of the template."""
    return [
        pytest.param(code, template, given, id=name)
        for (code, template), rows in forms.items()
        for name, given in rows.items()
    ]


def marked(text):
    return [at for at, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]


def assert_found(head, code, template, given=None, *, of_all=False):
    """The rule finds the marked lines and no other; ``of_all``: nor does any other rule."""
    text = head + textwrap.dedent(filled(template, given))
    found = check(ScriptProgram.of_text(text), [] if of_all else [code])
    assert [(f.rule, f.place.line) for f in found] == [(code, at) for at in marked(text)]
