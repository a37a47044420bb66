"""`flatout schema`: the JSON Schema of each record that flatout writes or prints."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.table import Table

from flatout.cli.options.arguments import did_you_mean
from flatout.cli.options.json_output import print_json
from flatout.schema.errors import UsageError
from flatout.schema.json_schema import PUBLISHED, json_schema


def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in PUBLISHED if name.startswith(incomplete)]


@click.command()
@click.argument("name", required=False, shell_complete=names)
def command(name: str | None) -> None:
    """Print the JSON Schema (draft 2020-12) of a record, or list the records.

    The field `schema` of a record is its number. It grows when the meaning of a field changes.
    """
    if name is None:
        table = Table(box=None, padding=(0, 2))
        for column in ("name", "schema", "file in the job's folder", "printed by"):
            table.add_column(column)
        for each, record in PUBLISHED.items():
            printed = f"flatout {record.printed}" if record.printed else ""
            table.add_row(each, str(record.number), record.file, printed)
        Console().print(table)
        return
    if name not in PUBLISHED:
        raise UsageError(
            f"there is no record {name!r}{did_you_mean(name, PUBLISHED)} `flatout schema` lists them."
        )
    print_json(json_schema(name))
