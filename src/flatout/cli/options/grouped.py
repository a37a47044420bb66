"""A command whose `--help` shows its options below headings, so that common ones come first."""

from __future__ import annotations

from functools import partial
from typing import Any

import click


class OptionOfGroup(click.Option):
    """An option that `--help` shows below ``heading``."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


survival_option = partial(click.option, cls=OptionOfGroup, heading="Crashes, hangs and kills")
ranks_option = partial(click.option, cls=OptionOfGroup, heading="Several ranks on this machine")
machines_option = partial(click.option, cls=OptionOfGroup, heading="Several machines")
HEADINGS = (
    "Options",
    *(made.keywords["heading"] for made in (survival_option, ranks_option, machines_option)),
)


class Grouped(click.Command):
    """Options without a heading come first, under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (row := param.get_help_record(ctx)):
                rows[getattr(param, "heading", HEADINGS[0])].append(row)
        for heading, shown in rows.items():
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)
