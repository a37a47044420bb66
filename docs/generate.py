"""Writes the pages that come from the code: one for every rule and every kind of failure, with an index of each, the doctor's checks, and
the templates.

    python docs/generate.py            writes them
    python docs/generate.py --check    only says which are not up to date, and leaves with 1 where any is not

A shelf is a folder below docs/ and a table of things that have a ``code``, a ``name``, a ``title``, a ``severity``, the names of their
``sections`` and ``section(name)``, the text of one. Another kind of page is one more line in SHELVES. The doctor's checks are one page
(doctor_page.py), the templates another (templates_page.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import doctor_page  # noqa: E402
import templates_page  # noqa: E402

from flatout.diagnose import failures, rules  # noqa: E402

CODE_SECTIONS = ("Bad", "Good")
NOTE = "<!-- Made by docs/generate.py from the code. Edit the docstring, not this file. -->"


class Entry(Protocol):
    """What a page is made from."""

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
    """``group`` gives the heading under which the index lists an entry."""

    folder: str
    heading: str
    introduction: str
    table: Sequence[Entry]
    group: Callable[[Entry], str]


SHELVES = (
    Shelf("rules", "Rules",
          "What `flatout check` and `flatout profile` look for in a training program. `flatout check --explain CODE` shows the same page in the terminal; "
          "`# flatout: ignore CODE` hides a rule on a line.", rules.TABLE, lambda rule: str(rule.severity).capitalize()),
    Shelf("errors", "Failures",
          "`flatout explain train.log` (or `-`, or the error's text) names the kind, the line of your own code and the mend; under the traceback of a program "
          "that flatout runs, the same stands by itself. What is not in this list is unknown, and nothing is guessed.",
          failures.TABLE, lambda kind: failures.FAMILIES[kind.code[2:4]]),
)


def page(entry: Entry) -> str:
    """One thing's page."""
    about = " · ".join(filter(None, [f"*{entry.severity}*", f"`{entry.name}`", levers(entry)]))
    lines = [NOTE, "", f"# {entry.code} {entry.title}", "", about, ""]
    for name in entry.sections:
        text = entry.section(name)
        if text and name in CODE_SECTIONS:
            lines += [f"## {name}", "", "```python", text.replace("  # <-", "  # <- here"), "```", ""]
        elif text:
            lines += [f"## {name}", "", text, ""]
    return "\n".join(lines)


def levers(entry: Entry) -> str:
    names = getattr(entry, "levers", ())
    return "without an edit: " + ", ".join(f"`{name}`" for name in names) if names else ""


def index(shelf: Shelf) -> str:
    """A shelf's table of contents, in groups."""
    lines = [NOTE, "", f"# {shelf.heading}", "", shelf.introduction, ""]
    for heading, entries in groupby(shelf.table, key=shelf.group):
        lines += [f"## {heading}", "", "| code | what |", "|---|---|", *(f"| [{entry.code}]({entry.code}.md) | {entry.title} |" for entry in entries), ""]
    return "\n".join(lines)


def pages(shelves: Iterable[Shelf] = SHELVES) -> dict[Path, str]:
    """Every file with its text."""
    made = {HERE / "doctor.md": doctor_page.page(), HERE / "templates.md": templates_page.page()}
    for shelf in shelves:
        made[HERE / shelf.folder / "README.md"] = index(shelf)
        made.update({HERE / shelf.folder / f"{entry.code}.md": page(entry) for entry in shelf.table})
    return made


def outdated() -> list[Path]:
    """Files that are missing, differ from what the code says, or belong to nothing any more."""
    made = pages()
    differing = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return differing + [path for shelf in SHELVES for path in (HERE / shelf.folder).glob("*.md") if path not in made]


def main() -> int:
    stale = outdated()
    if "--check" in sys.argv[1:]:
        print("\n".join(f"not up to date: {path.relative_to(HERE.parent)}" for path in stale) or "all pages are up to date")
        return bool(stale)
    made = pages()
    for path in stale:
        if path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
        else:
            path.unlink()
    print(f"{len(stale)} of {len(made)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
