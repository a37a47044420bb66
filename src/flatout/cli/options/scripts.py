"""What the commands that read a script share: the script itself, and the rules to apply."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flatout.cli.options.arguments import words_or_usage
from flatout.launch.command import must_exist, parse_command
from flatout.probe.program import ScriptProgram
from flatout.probe.script import Unreadable
from flatout.schema.errors import ProgramNotFound, UsageError


def rule_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``select`` and ``ignore``, lists of codes of rules or of prefixes of codes."""
    for option in (
        click.option("--ignore", multiple=True, callback=_codes, metavar="CODES", help="Skip these rules."),
        click.option(
            "--select",
            multiple=True,
            callback=_codes,
            metavar="CODES",
            help="Apply only these rules: FL012, or FL1 for all rules with this prefix.",
        ),
    ):
        function = option(function)
    return function


def _codes(ctx: object, option: object, value: tuple[str, ...]) -> list[str]:
    return [code.strip().upper() for each in value for code in each.split(",") if code.strip()]


def read(words: tuple[str, ...], name: str = "check") -> ScriptProgram:
    """Return the program that a command line starts. ``name``: the flatout command, for messages.

    Raises UsageError if its source is missing or unreadable."""
    if not words:
        raise UsageError(
            f"no program was given. Try `flatout {name} train.py`, or `flatout {name} python train.py --lr 0.1`."
        )
    if not words[0].startswith("-m"):
        words_or_usage(words, name)
    script, module = _script(words)
    try:
        return ScriptProgram.read(script, Path.cwd() if module else None)
    except Unreadable as error:
        raise UsageError(f"{error}. `flatout {name}` reads Python source; nothing was checked.") from None
    except OSError as error:
        try:
            must_exist(script)
        except ProgramNotFound as missing:
            raise UsageError(str(missing)) from None
        raise UsageError(f"{script} cannot be read: {error.strerror or error}.") from None


def command_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command; `-m pkg.mod` alone is an argument of Python."""
    return ("python", *words) if words[0].startswith("-m") else words


def _script(words: tuple[str, ...]) -> tuple[Path, bool]:
    first = Path(words[0])
    if words[0].startswith("-m"):
        words = command_of(words)
    elif first.suffix in (".py", ".ipynb") or first.is_dir() or (first.is_file() and len(words) == 1):
        return first, False
    try:
        understood = parse_command(words)
    except ProgramNotFound as error:
        raise UsageError(str(error)) from None
    if understood.script is None:
        what = (
            f"module {understood.module!r} has no file below this folder"
            if understood.module
            else f"`{' '.join(words)}` names no Python file"
        )
        raise UsageError(f"{what}, so there is nothing to check. Give the script: `flatout check train.py`.")
    if (
        understood.script.suffix == ""
        and understood.script.is_file()
        and understood.script.read_bytes()[:2] == b"#!"
        and b"python" not in understood.script.open("rb").readline()
    ):
        raise UsageError(
            f"{understood.script} is not a Python script. Give the script that it starts: `flatout check train.py`."
        )
    return understood.script, understood.module is not None
