"""`flatout report`: write the report of a session again from its records."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from flatout.plan.errors import UsageError
from flatout.plan.folder import JobFolder, write_whole
from flatout.render.report import report_html
from flatout.tune.session import FOLDER, load_session


@click.command()
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--open", "open_", is_flag=True, help="Show it in the browser.")
def command(job: Path | None, open_: bool) -> None:
    """Write report.html of a session again. JOB is its folder; without one, the newest below .flatout."""
    folder = JobFolder(job or _newest())
    session = load_session(folder)
    if session is None:
        raise UsageError(f"there is no session in {folder.path}. `flatout tune COMMAND...` makes one; `ls {FOLDER}` lists what there is.")
    write_whole(folder.report, report_html(session))
    click.echo(str(folder.report))
    if open_:
        webbrowser.open(folder.report.resolve().as_uri())


def _newest() -> Path:
    found = sorted(Path(FOLDER).glob("*/session.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"there is no session below {FOLDER} here. `flatout tune COMMAND...` makes one.")
    return found[-1].parent
