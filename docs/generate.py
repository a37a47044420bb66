"""Makes the reference pages from the code while the site is built; none of them is committed.

`mkdocs build` runs this file by itself (plugin gen-files). `pages()` gives every page as text, for tests.

    rules/, errors/   one page for each rule and each kind of failure, and an index of each
    levers.md         the docstring of each lever
    commands.md       every command and option, from click
    records.md        the fields of the JSON files that flatout writes, and of what it prints with --json
    schemas/          the JSON Schema of each of them
    doctor.md         the checks of the machine; templates.md: the examples, side by side
    ../explanation/packages.md  which process runs which package, and which imports which
    ../agents.md      what `flatout skill` prints
    ../benchmarks/    the pages that the benchmarks wrote
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import click

HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench" / "results"
sys.path[:0] = [str(HERE)]

import doctor_page  # noqa: E402
import packages_page  # noqa: E402
import templates_page  # noqa: E402
from record_schemas import PUBLISHED, json_schema  # noqa: E402

from flatout.cli.main import GROUPS  # noqa: E402
from flatout.cli.skill import PAGE as SKILL  # noqa: E402
from flatout.diagnose import failures, rules  # noqa: E402
from flatout.levers import TABLE as LEVERS  # noqa: E402

CODE_SECTIONS = ("Bad", "Good", "Fix")


class Entry(Protocol):
    """What a page of rules or errors is made from."""

    @property
    def code(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def sections(self) -> Sequence[str]: ...
    def section(self, name: str) -> str: ...


@dataclass(frozen=True)
class Shelf:
    """A folder of pages. ``group`` gives the heading under which the index lists an entry."""

    folder: str
    heading: str
    introduction: str
    table: Sequence[Entry]
    group: Callable[[Entry], str]


SHELVES = (
    Shelf(
        "rules",
        "Rules",
        "What `flatout check` and `flatout profile` look for in a training program. `flatout check --explain CODE` shows the same page in the "
        "terminal. `# flatout: ignore CODE` hides a rule on its line.",
        rules.TABLE,
        lambda rule: str(rule.severity).capitalize(),
    ),
    Shelf(
        "errors",
        "Errors",
        "`flatout explain train.log` names the kind of failure, the line of your code and the fix. Under `flatout run`, the same stands below the "
        "traceback of a program that dies. A failure that is not in this list is reported as unknown; nothing is guessed.",
        failures.TABLE,
        lambda kind: failures.FAMILIES[kind.code[2:4]],
    ),
)


def pages() -> dict[str, str]:
    """Every generated page: its path in the site, and its text."""
    made = {
        "agents.md": SKILL.read_text(encoding="utf-8"),
        "reference/commands.md": commands(),
        "reference/levers.md": levers(),
        "reference/records.md": records(),
        "reference/doctor.md": doctor_page.page(),
        "reference/templates.md": templates_page.page(),
        "explanation/packages.md": packages_page.page(),
    }
    for shelf in SHELVES:
        made[f"reference/{shelf.folder}/index.md"] = index(shelf)
        made.update({f"reference/{shelf.folder}/{entry.code}.md": page(entry) for entry in shelf.table})
    for name in PUBLISHED:
        made[f"reference/schemas/{name}.json"] = json.dumps(json_schema(name), indent=1) + "\n"
    for path in sorted(RESULTS.glob("*.md")):
        made[f"benchmarks/{'index.md' if path.name == 'README.md' else path.name}"] = path.read_text(
            encoding="utf-8"
        )
    return made


def page(entry: Entry) -> str:
    """One rule, or one kind of failure."""
    names = getattr(entry, "levers", ())
    without_edit = (
        "without an edit: " + ", ".join(f"[`{name}`](../levers.md#{name})" for name in names) if names else ""
    )
    lines = [
        f"# {entry.code} {entry.title}",
        "",
        " · ".join(filter(None, [f"*{entry.severity}*", f"`{entry.name}`", without_edit])),
        "",
    ]
    if note := getattr(entry, "fix_note", ""):
        lines += [note, ""]
    for name in entry.sections:
        text = entry.section(name)
        if text and name in CODE_SECTIONS:
            lines += [f"## {name}", "", "```python", text.replace("  # <-", "  # <- here"), "```", ""]
        elif text:
            lines += [f"## {name}", "", text, ""]
    return "\n".join(lines)


def index(shelf: Shelf) -> str:
    """A shelf's table of contents, in groups."""
    lines = [f"# {shelf.heading}", "", shelf.introduction, ""]
    for heading, entries in groupby(shelf.table, key=shelf.group):
        lines += [
            f"## {heading}",
            "",
            "| code | what |",
            "|---|---|",
            *(f"| [{entry.code}]({entry.code}.md) | {entry.title} |" for entry in entries),
            "",
        ]
    return "\n".join(lines)


def levers() -> str:
    """Every lever's docstring, in the order in which levers act."""
    lines = [
        "# Levers",
        "",
        "A lever is one optimisation. `flatout levers NAME` shows the same text in the terminal. The order is the one in which levers act.",
        "",
        "| lever | may change | what it does |",
        "|---|---|---|",
    ]
    lines += [
        f"| [`{lever.name}`](#{lever.name}) | {lever.effect.value} | {lever.page.strip().splitlines()[0]} |"
        for lever in LEVERS
    ]
    for lever in LEVERS:
        title, _, text = lever.page.strip().partition("\n")
        text = re.sub(r"\n[ \t]+", "\n", text.strip())
        text = re.sub(r"^([A-Z][A-Za-z' ]{3,40}): ", r"\n**\1.** ", text, flags=re.MULTILINE)
        lines += [
            "",
            f"## {lever.name}",
            "",
            title,
            "",
            f"*{lever.effect.value}* · acts at {lever.moment.value}"
            + (" · can be switched between steps" if lever.live else ""),
            text,
        ]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command with its options, as `--help` shows them."""
    lines = ["# Commands", ""]
    for heading, names in GROUPS.items():
        lines += [f"**{heading}**: " + ", ".join(f"[`{name}`](#flatout-{name})" for name in names), ""]
    for name in (name for names in GROUPS.values() for name in names):
        command = importlib.import_module(f"flatout.cli.{name}").command
        lines += _command(command, f"flatout {name}")
    return "\n".join(lines)


def _command(command: click.Command, name: str, depth: int = 2) -> Iterator[str]:
    context = click.Context(
        command, info_name=name, help_option_names=["-h", "--help"]
    )  # click keeps the first
    yield from (
        "#" * depth + f" {name}",
        "",
        "```",
        command.get_usage(context).removeprefix("Usage: "),
        "```",
        "",
        *_paragraphs(command.help or ""),
        "",
    )
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        yield from ("| option | what it does |", "|---|---|")
        for option in options:
            shown, text = option.get_help_record(context) or ("", "")
            yield f"| `{_cell(shown)}` | {_cell(text)} |"
        yield ""
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            yield from _command(command.get_command(context, sub), f"{name} {sub}", depth + 1)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.replace("\b\n", "\b").split("\n\n"):
        yield from (
            ["```", *paragraph.lstrip("\b").strip("\n").splitlines(), "```"]
            if paragraph.startswith("\b")
            else [" ".join(paragraph.split())]
        )
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def records() -> str:
    """The fields of each JSON file, with their types; records that lie inside follow."""
    lines = [
        "# Records",
        "",
        "flatout writes JSON into the job's folder, `.flatout/<job>`. Times are in milliseconds unless a name says otherwise (`_s`, `_us`); sizes "
        "are in bytes. A reader must ignore fields that it does not know. `schema` grows when the meaning of a field changes.",
        "",
        "With `--json`, a command prints one record on standard output, and everything else on standard error. If it fails, it prints no record. "
        "A number that is not finite is printed as null. The table links to the JSON Schema of each record.",
        "",
        "| schema | file | printed by |",
        "|---|---|---|",
        *(
            f"| [`{name}`](schemas/{name}.json) | {f'`{each.file}`' if each.file else ''} | {f'`flatout {each.printed}`' if each.printed else ''} |"
            for name, each in PUBLISHED.items()
        ),
        "",
    ]
    queue = [(f"`{each.file or name}`: {each.type.__name__}", each.type) for name, each in PUBLISHED.items()]
    seen = {record for _, record in queue}
    while queue:
        heading, record = queue.pop(0)
        lines += [f"## {heading}", "", *_paragraphs(_prose(record)), "| field | type |", "|---|---|"]
        for each in dataclasses.fields(record):
            lines.append(f"| `{each.name}` | `{_cell(str(each.type))}` |")
            for inner in re.findall(r"[A-Z]\w+", str(each.type)):
                found = getattr(sys.modules[record.__module__], inner, None)
                if dataclasses.is_dataclass(found) and found not in seen:
                    seen.add(found)
                    queue.append((inner, found))
        lines.append("")
    return "\n".join(lines)


def _prose(record: type) -> str:
    text = record.__doc__ or ""
    return (
        ""
        if text.startswith(f"{record.__name__}(")
        else "\n".join(line.strip() for line in text.strip().splitlines())
    )


def write(made: Iterable[tuple[str, str]]) -> None:
    """Adds the pages, and the charts of the benchmarks, to the site that is being built."""
    import mkdocs_gen_files

    for path, text in made:
        with mkdocs_gen_files.open(path, "w") as file:
            file.write(text)
    for path in RESULTS.glob("*.svg"):
        with mkdocs_gen_files.open(f"benchmarks/{path.name}", "w") as file:
            file.write(path.read_text(encoding="utf-8"))


if __name__ == "<run_path>":  # as gen-files runs it
    write(pages().items())
