"""Arguments shared by several commands: the program, the plan, the folder."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from flatout.job.folder import JobFolder
from flatout.job.plan_file import read_plan as read_plan_file
from flatout.launch.command import parse_python
from flatout.levers import TABLE, checked
from flatout.schema.enums import Origin
from flatout.schema.errors import UsageError
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice, Plan, is_value, read_toml

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
PROGRAM = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
}


class Duration(click.ParamType):
    """A duration (``90``, ``90s``, ``5m``, ``1h``) as seconds in a float."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip().lower()
        try:
            number = float(text[:-1]) * SECONDS[text[-1]] if text[-1:] in SECONDS else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a time; write 90s, 5m or 1h", param, ctx)
        if not 0 <= number < 1e9:
            self.fail(f"{value!r} is negative or too long; write 90s, 5m or 1h", param, ctx)
        return number


class Amount(click.ParamType):
    """An amount of memory (``8GB``, ``500MiB``, ``12000000``) in bytes. GB is 1000 MB, GiB is 1024 MiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([\d.]+)\s*(?:([kmgt])(i?)b?|b)?", str(value).strip().lower())
        try:
            power = " kmgt".index(match[2] or " ") if match else 0
            number = float(match[1]) * (1024 if match[3] else 1000) ** power if match else -1.0
        except ValueError:
            number = -1.0
        if not 1 <= number < 2**60:
            self.fail(f"{value!r} is not an amount of memory; write 8GB or 500MiB", param, ctx)
        return int(number)


class Share(click.ParamType):
    """A share (``3%`` or ``0.03``) as a float."""

    name = "share"

    def convert(self, value: object, param: Any, ctx: Any) -> float:
        match = re.fullmatch(r"(\d+\.?\d*)\s*(%?)", str(value).strip())
        share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
        if not 0 < share < (10 if match and match[2] else 1):
            self.fail(f"{value!r} is not a share; write 3% or 0.03", param, ctx)
        return share


class ShareOrAmount(click.ParamType):
    """A share (``5%``) as a float, or an amount of memory (``2GB``) in bytes as an integer."""

    name = "share or size"

    def convert(self, value: object, param: Any, ctx: Any) -> float | int:
        return (Amount() if re.search(r"[a-zA-Z]", str(value)) else Share()).convert(value, param, ctx)


class LeverByName(click.ParamType):
    """A user's Choice, from ``NAME`` or ``NAME=VALUE``. VALUE is TOML or a bare word.

    A bare name means ``true``: the first value that the lever offers."""

    name = "lever"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Choice:
        if isinstance(value, Choice):
            return value
        name, has_value, text = str(value).partition("=")
        name, text = name.strip(), text.strip()
        try:
            lever = lever_of(name)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        parsed = _toml_value(text) if has_value else True
        if parsed is None:
            self.fail(
                f"{text!r} is not a value for {name}: write true, a number, a word, or a table as in --with '{name}={{every = 8}}'.",
                param,
                ctx,
            )
        try:
            lever.check(parsed)
        except TypeError as error:
            self.fail(str(error), param, ctx)
        return Choice(name, parsed, Origin.USER)

    def split_envvar_value(self, rv: str) -> list[str]:
        """Split the levers of an environment variable as a shell does: a table may contain spaces."""
        try:
            return shlex.split(rv)
        except ValueError as error:
            raise click.BadParameter(f"{rv!r} cannot be split into levers: {error}") from None

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return complete_levers(ctx, param, incomplete)


def complete_levers(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a lever, or the last of several with commas between them."""
    before, comma, word = incomplete.rpartition(",")
    return [
        CompletionItem(f"{before}{comma}{lever.name}", help=lever.page.strip().splitlines()[0])
        for lever in TABLE
        if lever.name.startswith(word)
    ]


def complete_files(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the words of the program, as without flatout."""
    return [CompletionItem(incomplete, type="file")]


def lever_of(name: str) -> Lever:
    """Return the lever of this name. Raises UsageError."""
    if name not in TABLE.names:
        raise UsageError(
            f"there is no lever {name!r}{did_you_mean(name, TABLE.names)} `flatout levers` lists them."
        )
    return next(iter(TABLE.of((name,))))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: a suggestion, or a full stop."""
    matches = get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {matches[0]}?" if matches else "."


def _toml_value(text: str) -> Any:
    """Parse a value that a plan may hold; return None for anything else."""
    if re.fullmatch(r"[A-Za-z_][\w.+-]*", text) and text not in ("true", "false"):
        return text
    try:
        table = read_toml(f"value = {text}")
    except ValueError:
        return None
    return table["value"] if set(table) == {"value"} and is_value(table["value"]) else None


class Sizes(click.ParamType):
    """A list of batch sizes (``32,64,128``): positive integers without duplicates."""

    name = "sizes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            sizes = [int(word) for word in str(value).split(",") if word.strip()]
        except ValueError:
            sizes = [0]
        if any(not 1 <= size < 2**31 for size in sizes):
            self.fail(f"{value!r} is not a list of batch sizes; write 32,64,128", param, ctx)
        return list(dict.fromkeys(sizes))


def budget_option(default: str, text: str) -> Callable[[Any], Any]:
    return click.option("--budget", default=default, show_default=True, type=Duration(), help=text)


def program_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument(
        "argv", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files
    )(function)


def read_plan(path: str) -> Plan:
    """Read a plan file; ``none`` is the empty plan. Raises PlanError if it cannot be read or a lever rejects its value."""
    return Plan() if path == "none" else checked(read_plan_file(Path(path)), path)


def require_program(argv: tuple[str, ...], command: str) -> tuple[str, ...]:
    """Return the program's command line. Raises UsageError if it is empty or begins with an option."""
    if not argv:
        example = "'python a.py' 'python b.py'" if command == "compare" else "python train.py"
        raise UsageError(f"no program was given. Try `flatout {command} {example}`.")
    if argv[0].startswith("-"):
        raise UsageError(_unknown_option(argv[0], command))
    return argv


def _unknown_option(word: str, command: str) -> str:
    if parse_python(("python", word, "")).kind in ("code", "module", "stdin"):
        return f"`flatout {command}` has no option {shlex.quote(word)}. Put `python` before it: `flatout {command} python {shlex.quote(word)} ...`."
    name = word.partition("=")[0]
    ctx = click.get_current_context(silent=True)
    known = [option for param in ctx.command.params for option in param.opts] if ctx is not None else []
    suggestion = did_you_mean(name, [option for option in known if option.startswith("--")])
    return f"`flatout {command}` has no option {name}{suggestion} `flatout {command} --help` lists them."


def writable(folder: JobFolder, explicit: bool) -> JobFolder:
    """Create and return the job's folder; say where it is unless it is here or ``explicit``: named by the user."""
    folder.make()
    if not explicit and folder.path.is_absolute():
        sys.stderr.write(f"flatout: cannot write to {os.getcwd()}; the records go to {folder.path}\n")
    return folder


def add_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds these options to a command, in this order."""
    return lambda command: reduce(lambda function, option: option(function), reversed(options), command)


class OptionOfGroup(click.Option):
    """An option that `--help` shows below ``heading``."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


recovery_option = partial(click.option, cls=OptionOfGroup, heading="Crashes, hangs and kills")
ranks_option = partial(click.option, cls=OptionOfGroup, heading="Several ranks on this machine")
machines_option = partial(click.option, cls=OptionOfGroup, heading="Several machines")
HEADINGS = (
    "Options",
    *(option.keywords["heading"] for option in (recovery_option, ranks_option, machines_option)),
)


class Grouped(click.Command):
    """Options without a heading come first, under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (row := param.get_help_record(ctx)):
                rows[getattr(param, "heading", HEADINGS[0])].append(row)
        for heading, entries in rows.items():
            if entries:
                with formatter.section(heading):
                    formatter.write_dl(entries)
