"""What the texts of flatout name exists: `flatout <command>`, and its options; read from the source."""

import ast
import re
from functools import cache
from pathlib import Path

import click

from flatout.cli.main import COMMANDS, flatout

SOURCE = Path(__file__).parents[2] / "src" / "flatout"
# Prose says "flatout starts", too: an unknown word counts in quotes.
LINE = re.compile(r"(?P<sure>`|)\bflatout (?P<command>[a-z]+)\b(?P<rest>[^`\n]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\w")
HOLE = "HOLE"  # a value of an f-string


def texts(path, docstrings=True):
    """The text constants of a file, f-strings with HOLE for their values; each with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts += [[node.value] for node in ast.walk(tree) if isinstance(node, ast.Expr) and not docstrings]
    inside = {id(part) for each in parts for part in each}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


@cache
def options(name):
    """The options of a command and of its subcommands."""
    found, left = set(), [flatout.get_command(click.Context(flatout), name)]
    while left:
        command = left.pop()
        found |= {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        left += getattr(command, "commands", {}).values()
    return found | {"--help"}


def wrong(text):
    """What a text names of flatout that does not exist."""
    for line in LINE.finditer(text):
        command = line["command"]
        if command not in COMMANDS:
            if line["sure"]:
                yield f"flatout {command}"
            continue
        ours = re.split(r" (?:python|torchrun|COMMAND|HOLE)|[\w/]+\.py\b|[;,] (?=[a-z])", line["rest"])[0]
        yield from (
            f"flatout {command} {option}" for option in OPTION.findall(ours) if option not in options(command)
        )


def test_known_bad_texts_are_found():
    assert list(wrong("Try `flatout tunee x`.")) == ["flatout tunee"]
    assert list(wrong("Name one: `flatout run --job DIR python train.py --lr 1`.")) == ["flatout run --job"]
    assert list(wrong("see `flatout tune --job DIR python train.py --nothing`")) == []
    assert list(wrong("flatout left it out")) == []


def test_commands_and_options_in_texts_exist():
    found, seen = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for number, text in texts(path):
            seen += len(LINE.findall(text))
            found += [f"{path.relative_to(SOURCE)}:{number}: {each}" for each in wrong(text)]
    assert seen > 100
    assert found == []


def test_options_in_the_texts_of_a_command_are_its_own():
    """A text may name options of other programs only in their command lines, and those of another command after it."""
    found = []
    for name in COMMANDS:
        for number, text in texts(SOURCE / "cli" / f"{name}.py"):
            own = LINE.sub("", text) if " " in text else ""
            found += [
                f"cli/{name}.py:{number}: {each}" for each in OPTION.findall(own) if each not in options(name)
            ]
    assert found == []


def test_what_all_commands_share_names_no_option():
    """Such a text is printed by commands without the option, too; the command line adds what a command has."""
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {each}"
        for path in sorted((SOURCE / "job").rglob("*.py"))
        for number, text in texts(path, docstrings=False)
        if " " in text
        for each in OPTION.findall(LINE.sub("", text))
        if any(each in options(name) for name in COMMANDS)
    ]
    assert found == []
