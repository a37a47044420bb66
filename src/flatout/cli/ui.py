"""`flatout ui`: one page with all that flatout left in a project."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from flatout import __version__
from flatout.cli.options.json_output import json_option, print_json
from flatout.cli.options.messages import say
from flatout.compare.history import read_history, records_folder
from flatout.job.folder import FOLDER, write_whole
from flatout.measure.clock import today
from flatout.probe.machine import look
from flatout.render.formatting import shell
from flatout.schema.errors import StorageError, UsageError
from flatout.schema.history import HistoryRecord, Origin

PAGE = "index.html"
MOST_NAMED = 3


@click.command()
@click.argument(
    "folder", required=False, default=".", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser.")
@json_option
def command(folder: Path, open_: bool, as_json: bool) -> None:
    """Write one page with the runs, plans, comparisons, profiles and reports of a project.

    FOLDER is the project, by default the working directory; or a folder of `flatout tune --job`. The page is
    .flatout/index.html. It needs no server: open it from disk.
    """
    root = records_folder(folder)
    if root is None:
        raise _nothing_in(folder)
    facts = look()
    here = Origin(facts.machine, facts.versions.get("torch", ""), "cuda" if facts.cuda else "cpu")
    history = read_history(root, HistoryRecord(str(root.resolve()), today(), __version__, here))
    for each in history.skipped[:MOST_NAMED]:
        say(f"skipped {root / each.path}: {each.why}")
    if len(history.skipped) > MOST_NAMED:
        say(f"skipped {len(history.skipped) - MOST_NAMED} more; the page names them")
    if not history.jobs and not history.baselines:
        raise _nothing_in(folder)
    if as_json:
        print_json(history)
        return
    from flatout.render.history_page import history_html

    path = root / PAGE
    try:
        write_whole(path, history_html(history))
    except StorageError as error:
        raise StorageError(
            f"cannot write {path}: {error.__cause__}. `flatout ui --json` prints the same data."
        ) from None
    click.echo(str(path))
    if open_:
        webbrowser.open(path.resolve().as_uri())


def _nothing_in(folder: Path) -> UsageError:
    inner = sorted(str(each.parent) for each in folder.glob(f"*/{FOLDER}") if each.is_dir())
    near = (
        f"There are some in {', '.join(inner[:MOST_NAMED])}: `{shell(['flatout', 'ui', inner[0]])}`."
        if inner
        else ""
    )
    return UsageError(
        f"flatout has left no records in {folder.resolve()}. "
        + (near or "`flatout run COMMAND...` records a run, `flatout tune COMMAND...` finds a faster plan.")
    )
