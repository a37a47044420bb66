"""Format findings for a terminal and as GitHub annotations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from flatout.render.formatting import one_line, safe_text, sentence
from flatout.schema.findings import Finding, Severity, SourceLocation

STYLES = {
    Severity.WRONG.value: "bold red",
    Severity.TIME.value: "bold yellow",
    Severity.MEMORY.value: "bold magenta",
    Severity.FRAGILE.value: "bold cyan",
}
GITHUB_LEVELS = {
    Severity.WRONG.value: "error",
    Severity.TIME.value: "warning",
    Severity.MEMORY.value: "warning",
    Severity.FRAGILE.value: "notice",
}
MAX_LINE_CHARS = 160  # longer source lines are cut around the caret


def finding_lines(findings: Sequence[Finding], titles: Mapping[str, str]) -> RenderableType:
    """Return the findings grouped by severity, worst first, under one title per rule.

    Each shows its place, the source line with a caret, the message and the fix."""
    parts: list[RenderableType] = []
    for severity, members in groupby(findings, key=lambda finding: finding.severity):
        parts += [Text(severity, style=STYLES.get(severity, "bold")), ""]
        by_rule = attrgetter("rule")
        for code, rule_findings in groupby(sorted(members, key=by_rule), key=by_rule):
            title, command = one_line(titles.get(code, "")), f"   flatout check --explain {code}"
            parts.append(Text.assemble((code, "bold"), f"  {title}", (command, "dim")))
            for finding in rule_findings:
                parts += [Text("  ") + part for part in _entry(finding)]
            parts.append("")
    return Group(*parts[:-1]) if parts else Text("")


def _entry(finding: Finding) -> Iterator[Text]:
    place = finding.place
    if place is not None:
        column = f":{place.column}" if place.column else ""
        yield Text.assemble(
            (f"{one_line(place.file)}:{place.line}{column}", "cyan"),
            f" in {one_line(place.function)}" if place.function else "",
        )
        line, caret = _with_caret(place)
        if line:
            yield Text(f"    {line}")
            if caret >= 0:
                yield Text("    " + " " * caret + "^", style="bold red")
    yield Text(sentence(finding.message))
    if finding.others:
        others = ", ".join(one_line(other.sentence()) for other in finding.others)
        yield Text(f"see also {others}", style="dim")
    for number, line in enumerate(safe_text(finding.fix, 2000).splitlines()):
        yield Text(("fix: " if number == 0 else "     ") + line, style="green")
    if finding.levers:
        yield Text(f"without editing: `flatout tune` tries {', '.join(finding.levers)}", style="dim")
    yield Text("")


def _with_caret(place: SourceLocation) -> tuple[str, int]:
    """Return the line as shown and the caret's index in it, or -1.

    ``place.text`` is stripped; ``place.column`` counts in the whole line."""
    text = safe_text(place.text, 10_000).replace("\t", " ")
    caret = place.column - 1 - place.indent if place.column else -1
    if len(text) > MAX_LINE_CHARS:
        start = max(0, min(caret - MAX_LINE_CHARS // 2, len(text) - MAX_LINE_CHARS))
        text, caret = text[start : start + MAX_LINE_CHARS], caret - start if caret >= 0 else -1
    return text, caret if caret < len(text) else -1


def summary(
    findings: Sequence[Finding], files: int, command: str = "python train.py", run: str = ""
) -> RenderableType:
    """Return the last line: the number of findings of each severity.

    ``command`` starts the program. ``run``: what was observed of it, such as "40 steps of a run"."""
    scope = f"in {files} {'file' if files == 1 else 'files'}" + (f" and {run}" if run else "")
    if not findings:
        return Text(f"No mistakes found {scope}. For speed: flatout {'tune' if run else 'profile'} {command}")
    counts = [
        f"{len(list(members))} {severity}"
        for severity, members in groupby(findings, key=lambda finding: finding.severity)
    ]
    return Text(
        f"Found {len(findings)} ({', '.join(counts)}) {scope}. To ignore a rule on a line, add `# flatout: ignore CODE`."
    )


def github_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield one GitHub workflow command per finding. GitHub shows it next to the line."""
    for finding in findings:
        options = {"title": f"{finding.rule} {finding.name}"}
        if finding.place is not None:
            options |= {"file": finding.place.file, "line": str(finding.place.line)}
            if finding.place.column:
                options["col"] = str(finding.place.column)
        properties = ",".join(
            f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}"
            for key, value in options.items()
        )
        text = _escaped("\n".join(filter(None, (sentence(finding.message), finding.fix))))
        yield f"::{GITHUB_LEVELS[finding.severity]} {properties}::{text}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
