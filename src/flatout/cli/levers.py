"""`flatout levers`: the shelf."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from flatout.levers import TABLE
from flatout.plan.errors import UsageError


@click.command()
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the levers in the order in which they act, or show the page of one."""
    if name is None:
        table = Table(box=None, padding=(0, 2))
        for column in ("lever", "acts", "may change", "what it does"):
            table.add_column(column)
        for lever in TABLE:
            table.add_row(lever.name, lever.moment.value, lever.effect.value, lever.page.strip().splitlines()[0])
        Console().print(table)
        return
    found = next((lever for lever in TABLE if lever.name == name), None)
    if found is None:
        raise UsageError(f"there is no lever {name!r}. `flatout levers` lists them.")
    click.echo(found.page.strip())
