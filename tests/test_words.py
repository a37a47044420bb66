"""Words that flatout does not use any more, because a plainer word of the field exists. docs/reference/glossary.md has the special words that stay."""

import importlib
import io
import re
import tokenize
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parent.parent
RETIRED = {
    r"mend(s|ed|ing)?": "fix",
    r"foret(ell|ells|old)": "predict",
    r"go(es|ne)? on (with|exactly)": "resume",
    r"anew": "again, from scratch",
    r"believed": "verified",
    r"(refused|rejected|stops) in words": "with an error that says why",
    r"neighbours?": "other processes",
    r"to be had": "available",
    r"contests?": "comparison",
    r"pictures?": "chart",
    r"seams?": "resume point",
    r"witness(es)?": "reference run",
    r"scenes?": "training context",
    r"heard|hears?|hearing": "observe, hook",
    r"shelter(s|ed)?": "file sandbox",
    r"skeletons?": "fake tensor",
    r"lineage": "gradient sources",
    r"appointments?": "save schedule",
    r"belongings": "training state",
    r"lastwords|firstwords": "crash report",
    r"convoys?": "bucket queue",
    r"gangs?": "local launcher",
    r"keepers?": "reaper",
    r"arena": "interleaver",
    r"entrants?": "candidate",
    r"ears?": "probe",
    r"shaken?": "perturb",
    r"wishes": "options",
    r"twins?": "counterpart",
    r"(leave|leaves|left) away": "remove",
}
ALL = "|".join(f"(?:{word})" for word in RETIRED)
WORDS = re.compile(rf"(?<![A-Za-z])(?:{ALL})(?![A-Za-z])", re.IGNORECASE)
# Terms of others, as they call them.
TERMS = ("watching the watcher",)
MOST_IN_SOURCE = 20


def retired(text):
    for term in TERMS:
        text = text.replace(term, "")
    return [match[0].lower() for match in WORDS.finditer(text)]


def prose(path):
    """Comments, strings and names of a Python file, by line; the parts of a name apart, as in ``contest_row``."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(io.StringIO(file.read()).readline))
    return [
        (token.start[0], re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", token.string))
        for token in tokens
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
    ]


def test_the_source_has_nearly_none():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, text in prose(path)
        for word in retired(text)
    ]
    assert len(found) <= MOST_IN_SOURCE, "\n".join(found)


def test_file_names_have_none():
    names = [
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
    ]
    assert [name for name in names if retired(name.replace("_", " "))] == []


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        ROOT / "src" / "flatout" / "cli" / "skill.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_pages_have_none(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {word}" for number, line in enumerate(lines, 1) for word in retired(line)] == []


def test_help_has_none():
    from flatout.cli.main import COMMANDS

    for name in COMMANDS:
        command = importlib.import_module(f"flatout.cli.{name}").command
        said = command.get_help(click.Context(command, info_name=name, help_option_names=["-h", "--help"]))
        assert retired(said) == [], name


def test_pages_made_from_the_code_have_none():
    from flatout.diagnose import failures, rules
    from flatout.diagnose.doctor.checks import TABLE as checks
    from flatout.levers import TABLE as levers

    for entry in (*rules.TABLE, *failures.TABLE, *checks, *levers):
        assert retired(entry.page) == [], entry.name


def test_a_retired_word_is_seen():
    assert retired("It was mended and heard anew.") == ["mended", "heard", "anew"]
    assert retired("mend_missing the contest") == ["mend", "contest"]
    assert retired("an amendment, a linear year, unseamed") == []
