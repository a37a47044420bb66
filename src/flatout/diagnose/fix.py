"""Fixes a program: the edits of its findings, file by file, without writing anything."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from flatout.diagnose.rewrites import apply_edits
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Edit, Finding
from flatout.schema.outputs import FixedFile


def fixes(program: ScriptProgram, findings: Iterable[Finding]) -> list[tuple[FixedFile, str]]:
    """Return each file that would change, and its new text.

    Findings come in their order; one whose edits overlap earlier ones is left, for the next time.
    """
    found = list(findings)
    changed = []
    for source in program.sources:
        edits: list[Edit] = []
        text, fixed, left = source.text, [], []
        for finding in found:
            if not finding.edits or finding.place is None or finding.place.file != source.path:
                continue
            new = [edit for edit in finding.edits if edit not in edits]
            result = apply_edits(source.text, [*edits, *new])
            if result is None:
                left.append(finding)
                continue
            edits += new
            text = result
            fixed.append(finding)
        if fixed or left:
            changed.append((FixedFile(source.path, fixed, _diff(source.path, source.text, text), left), text))
    return changed


def _diff(path: str, before: str, after: str) -> str:
    """A unified diff that `patch -p0` and `git apply -p0` accept."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), path, path, n=3
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
