"""`flatout check --each`: several files at once, as a pre-commit hook names them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

from flatout.diagnose.check import check
from flatout.diagnose.ranking import order
from flatout.diagnose.rules.ignore_without_effect import RULE as UNUSED
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding


def findings_of_each(
    programs: Sequence[ScriptProgram], select: Collection[str], ignore: Collection[str]
) -> list[Finding]:
    """Check each file as a script; return the findings in these files, each once.

    The modules that a file imports give context, but are reported only if they are among the files.
    """
    given = {os.path.realpath(program.main.path) for program in programs}
    # A file is read without the scripts that import it, in which its comments may have an effect.
    ignored = [*ignore, *([] if UNUSED.code in select else [UNUSED.code])]
    found: dict[tuple[object, ...], Finding] = {}
    for program in programs:
        for finding in check(program, select, ignored):
            place = finding.place
            file = re.sub(r"\[\d+\]$", "", place.file) if place is not None else program.main.path
            if os.path.realpath(file) in given:
                at = (place.line, place.column, place.file.removeprefix(file)) if place is not None else ()
                found.setdefault((finding.rule, os.path.realpath(file), *at), finding)
    return sorted(found.values(), key=order)
