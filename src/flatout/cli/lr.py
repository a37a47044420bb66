"""`flatout lr`: which learning rate to begin with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from rich.console import Console

from flatout import __version__
from flatout.cli.arguments import PROGRAM, Duration, program, words_or_usage, writable
from flatout.cli.progress import LiveProgress
from flatout.launch.command import understand
from flatout.measure.clock import today
from flatout.plan.errors import FlatoutError, UsageError
from flatout.plan.folder import write_json, write_whole
from flatout.plan.lr_range import OWN, LrRecord, read_optimizers
from flatout.probe.machine import look
from flatout.tune.lr_range import FEWEST, Ranging
from flatout.tune.session import job_folder


@click.command(context_settings=PROGRAM)
@click.option("--low", default=1e-6, show_default=True, type=click.FloatRange(0, min_open=True), help="The learning rate of the first step.")
@click.option("--high", default=10.0, show_default=True, type=click.FloatRange(0, min_open=True), help="The learning rate of the last step.")
@click.option("--steps", default=150, show_default=True, type=click.IntRange(FEWEST), help="Steps from the lowest to the highest.")
@click.option("--optimizers", default=OWN, show_default=True,
              help="Optimizers to test, separated by commas: own, names of torch.optim, package.Class, with options: \"own,adamw,sgd(momentum=0.9)\".")
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="Time for all steps; fewer are taken where they would last longer.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the program's hashes; its own seeds stay.")
@click.option("--job", type=click.Path(file_okay=False, path_type=Path), help="Folder for the records instead of .flatout/<job>.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of a table.")
@program
def command(low: float, high: float, steps: int, optimizers: str, budget: float, seed: int, job: Path | None, as_json: bool, words: tuple[str, ...]) -> int:
    """See how the loss of a program, as it is, answers to its learning rate.

    The program is started, trains some steps of its own, and then has its learning rate raised by a constant factor from step to step (Smith, 2017).
    Then it is stopped; its files are not touched. Of several optimizers each has its own test and then trains at the learning rate that was found, for the
    same time of computing. The pictures are in lr.html in the job's folder.
    """
    if not low < high:
        raise UsageError(f"--low {low:g} is not below --high {high:g}.")
    wishes = read_optimizers(optimizers)
    cmd = understand(words_or_usage(words, "lr"))
    folder, facts = writable(job_folder(cmd, job), job is not None), look()
    record = LrRecord(list(cmd.typed), os.getcwd(), flatout=__version__, created=today(), versions={"python": facts.python, **facts.versions})
    try:
        with LiveProgress(Console(stderr=True), budget) as progress:
            Ranging(cmd, folder, facts, record, budget, seed, progress.stage).run(wishes, low, high, steps)
    except FlatoutError as error:
        record.status, record.message = "failed", str(error)
        write_json(folder.path / "lr.json", record.to_json())
        raise
    from flatout.render.lr_page import because, headline, lr_html, lr_table

    write_json(folder.path / "lr.json", record.to_json())
    write_whole(folder.path / "lr.html", lr_html(record))
    if as_json:
        click.echo(json.dumps(record.to_json(), indent=1))
        return 0
    console = Console()
    console.print(f"{headline(record)}: {because(record)}\n", markup=False, highlight=False)
    console.print(lr_table(record))
    console.print("\n".join(f"note: {note}" for note in record.notes), markup=False, highlight=False)
    console.print(f"picture: {folder.path / 'lr.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0
