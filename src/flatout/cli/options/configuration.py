"""Options from pyproject.toml and from environment variables.

The order is: command line, environment variable, the command's table, `[tool.flatout]`, default. click looks
the values up and checks them. This file names the variable of each option, and maps keys to parameters.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from flatout.cli.options.arguments import did_you_mean
from flatout.job.folder import read_text
from flatout.job.trust import distrusted
from flatout.schema.errors import UsageError
from flatout.schema.plan import read_toml

FILE, SECTION, PREFIX = "pyproject.toml", "tool.flatout", "FLATOUT"
IGNORE = "ignore"  # the table of rules to leave out: code = "reason"
MAX_BYTES = 1 << 20


def configure(ctx: click.Context, name: str, command: click.Command) -> None:
    """Give ``command`` the values of its environment variables and of pyproject.toml. Raises UsageError."""
    for variable, option in _variables(command, f"{PREFIX}_{name}"):
        option.envvar = variable
    path = nearest()
    settings = read(path) if path is not None else {}
    if settings:
        group = ctx.command
        assert isinstance(group, click.Group)
        settings = {key: value for key, value in settings.items() if key != IGNORE}
        tables = {key: value for key, value in settings.items() if isinstance(value, dict)}
        _reject_unknown(path, SECTION, tables, group.list_commands(ctx))
        shared = {key: value for key, value in settings.items() if key not in tables}
        table = _defaults(path, f"{SECTION}.{name}", command, tables.get(name, {}), shared)
        ctx.default_map = {name: table}


def nearest() -> Path | None:
    """Return pyproject.toml of the working directory, or of the nearest folder above it that has one."""
    try:
        folder = Path.cwd()
    except OSError:  # it was deleted
        return None
    return next((path for parent in (folder, *folder.parents) if os.path.isfile(path := parent / FILE)), None)


def read(path: Path) -> dict[str, Any]:
    """Return the table `[tool.flatout]`, or {}. Raises UsageError if it cannot be read."""
    try:
        text = read_text(path, MAX_BYTES)
        if "flatout" not in text:
            return {}
        tool = read_toml(text).get("tool", {})
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}. flatout looks there for [{SECTION}]; fix the file, or move it."
        ) from None
    found = tool.get("flatout", {}) if isinstance(tool, dict) else {}
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {SECTION} is not a table. Write [{SECTION}] above its keys.")
    if found and (why := distrusted(path, owner_of=Path.cwd())):
        sys.stderr.write(f"flatout: [{SECTION}] of {path} is not used: {why}\n")
        return {}
    return found


def ignored() -> dict[str, str]:
    """Return the rules to leave out, code -> reason. Raises UsageError for a code without a reason."""
    path = nearest()
    rules = read(path).get(IGNORE, {}) if path is not None else {}
    if not isinstance(rules, dict) or not all(isinstance(why, str) and why.strip() for why in rules.values()):
        raise UsageError(
            f'{path}: write [{SECTION}.{IGNORE}] as codes with reasons, such as FL060 = "a frozen head".'
        )
    return rules


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options by their keys: the names on the command line, without dashes before them."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {
        next((name for name in option.opts if name.startswith("--")), option.opts[0]).lstrip("-"): option
        for option in options
    }


def _variables(command: click.Command, prefix: str) -> Iterator[tuple[str, click.Option]]:
    """Name the variable of each option."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from _variables(part, f"{prefix}_{name}")
        return
    for key, option in options_of(command).items():
        yield f"{prefix}_{key}".replace("-", "_").upper(), option


def _reject_unknown(path: Path | None, table: str, keys: Iterable[str], valid: Iterable[str]) -> None:
    valid = list(valid)
    for key in keys:
        if key not in valid:
            command = " ".join(table.split(".")[2:])
            raise UsageError(
                f"{path}: [{table}] has the unknown key {key[:40]!r}{did_you_mean(key, valid)} `flatout {command + ' ' if command else ''}--help` lists them."
            )


def _defaults(
    path: Path | None, table: str, command: click.Command, values: dict[str, Any], shared: dict[str, Any]
) -> dict[str, Any]:
    """Return the map of defaults of a command, by the names of its parameters."""
    if isinstance(command, click.Group):
        _reject_unknown(path, table, values, command.commands)
        return {
            name: _defaults(path, f"{table}.{name}", part, values.get(name, {}), shared)
            for name, part in command.commands.items()
        }
    options = options_of(command)
    _reject_unknown(path, table, values, options)
    settings = {**{key: value for key, value in shared.items() if key in options}, **values}
    return {
        str(options[key].name): _value(f"{path}: [{table}] {key}", options[key], value, command)
        for key, value in settings.items()
        if not (options[key].is_flag and value is False)
    }


def _value(where: str, option: click.Option, value: Any, command: click.Command) -> Any:
    """Return the value as on the command line. Raises UsageError if the option does not take it."""
    if option.is_flag and value is True:
        return True if option.is_bool_flag else option.flag_value
    texts = [str(part) for part in value] if isinstance(value, list) else [str(value)]
    cli_value = texts if option.multiple else ",".join(texts)
    try:
        option.type_cast_value(click.Context(command), cli_value)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message.rstrip('.')}. Change or remove the key.") from None
    return cli_value
