"""`flatout init`: write a commented `[tool.flatout]` section into pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli.options.configuration import FILE, SECTION, nearest
from flatout.job.folder import read_text
from flatout.schema.errors import StorageError, UsageError
from flatout.schema.toml import read_toml

ABOUT = (
    "Options of flatout commands, named as on the command line. Remove a # to set one.",
    "Here: for every command that has the option. In [tool.flatout.COMMAND]: for one command.",
)
SHARED = ('device = "cpu"',)
EXAMPLES = {  # a few useful options of each command
    "tune": ('budget = "3m"', 'effects = "exact,rounding"', 'memory-limit = "8GB"'),
    "run": ("watch = true", "rescue = true", 'with = ["channels_last"]'),
    "profile": ('budget = "2m"', "steps = 40"),
    "check": ('ignore = ["FL012"]',),
    "compare": ('gate = "3%"', "pairs = 6"),
}


@click.command()
def command() -> None:
    """Write a commented section for options into pyproject.toml.

    The file is that of this folder, or the nearest one above; without one, it is created here. The rest of
    the file stays as it is.
    """
    path = nearest() or Path.cwd() / FILE
    try:
        old = read_text(path) if path.exists() else ""
        new = added(path, old)
        with path.open("ab") as file:
            file.write(new.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{path} cannot be changed: {getattr(error, 'strerror', None) or error}. Fix its permissions or encoding, and repeat `flatout init`."
        ) from None
    click.echo(f"{path}: added [{SECTION}]")


def added(path: Path, old: str) -> str:
    """Return the text to add to the end of the file. Raises UsageError if the section cannot be added."""
    try:
        held = read_toml(old).get("tool", {})
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}. Fix it, and repeat `flatout init`.") from None
    if isinstance(held, dict) and "flatout" in held:
        raise UsageError(f"{path} already has [{SECTION}]. Edit it; `flatout tune --help` lists options.")
    line = "\r\n" if "\r\n" in old else "\n"
    new = (line * (1 if old.endswith("\n") else 2) if old else "") + section().replace("\n", line)
    try:
        read_toml(old + new)
    except ValueError:
        raise UsageError(
            f"{path} defines `tool` in a way that takes no further table. Write [tool.NAME] tables instead, and repeat `flatout init`."
        ) from None
    return new


def section() -> str:
    """Return the section, with every option as a comment."""
    import tomlkit

    flatout = tomlkit.table()
    for text in (*ABOUT, *SHARED):
        flatout.add(tomlkit.comment(text))
    for name, lines in EXAMPLES.items():
        flatout.add(tomlkit.nl())
        table = tomlkit.table()
        for text in lines:
            table.add(tomlkit.comment(text))
        flatout.add(name, table)
    tool = tomlkit.table(is_super_table=True)
    tool.add("flatout", flatout)
    document = tomlkit.document()
    document.add("tool", tool)
    return tomlkit.dumps(document)
