"""`flatout ui`: one page with the commands, runs and reports of a project."""

import webbrowser
from pathlib import Path

import click

from flatout import __version__
from flatout.cli.options.output import json_option, notify, print_json
from flatout.compare.history import read_history, records_folder
from flatout.job.folder import write_atomically
from flatout.measure.clock import utc_now
from flatout.schema.errors import StorageError, UsageError
from flatout.schema.run_request import HistoryRecord

PAGE = "index.html"
MAX_NAMED = 3


@click.command()
@click.argument(
    "folder", required=False, default=".", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser.")
@json_option
def command(folder: Path, open_: bool, as_json: bool) -> None:
    """Write one page with the commands, runs and reports of a project.

    FOLDER is the project, by default the working directory; or a folder of `flatout tune --job`. The page is
    .flatout/index.html. It needs no server: open it from disk."""
    root = records_folder(folder)
    history = HistoryRecord(str(root.resolve()) if root else "", utc_now(), __version__)
    if root is not None:
        read_history(root, history)
        for name, why in list(history.skipped.items())[:MAX_NAMED]:
            notify(f"skipped {root / name}: {why}")
    if len(history.skipped) > MAX_NAMED:
        notify(f"skipped {len(history.skipped) - MAX_NAMED} more; the page names them")
    if root is None or not history.jobs:
        raise UsageError(
            f"flatout has left no records in {folder.resolve()}. "
            "`flatout run COMMAND...` records a run, `flatout tune COMMAND...` finds a faster plan."
        )
    if as_json:
        print_json(history)
        return
    from flatout.render.history_page import history_page
    from flatout.render.page import html

    path = root / PAGE
    try:
        write_atomically(path, html(history_page(history)))
    except StorageError as error:
        raise StorageError(
            f"cannot write {path}: {error.__cause__}. `flatout ui --json` prints the same data."
        ) from None
    click.echo(str(path))
    if open_:
        webbrowser.open(path.resolve().as_uri())
