"""`flatout memory`: what a training step will take, before it runs."""

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
from flatout.plan.errors import FlatoutError
from flatout.plan.folder import write_json, write_whole
from flatout.plan.memory_forecast import MemoryForecast
from flatout.probe.machine import look
from flatout.tune.memory_forecast import Forecast, Question
from flatout.tune.session import job_folder


@click.command(context_settings=PROGRAM)
@click.option("--batch", "sizes", default="", type=Sizes(), help="Batch sizes beside the script's own: 32,64,128.")
@click.option("--memory-limit", type=Amount(), help="Find the largest batch that fits: 8GB, 500MiB. The device's own memory where it is left out.")
@click.option("--device", type=click.Choice(["own", "cuda"]), default="own", show_default=True,
              help="cuda: as torch's allocator for CUDA would hand memory out, where the program itself runs on the CPU.")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Then measure real steps: of the script's own size, and of one asked for.")
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="The longest that one measurement may take.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the program's hashes; its own seeds stay.")
@click.option("--job", type=click.Path(file_okay=False, path_type=Path), help="Folder for the records instead of .flatout/<job>.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of a table.")
@program
def command(sizes: list[int], memory_limit: int | None, device: str, measure: bool, budget: float, seed: int, job: Path | None, as_json: bool,
            words: tuple[str, ...]) -> int:
    """Foretell the peak memory of a training step, and what fills it, for any batch size.

    The program is started as it is. From its first batch on its operators run for shapes alone: nothing is computed, nothing is learned, and no memory
    is taken. Then it is started again and some real steps are measured, to say how good the prediction was. The picture is memory.html in the job's folder.
    """
    cmd = understand(words_or_usage(words, "memory"))
    folder, facts = writable(job_folder(cmd, job), job is not None), look()
    record = MemoryForecast(list(cmd.typed), os.getcwd(), flatout=__version__, created=today(), versions={"python": facts.python, **facts.versions})
    question = Question(sizes, device == "cuda", memory_limit, measure, budget, seed)
    try:
        with LiveProgress(Console(stderr=True), budget) as progress:
            Forecast(cmd, folder, facts, record, question, progress.stage).run()
    except FlatoutError as error:
        record.status, record.message = "failed", str(error)
        write_json(folder.path / "memory.json", record.to_json())
        raise
    from flatout.render.memory_page import memory_html, memory_tables

    write_json(folder.path / "memory.json", record.to_json())
    write_whole(folder.path / "memory.html", memory_html(record))
    if as_json:
        click.echo(json.dumps(record.to_json(), indent=1))
        return 0
    console = Console()
    console.print(memory_tables(record))
    console.print("\n".join(f"note: {note}" for note in record.notes), markup=False, highlight=False)
    console.print(f"picture: {folder.path / 'memory.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0
