"""`flatout report`: write the report of a session or a profile again from its records."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from flatout.diagnose.kept import load_profile
from flatout.plan.errors import UsageError
from flatout.plan.folder import JobFolder, write_whole
from flatout.render.profile_report import profile_html
from flatout.render.report import report_html
from flatout.tune.session import FOLDER, load_session

NOT_OF_ITS_FORM = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)


@click.command()
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--open", "open_", is_flag=True, help="Show them in the browser.")
def command(job: Path | None, open_: bool) -> None:
    """Write report.html of a session, and profile.html of a profile, again. JOB is their folder; without one, the newest below .flatout."""
    folder = JobFolder(job or _newest())
    pages = _pages(folder)
    if not pages:
        raise UsageError(f"there is no session and no profile in {folder.path}. `flatout tune COMMAND...` makes one, `flatout profile COMMAND...` the other; "
                         f"`ls {FOLDER}` lists what there is.")
    for path, page in pages:
        write_whole(path, page)
        click.echo(str(path))
        if open_:
            webbrowser.open(path.resolve().as_uri())


def _pages(folder: JobFolder) -> list[tuple[Path, str]]:
    session, profile = load_session(folder), load_profile(folder)
    try:
        return [*([(folder.report, report_html(session))] if session is not None else []),
                *([(folder.profile_page, profile_html(profile))] if profile is not None else [])]
    except NOT_OF_ITS_FORM as error:
        raise UsageError(f"the records in {folder.path} hold values that no record of flatout's has ({type(error).__name__}: {str(error)[:200]}). "
                         "Measure again: `flatout tune COMMAND...`, `flatout profile COMMAND...`.") from None


def _newest() -> Path:
    found = sorted([*Path(FOLDER).glob("*/session.json"), *Path(FOLDER).glob("*/profile.json")], key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"there is no session and no profile below {FOLDER} here. `flatout tune COMMAND...` or `flatout profile COMMAND...` makes one.")
    return found[-1].parent
