"""Options from pyproject.toml and from environment variables.

The order is: command line, environment variable, the command's table, `[tool.flatout]`, default. click looks
the values up. This file names the variable of each option, reads the file, and checks what both contain.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from flatout.cli.options.arguments import did_you_mean
from flatout.job.folder import read_text
from flatout.job.trust import distrusted
from flatout.schema.errors import UsageError
from flatout.schema.toml import read_toml

FILE, SECTION, PREFIX = "pyproject.toml", "tool.flatout", "FLATOUT"
MOST_BYTES = 1 << 20
NO_VALUE = object()


def configure(ctx: click.Context, name: str, command: click.Command) -> None:
    """Give ``command`` the values of its environment variables and of pyproject.toml. Raises UsageError."""
    prefix = f"{PREFIX}_{_upper(name)}"
    known = dict(_variables(command, prefix, ctx))
    for variable in os.environ:
        if variable.startswith(f"{prefix}_") and variable not in known:
            raise UsageError(
                f"the environment variable {variable} belongs to no option of `flatout {name}`{did_you_mean(variable, known)} "
                f"`flatout {name} --help` lists the options."
            )
    path = nearest()
    settings = read(path) if path is not None else {}
    if path is None or not settings:
        return
    source = _Source(path, ctx)
    shared = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    _check_names(settings, shared, command, ctx, source)
    table = settings.get(name, {})
    ctx.default_map = {name: source.defaults(command, table if isinstance(table, dict) else {}, shared, name)}


def nearest() -> Path | None:
    """Return pyproject.toml of the working directory, or of the nearest folder above it that has one."""
    try:
        folder = Path.cwd()
    except OSError:  # it was deleted
        return None
    return next((path for each in (folder, *folder.parents) if os.path.isfile(path := each / FILE)), None)


def read(path: Path) -> dict[str, Any]:
    """Return the table `[tool.flatout]`, or {}. Raises UsageError if it cannot be read."""
    try:
        text = read_text(path, MOST_BYTES)
        if "flatout" not in text:
            return {}
        tool = read_toml(text).get("tool", {})
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}. flatout looks there for [{SECTION}]; fix the file, or move it."
        ) from None
    found = tool.get("flatout", {}) if isinstance(tool, dict) else {}
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {SECTION} is not a table. `flatout init` shows how to write it.")
    if found and (why := distrusted(path, whose=Path.cwd())):
        sys.stderr.write(f"flatout: [{SECTION}] of {path} is not used: {why}\n")
        return {}
    return found


def key_of(option: click.Option) -> str:
    """Return the name of an option in a table: that of the command line, without dashes before it."""
    return next((each for each in option.opts if each.startswith("--")), option.opts[0]).lstrip("-")


def options_of(command: click.Command) -> dict[str, click.Option]:
    return {key_of(each): each for each in command.params if isinstance(each, click.Option)}


def _upper(name: str) -> str:
    return name.replace("-", "_").upper()


def _variables(command: click.Command, prefix: str, ctx: click.Context) -> Iterator[tuple[str, click.Option]]:
    """Name the variable of each option, and check its value. click reads it."""
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from _variables(each, f"{prefix}_{_upper(name)}", ctx)
        return
    for key, option in options_of(command).items():
        variable = f"{prefix}_{_upper(key)}"
        option.envvar = variable
        try:
            option.type_cast_value(ctx, option.value_from_envvar(ctx))
        except click.BadParameter as error:
            raise UsageError(
                f"the environment variable {variable} is wrong: {error.message.rstrip('.')}. Change or unset it."
            ) from None
        yield variable, option


def _check_names(
    settings: dict[str, Any],
    shared: dict[str, Any],
    command: click.Command,
    ctx: click.Context,
    source: _Source,
) -> None:
    """Raise UsageError for a table that is no command, and for a shared key that no command has."""
    group = ctx.command
    assert isinstance(group, click.Group)
    names = group.list_commands(ctx)
    for key, value in settings.items():
        if isinstance(value, dict) and key not in names:
            raise source.unknown(f"[{SECTION}]", "table", key, names, "flatout --help")
    if set(shared) <= set(_keys(command)):
        return  # the others need not be imported
    known = {key for name in names if (each := group.get_command(ctx, name)) for key in _keys(each)}
    for key in shared:
        if key not in known:
            raise source.unknown(f"[{SECTION}]", "key", key, known, "flatout --help")


def _keys(command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _keys(each)
    else:
        yield from options_of(command)


class _Source:
    """The file, for messages."""

    def __init__(self, path: Path, ctx: click.Context) -> None:
        self.path, self.ctx = path, ctx

    def unknown(self, where: str, what: str, key: str, known: Any, help_: str) -> UsageError:
        return UsageError(
            f"{self.path}: {where} has the unknown {what} {key[:40]!r}{did_you_mean(key, known)} `{help_}` lists them."
        )

    def defaults(
        self, command: click.Command, table: dict[str, Any], shared: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Return the map of defaults of a command, by the names of its parameters."""
        where = f"[{SECTION}.{name.replace(' ', '.')}]"
        if isinstance(command, click.Group):
            for key, value in table.items():
                if key not in command.commands or not isinstance(value, dict):
                    raise self.unknown(where, "table", key, command.commands, f"flatout {name} --help")
            return {
                sub: self.defaults(each, table.get(sub, {}), shared, f"{name} {sub}")
                for sub, each in command.commands.items()
            }
        options, found = options_of(command), {}
        for key in table:
            if key not in options:
                raise self.unknown(where, "key", key, options, f"flatout {name} --help")
        for key, option in options.items():
            for held, at in ((table, where), (shared, f"[{SECTION}]")):
                if key in held:
                    value = self._value(option, held[key], f"{at} {key}", name)
                    if value is not NO_VALUE and option.name is not None:
                        found[option.name] = value
                    break
        return found

    def _value(self, option: click.Option, value: Any, where: str, name: str) -> Any:
        """Return the value as click takes it. Raises UsageError if it has the wrong type or is not valid."""

        def wrong(why: str) -> UsageError:
            return UsageError(
                f"{self.path}: {where}: {why}. `flatout {name} --help` shows --{key_of(option)}."
            )

        if option.is_flag:
            if not isinstance(value, bool):
                raise wrong(f"{value!r} is not true or false")
            if option.is_bool_flag:
                return value
            return option.flag_value if value else NO_VALUE
        parts = value if isinstance(value, list) else [value]
        if not all(_fits(option.type, part) for part in parts):
            raise wrong(f"{value!r} is not {_wanted(option.type)}")
        words = [part if isinstance(option.type, NUMBERS) else str(part) for part in parts]
        if option.multiple:
            given: Any = words
        elif isinstance(value, list):
            given = ",".join(map(str, words))  # as on the command line
        else:
            (given,) = words
        try:
            option.type_cast_value(self.ctx, given)
        except click.BadParameter as error:
            raise wrong(error.message.rstrip(".")) from None
        return given


NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
TEXTS = (click.types.StringParamType, click.Choice, click.Path)


def _fits(kind: click.ParamType, value: Any) -> bool:
    """Return whether TOML's type is the option's. Times, sizes and shares are texts or numbers."""
    if isinstance(value, bool):
        return False
    if isinstance(kind, click.types.IntParamType):
        return isinstance(value, int)
    if isinstance(kind, click.types.FloatParamType):
        return isinstance(value, (int, float))
    return isinstance(value, str if isinstance(kind, TEXTS) else (str, int, float))


def _wanted(kind: click.ParamType) -> str:
    if isinstance(kind, NUMBERS):
        return "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    return "a text in quotes" if isinstance(kind, TEXTS) else f"a {kind.name}"
