"""Fixes a program: the edits of its findings, file by file, without writing anything."""

import difflib
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from flatout.diagnose.rewrites import apply_edits, replace_spans, to_file_lines
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile, notebook
from flatout.schema.findings import Edit, Finding
from flatout.schema.outputs import FixedFile

INDENTS: tuple[int | str, ...] = (1, 2, 4, "\t")  # of the JSON of notebooks, as editors write it


def fixes(program: ScriptProgram, findings: Sequence[Finding]) -> list[tuple[FixedFile, str]]:
    """Each file that would change, and its new text.

    Findings come in their order; one whose edits overlap earlier ones is left, for the next time."""
    changed = []
    for source in program.sources:
        edits: list[Edit] = []
        code, fixed, not_fixed = source.text, [], []
        for finding in findings:
            proposed = (
                to_file_lines(source, finding.place.file, finding.edits) if finding.place is not None else []
            )
            if not proposed:
                continue
            new = [edit for edit in proposed if edit not in edits]
            result = apply_edits(source.text, [*edits, *new])
            if result is None:
                not_fixed.append(finding)
                continue
            edits += new
            code = result
            fixed.append(finding)
        text = code
        if source.notebook and fixed:
            text = _edited_notebook(source, edits, code)
            if text == source.notebook:
                fixed, not_fixed = [], [*fixed, *not_fixed]
        if fixed or not_fixed:
            changed.append((FixedFile(source.path, fixed, _diff(source, text), not_fixed), text))
    return changed


def _edited_notebook(source: SourceFile, edits: list[Edit], code: str) -> str:
    """The JSON text of a notebook with the edits; as it is if more than the edited cells would change."""
    document = json.loads(source.notebook)
    write = _json_writer(source.notebook, document)
    if write is None:
        return source.notebook
    edits_by_cell: dict[int, list[Edit]] = {}
    for edit in edits:
        offset = edit.line - source.cell(edit.line)[1]
        number = next(number for first, number in reversed(source.cells) if first <= edit.line)
        edits_by_cell.setdefault(number, []).append(
            Edit(edit.line - offset, edit.column, edit.end_line - offset, edit.end_column, edit.text)
        )
    for number, cell_edits in edits_by_cell.items():
        cell = document["cells"][number - 1]
        text = replace_spans("".join(cell["source"]), cell_edits)
        if text is None:
            return source.notebook
        cell["source"] = text if isinstance(cell["source"], str) else text.splitlines(keepends=True)
    text = write(document)
    new_code, _ = notebook(text, source.path)
    return text if _nonblank(new_code) == _nonblank(code) else source.notebook


def _json_writer(text: str, document: object) -> Callable[[object], str] | None:
    """What writes this JSON as it is written; None if none of INDENTS fits."""
    end = text[len(text.rstrip("\n")) :]
    for indent, ascii_only in product(INDENTS, (False, True)):
        write = partial(json.dumps, indent=indent, ensure_ascii=ascii_only)
        if write(document) + end == text:
            return lambda changed: write(changed) + end
    return None


def _nonblank(code: str) -> list[str]:
    return [line for line in code.splitlines() if line.strip()]


def _diff(source: SourceFile, after: str) -> str:
    """A unified diff that `patch -p0` and `git apply -p0` accept."""
    texts = (source.notebook or source.text, after)
    old, new = (list(io.StringIO(text, newline="\n")) for text in texts)
    diff = difflib.unified_diff(old, new, source.path, source.path, n=3)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff
    )
