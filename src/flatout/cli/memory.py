"""`flatout memory`: what a training step will take, before it runs."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli.arguments import PROGRAM, Amount, Duration, Sizes
from flatout.cli.asking import Asked, question
from flatout.plan.memory_forecast import MemoryForecast
from flatout.tune.memory_forecast import Forecast, Question


@click.command(context_settings=PROGRAM)
@click.option("--batch", "sizes", default="", type=Sizes(), help="Batch sizes beside the script's own: 32,64,128.")
@click.option("--memory-limit", type=Amount(), help="Find the largest batch that fits: 8GB, 500MiB. The device's own memory where it is left out.")
@click.option("--device", type=click.Choice(["own", "cuda"]), default="own", show_default=True,
              help="cuda: as torch's allocator for CUDA would hand memory out, where the program itself runs on the CPU.")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Then measure real steps: of the script's own size, and of one asked for.")
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="The longest that one measurement may take.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the program's hashes; its own seeds stay.")
@question
def command(sizes: list[int], memory_limit: int | None, device: str, measure: bool, budget: float, seed: int, job: Path | None, as_json: bool,
            words: tuple[str, ...]) -> int:
    """Foretell the peak memory of a training step, and what fills it, for any batch size.

    The program is started as it is. From its first batch on its operators run for shapes alone: nothing is computed, nothing is learned, and no memory
    is taken. Then it is started again and some real steps are measured, to say how good the prediction was. The picture is memory.html in the job's folder.
    """
    asked = Asked("memory", words, job)
    record = MemoryForecast(**asked.header)
    wanted = Question(sizes, device == "cuda", memory_limit, measure, budget, seed)
    asked.answer(record, budget, lambda stage, save: Forecast(asked.command, asked.folder, asked.facts, record, wanted, stage).run())
    from flatout.render.memory_page import memory_html, memory_tables

    asked.show(record, memory_html(record), [memory_tables(record), *(f"note: {note}" for note in record.notes)], as_json)
    return 0
