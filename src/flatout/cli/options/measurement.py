"""Shared parts of the commands that run a program briefly to measure it: options, record, page and output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from flatout import __version__
from flatout.cli.options.arguments import add_options, program_argument, require_program, writable
from flatout.cli.options.output import json_option, print_json, stop_on_sigterm, warn_untested
from flatout.cli.options.progress import LiveProgress
from flatout.job.folder import write_atomically, write_json
from flatout.launch.command import check_measurable, parse_command
from flatout.measure.clock import utc_now
from flatout.probe.machine import look
from flatout.schema.errors import FlatoutError
from flatout.schema.facts import Facts, untested_torch
from flatout.schema.records import ProgramRecord
from flatout.tune.plan_files import job_folder

if TYPE_CHECKING:
    from flatout.render.page import Page


job_option = click.option(
    "--job",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the records instead of .flatout/<job>.",
)
measurement_options = add_options(program_argument, job_option, json_option)


def header(command: Iterable[str], facts: Facts) -> dict[str, Any]:
    """Return the common first fields of a ProgramRecord."""
    return {
        "command": list(command),
        "cwd": os.getcwd(),
        "flatout": __version__,
        "created": utc_now(),
        "versions": {"python": facts.python, **facts.versions},
        "untested": untested_torch(facts.versions.get("torch", "")),
    }


@contextmanager
def saved_on_exit(record: ProgramRecord, path: Path) -> Iterator[Callable[[], None]]:
    """Write the record to its file on exit, even after an error. The yielded function writes it earlier.

    SIGTERM stops the program in the same way as Ctrl-C."""

    def save() -> None:
        write_json(path, record.to_json())

    stop_on_sigterm()
    try:
        yield save
    except FlatoutError as error:
        record.status, record.message = "failed", str(error)
        raise
    except KeyboardInterrupt:
        record.status, record.message = "failed", "interrupted"
        sys.stderr.write(f"flatout: interrupted; the results so far are in {path}\n")
        raise
    finally:
        save()


class Measurement:
    """One measurement: ``name`` is the command and the stem of its files."""

    def __init__(self, name: str, argv: tuple[str, ...], job: Path | None) -> None:
        """Raises UsageError, StorageError, NothingMeasured."""
        self.name = name
        self.command = check_measurable(parse_command(require_program(argv, name)))
        self.folder = writable(job_folder(self.command, job), job is not None)
        self.facts = warn_untested(look(self.command.argv))
        self.header = header(self.command.shown, self.facts)

    def run(
        self,
        record: ProgramRecord,
        budget_s: float,
        run: Callable[[LiveProgress, Callable[[], None]], object],
    ) -> None:
        """Call ``run`` to fill the record. Its arguments show the progress and save the record.

        Raises FlatoutError, KeyboardInterrupt."""
        with (
            saved_on_exit(record, self._file("json")) as save,
            LiveProgress(Console(stderr=True), budget_s) as progress,
        ):
            run(progress, save)

    def show(self, record: ProgramRecord, page: Page, as_json: bool) -> None:
        """Write the page and print it."""
        write_page(record, self._file("html"), page, as_json)

    def _file(self, suffix: str) -> Path:
        return self.folder.path / f"{self.name}.{suffix}"


def write_page(record: ProgramRecord, path: Path, page: Page, as_json: bool) -> None:
    """Write the page, and print it or the record as JSON."""
    from flatout.render.page import html
    from flatout.render.terminal import print_page

    write_atomically(path, html(page))
    if as_json:
        print_json(record)
        return
    console = Console()
    print_page(console, page)
    console.print(f"chart: {path}", markup=False, highlight=False, soft_wrap=True)
