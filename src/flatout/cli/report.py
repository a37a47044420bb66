"""`flatout report`: regenerate the pages of a session or a profile from its records."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from flatout.cli.options.json_output import json_option, print_json
from flatout.diagnose.stored_profile import load_profile
from flatout.job.folder import FOLDER, JobFolder, write_whole
from flatout.render.profile_page import profile_html
from flatout.render.report import report_html
from flatout.schema.errors import NOT_OF_ITS_FORM, UsageError
from flatout.schema.outputs import ReportRecord
from flatout.tune.plan_files import newest
from flatout.tune.session import load_session


@click.command()
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--open", "open_", is_flag=True, help="Open the pages in the browser.")
@json_option
def command(job: Path | None, open_: bool, as_json: bool) -> None:
    """Regenerate report.html of a session and profile.html of a profile.

    JOB is their folder. The default is the newest folder below .flatout.
    """
    record = newest("session.json", "profile.json")
    place = job or (record.parent if record is not None else None)
    pages = _pages(JobFolder(place)) if place is not None else []
    if not pages:
        raise UsageError(
            f"there is no session and no profile in {place or FOLDER}. Run `flatout tune COMMAND...` or `flatout profile COMMAND...`."
        )
    for path, page in pages:
        write_whole(path, page)
        if not as_json:
            click.echo(str(path))
        if open_:
            webbrowser.open(path.resolve().as_uri())
    if as_json:
        print_json(ReportRecord([str(path) for path, _ in pages]))


def _pages(folder: JobFolder) -> list[tuple[Path, str]]:
    session, profile = load_session(folder), load_profile(folder)
    try:
        return [
            *([(folder.report, report_html(session))] if session is not None else []),
            *([(folder.profile_page, profile_html(profile))] if profile is not None else []),
        ]
    except NOT_OF_ITS_FORM as error:
        raise UsageError(
            f"the records in {folder.path} are invalid ({type(error).__name__}: {str(error)[:200]}). "
            "Measure again: `flatout tune COMMAND...`, `flatout profile COMMAND...`."
        ) from None
