"""What the commands that read a script share: the script itself, and the rules to apply."""

from pathlib import Path

import click

from flatout.cli.options.arguments import add_options, require_program
from flatout.launch.command import must_exist, parse_command
from flatout.probe.program import ScriptProgram
from flatout.probe.script import Unreadable
from flatout.schema.errors import ProgramNotFound, UsageError


def _codes(ctx: object, option: object, value: tuple[str, ...]) -> list[str]:
    return [code.strip().upper() for codes in value for code in codes.split(",") if code.strip()]


rule_options = add_options(
    click.option(
        "--select",
        multiple=True,
        callback=_codes,
        metavar="CODES",
        help="Apply only these rules: FL012, or FL1 for all rules with this prefix.",
    ),
    click.option("--ignore", multiple=True, callback=_codes, metavar="CODES", help="Skip these rules."),
)


def read_program(argv: tuple[str, ...]) -> ScriptProgram:
    """Return the program that a command line starts.

    Raises UsageError if its source is missing or unreadable."""
    if not argv:
        raise UsageError(
            "no program was given. Try `flatout check train.py`, or `flatout check python train.py --lr 0.1`."
        )
    if not argv[0].startswith("-m"):
        require_program(argv, "check")
    script, module = _script(argv)
    try:
        return ScriptProgram.read(script, Path.cwd() if module else None)
    except Unreadable as error:
        raise UsageError(f"{error}. `flatout check` reads Python source; nothing was checked.") from None
    except OSError as error:
        try:
            must_exist(script)
        except ProgramNotFound as missing:
            raise UsageError(str(missing)) from None
        raise UsageError(f"{script} cannot be read: {error.strerror or error}.") from None


def is_command(argv: tuple[str, ...]) -> bool:
    """Whether these words start a program, rather than name a file to read."""
    return argv[0].startswith("-m") or not _is_file(argv)


def _is_file(argv: tuple[str, ...]) -> bool:
    first = Path(argv[0])
    return first.suffix in (".py", ".ipynb") or first.is_dir() or (first.is_file() and len(argv) == 1)


def command_of(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command; `-m pkg.mod` alone is an argument of Python."""
    return ("python", *argv) if argv[0].startswith("-m") else argv


def _script(argv: tuple[str, ...]) -> tuple[Path, bool]:
    first = Path(argv[0])
    if argv[0].startswith("-m"):
        argv = command_of(argv)
    elif _is_file(argv):
        return first, False
    try:
        command = parse_command(argv)
    except ProgramNotFound as error:
        raise UsageError(str(error)) from None
    script = command.script
    if script is None:
        problem = f"`{' '.join(argv)}` names no Python file"
        if command.module:
            problem = f"module {command.module!r} has no file below this folder"
        raise UsageError(
            f"{problem}, so there is nothing to check. Give the script: `flatout check train.py`."
        )
    first_line = script.read_bytes().partition(b"\n")[0] if not script.suffix and script.is_file() else b""
    if first_line.startswith(b"#!") and b"python" not in first_line:
        raise UsageError(
            f"{script} is not a Python script. Give the script that it starts: `flatout check train.py`."
        )
    return script, command.module is not None
