"""Edits of a source file that keep everything else as it is written: comments, layout, line ends.

A rule attaches them to its finding if they are certain. Each function returns an empty list where the exact
span is uncertain. In a notebook, lines count from the start of the cell.
"""

import ast
import io
import tokenize

from flatout.probe.script import SourceFile
from flatout.schema.findings import Edit

Position = tuple[int, int]  # line from 1, column from 0, in characters
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}


def insert_after(source: SourceFile, node: ast.expr, text: str) -> list[Edit]:
    """Insert text right after an expression without parentheses around it."""
    end = _end(source, node)
    return _edit(source, end, end, text)


def wrap(source: SourceFile, node: ast.expr, before: str, after: str) -> list[Edit]:
    """Put text before and after an expression without parentheses around it."""
    start, end = _start(source, node), _end(source, node)
    return [*_edit(source, start, start, before), *_edit(source, end, end, after)]


def replace(source: SourceFile, node: ast.expr, text: str) -> list[Edit]:
    """Replace an expression, or its text between parentheses."""
    return _edit(source, _start(source, node), _end(source, node), text)


def add_statement_after(source: SourceFile, node: ast.AST, line: str) -> list[Edit]:
    """Add a line after an expression statement that has its lines for itself."""
    statement = source.statement(node)
    if not isinstance(statement, ast.Expr) or not _has_own_lines(source, statement):
        return []
    (first, column), (last, _) = _start(source, statement), _end(source, statement)
    indent = source.lines[first - 1][:column]
    end = (last, len(source.lines[last - 1]))
    return _edit(source, end, end, f"\n{indent}{line}")


def wrap_in_with(source: SourceFile, loop: ast.stmt, context: str) -> list[Edit]:
    """Put a loop into a ``with`` block, one level deeper, where no text of several lines would change."""
    body = getattr(loop, "body", None)
    if not body or not _has_own_lines(source, loop):
        return []
    (first, column), (last, _) = _start(source, loop), _end(source, loop)
    indent = source.lines[first - 1][:column]
    body_indent = source.lines[body[0].lineno - 1][: body[0].col_offset]
    indent_unit = body_indent.removeprefix(indent)
    strings = (node for node in ast.walk(loop) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    if indent_unit.strip() or not indent_unit or any(node.lineno != node.end_lineno for node in strings):
        return []
    edits = _edit(source, (first, 0), (first, 0), f"{indent}with {context}:\n{indent_unit}")
    for number in range(first + 1, last + 1):
        if source.lines[number - 1].strip():
            edits += _edit(source, (number, 0), (number, 0), indent_unit)
    return edits if source.cell(first)[0] == source.cell(last)[0] else []


def remove_attribute(source: SourceFile, node: ast.Attribute) -> list[Edit]:
    """Replace ``value.name`` by ``value``."""
    return _remove_from_dot(source, node, node)


def remove_call(source: SourceFile, call: ast.Call) -> list[Edit]:
    """Replace ``value.name(...)`` by ``value``."""
    return _remove_from_dot(source, call.func, call) if isinstance(call.func, ast.Attribute) else []


def _remove_from_dot(source: SourceFile, attribute: ast.Attribute, last: ast.expr) -> list[Edit]:
    """Remove everything from the dot of an attribute to the end of an expression."""
    end = _end(source, attribute)
    dots = [token for token in _tokens(source, attribute) if token.string == "." and token.end <= end]
    return _edit(source, dots[-1].start, _end(source, last), "") if dots else []


def _has_own_lines(source: SourceFile, statement: ast.stmt) -> bool:
    """Whether a statement has its lines for itself, but for a comment."""
    (first, column), (last, end) = _start(source, statement), _end(source, statement)
    before, after = source.lines[first - 1][:column].strip(), source.lines[last - 1][end:].strip()
    return not before and (not after or after.startswith("#"))


def add_argument(source: SourceFile, call: ast.Call, argument: str) -> list[Edit]:
    """Add an argument at the end of a call."""
    tokens = [token for token in _tokens(source, call) if token.type not in LAYOUT_TOKENS]
    if len(tokens) < 3 or tokens[-1].string != ")":
        return []
    last, close = tokens[-2], tokens[-1]
    separator = "" if last.string == "(" else " " if last.string == "," else ", "
    if last.string != "(" and last.end[0] < close.start[0]:  # one argument a line
        line = source.lines[last.start[0] - 1]
        separator = separator.rstrip() + "\n" + line[: len(line) - len(line.lstrip())]
        argument += ","
    return _edit(source, last.end, last.end, separator + argument)


def remove_argument(source: SourceFile, call: ast.Call, name: str) -> list[Edit]:
    """Remove a keyword argument of a call."""
    keyword = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    if keyword is None:
        return []
    start, end = _start(source, keyword), _end(source, keyword.value)
    tokens = [token for token in _tokens(source, call) if token.type not in LAYOUT_TOKENS]
    before = [token for token in tokens if token.end <= start]
    after = [token for token in tokens if token.start >= end]
    if not before or not after:
        return []
    if before[-1].string == ",":
        return _edit(source, before[-1].start, end, "")
    if after[0].string == "," and len(after) > 1:
        return _edit(source, start, after[1].start, "")
    return _edit(source, start, end, "")


def remove_statement(source: SourceFile, node: ast.AST) -> list[Edit]:
    """Remove the lines of an expression statement; `pass` replaces the only statement of a block."""
    statement = source.statement(node)
    if not isinstance(statement, ast.Expr) or statement.value is not node:
        return []
    start, end = _start(source, statement), _end(source, statement)
    if not _has_own_lines(source, statement):
        return []
    parent = source.parent(statement)
    blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
    block = next((block for block in blocks if isinstance(block, list) and statement in block), None)
    if block is None:
        return []
    if len(block) == 1:
        return _edit(source, start, end, "pass")
    cell, line = source.cell(start[0])
    if source.cells and (end[0] == len(source.lines) or source.cell(end[0] + 1)[0] != cell):
        start = (start[0], 0) if line == 1 else (start[0] - 1, len(source.lines[start[0] - 2]))
        return _edit(source, start, (end[0], len(source.lines[end[0] - 1])), "")  # the end of a cell
    return _edit(source, (start[0], 0), (end[0] + 1, 0), "")


def to_file_lines(source: SourceFile, file: str, edits: list[Edit]) -> list[Edit]:
    """Edits of a file, or of a cell of a notebook, with the lines of its whole text; none for another file."""
    first = source.line_of(file, 1)
    if first is None:
        return []
    offset = first - 1
    return [Edit(e.line + offset, e.column, e.end_line + offset, e.end_column, e.text) for e in edits]


def apply_edits(text: str, edits: list[Edit]) -> str | None:
    """The text with all edits; None if two overlap, or if the result is no Python source."""
    changed = replace_spans(text, edits)
    try:
        ast.parse(changed or "")
    except (SyntaxError, ValueError):
        return None
    return changed


def replace_spans(text: str, edits: list[Edit]) -> str | None:
    """The text with all edits; None if two overlap."""
    starts = [0]
    for line in _lines(text):
        starts.append(starts[-1] + len(line))
    spans = sorted(
        (starts[e.line - 1] + e.column - 1, starts[e.end_line - 1] + e.end_column - 1, e.text) for e in edits
    )
    newline = "\r\n" if "\r\n" in text else "\n"
    parts, copied = [], 0
    for start, end, new in spans:
        if start < copied:
            return None
        parts += [text[copied:start], new.replace("\n", newline)]
        copied = end
    return "".join([*parts, text[copied:]])


def _lines(text: str) -> list[str]:
    """The lines as Python counts them, with their ends."""
    return list(io.StringIO(text, newline=""))


def _edit(source: SourceFile, start: Position, end: Position, text: str) -> list[Edit]:
    (file, line), (end_file, last) = source.cell(start[0]), source.cell(end[0])
    if file != end_file:
        return []  # it begins in one cell of a notebook and ends in another
    if len(source.lines) != len(_lines(source.text)):
        return []  # odd line ends: lines of the text are not lines of the file
    return [Edit(line, start[1] + 1, last, end[1] + 1, text)]


def _column(source: SourceFile, line: int, offset: int) -> int:
    """A column in characters; ast counts bytes."""
    return len(source.lines[line - 1].encode()[:offset].decode(errors="replace"))


def _start(source: SourceFile, node: ast.expr | ast.stmt | ast.keyword) -> Position:
    return node.lineno, _column(source, node.lineno, node.col_offset)


def _end(source: SourceFile, node: ast.expr | ast.stmt | ast.keyword) -> Position:
    line = node.end_lineno or node.lineno
    return line, _column(source, line, node.end_col_offset or 0)


def _tokens(source: SourceFile, node: ast.expr) -> list[tokenize.TokenInfo]:
    """The tokens of an expression, with positions in the file."""
    start, end = _start(source, node), _end(source, node)
    lines = source.lines[start[0] - 1 : end[0]]
    text = "\n".join(
        ["(" + " " * (start[1] - 1) + lines[0][start[1] :] if start[1] else lines[0], *lines[1:]]
    )
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            shifted = token._replace(
                start=(token.start[0] + start[0] - 1, token.start[1]),
                end=(token.end[0] + start[0] - 1, token.end[1]),
            )
            if start <= shifted.start and shifted.end <= end:
                tokens.append(shifted)
    except (tokenize.TokenError, IndentationError):
        pass  # the text after the expression is cut off
    return tokens
