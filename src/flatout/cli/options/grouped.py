"""A command whose `--help` shows its options below headings, so that common ones come first."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import click


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
