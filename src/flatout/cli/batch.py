"""`flatout batch`: which batch size is the fastest that fits, and how large a one still helps learning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from rich.console import Console

from flatout import __version__
from flatout.cli.arguments import PROGRAM, Amount, Duration, Sizes, program, words_or_usage, writable
from flatout.cli.progress import LiveProgress
from flatout.launch.command import understand
from flatout.measure.clock import today
from flatout.plan.batch import BatchRecord
from flatout.plan.errors import FlatoutError
from flatout.plan.folder import write_json, write_whole
from flatout.probe.machine import look
from flatout.tune.batch_curve import BatchCurve, Wishes
from flatout.tune.session import job_folder


@click.command(context_settings=PROGRAM)
@click.option("--sizes", default="", type=Sizes(), help="Batch sizes, separated by commas; else parts and multiples of the program's own.")
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="Time to spend: 90s, 5m, 1h.")
@click.option("--memory-limit", default=None, type=Amount(), help="What a step may take, as 8GB; else the device's memory, or what is free on this machine.")
@click.option("--at-step", default=0, type=click.IntRange(0), help="Look at the gradients once the program has trained so many steps.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of torch, numpy and random, set as they are imported.")
@click.option("--job", type=click.Path(file_okay=False, path_type=Path), help="Folder for the records instead of .flatout/<job>.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of a table.")
@program
def command(sizes: list[int], budget: float, memory_limit: int | None, at_step: int, seed: int, job: Path | None, as_json: bool,
            words: tuple[str, ...]) -> int:
    """Measure the speed and the memory of a program, as it is, against its batch size, and how noisy its gradients are.

    The program is started at each size, measured step by step with its loader in it, and stopped; its files are not touched. The picture is batch.html
    in the job's folder.
    """
    cmd = understand(words_or_usage(words, "batch"))
    folder, facts = writable(job_folder(cmd, job), job is not None), look()
    record = BatchRecord(list(cmd.typed), os.getcwd(), flatout=__version__, created=today(), versions={"python": facts.python, **facts.versions},
                         budget_s=budget)

    def save(record: BatchRecord) -> None:
        write_json(folder.path / "batch.json", record.to_json())

    try:
        with LiveProgress(Console(stderr=True), budget) as progress:
            BatchCurve(cmd, folder, facts, record, Wishes(tuple(sizes), budget, memory_limit, at_step, seed), progress.stage, save).run()
    except FlatoutError as error:
        record.status, record.message = "failed", str(error)
        save(record)
        raise
    from flatout.render.batch_page import batch_html, batch_table, sentences

    save(record)
    write_whole(folder.path / "batch.html", batch_html(record))
    if as_json:
        click.echo(json.dumps(record.to_json(), indent=1))
        return 0
    console = Console()
    if record.points:
        console.print(batch_table(record))
    console.print("\n".join(sentences(record)), markup=False, highlight=False)
    console.print(f"picture: {folder.path / 'batch.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0
