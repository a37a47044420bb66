"""`flatout levers`: list the levers, show one, or say why a session left some out."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from flatout.cli.options.arguments import complete_levers, lever_of
from flatout.cli.options.output import json_option, print_json
from flatout.job.folder import FOLDER, JobFolder
from flatout.levers import TABLE
from flatout.render.terminal import why_left_out
from flatout.schema.errors import UsageError
from flatout.schema.lever import Lever
from flatout.schema.outputs import LeverPage, LeversRecord
from flatout.tune.plan_files import newest_file
from flatout.tune.session import load_session


@click.command()
@click.argument("name", required=False, shell_complete=complete_levers)
@click.option("--why", is_flag=True, help="Say why the newest session left levers out.")
@click.option(
    "--job",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="With --why: the folder of another session.",
)
@json_option
def command(name: str | None, why: bool, job: Path | None, as_json: bool) -> None:
    """List the levers in the order in which they are applied, or show the page of one.

    With --why, NAME shows only the reason for this lever."""
    lever = lever_of(name) if name is not None else None
    if job is not None and not why:
        raise UsageError(f"--job names a session for --why. Use `flatout levers --why --job {job}`.")
    if why and as_json:
        raise UsageError("--why prints a table. session.json in the job's folder has the same as JSON.")
    if why:
        _show_reasons(name, job)
    elif as_json:
        print_json(LeversRecord([_page(entry) for entry in ([lever] if lever is not None else TABLE)]))
    elif lever is None:
        table = Table(box=None, padding=(0, 2))
        for column in ("lever", "may change", "what it does"):
            table.add_column(column)
        for entry in TABLE:
            table.add_row(entry.name, entry.effect.value, entry.page.strip().splitlines()[0])
        Console().print(table)
    else:
        click.echo(f"{lever.page.strip()}\n\n`flatout tune` measures it before it keeps it.")


def _page(lever: Lever) -> LeverPage:
    return LeverPage(lever.name, lever.effect.value, lever.moment.value, lever.live, lever.page.strip())


def _show_reasons(name: str | None, job: Path | None) -> None:
    record = newest_file("session.json")
    folder = job or (record.parent if record is not None else None)
    session = load_session(JobFolder(folder)) if folder is not None else None
    if folder is None or session is None:
        raise UsageError(f"there is no session in {folder or FOLDER}. Run `flatout tune COMMAND...` first.")
    session_name = f"the {'' if job else 'newest '}session, in {folder},"
    Console().print(why_left_out(session, session_name, name))
