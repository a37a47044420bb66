"""`flatout batch`: find the fastest batch size that fits, and the largest that still helps learning."""

from pathlib import Path

import click

from flatout.cli.options.arguments import PROGRAM, Amount, Sizes, budget_option
from flatout.cli.options.measurement import Measurement, measurement_options
from flatout.schema.batch import BatchRecord
from flatout.tune.batch_curve import BatchCurve, BatchOptions


@click.command(context_settings=PROGRAM)
@click.option(
    "--sizes",
    default="",
    type=Sizes(),
    help="Comma-separated batch sizes; by default fractions and multiples of the script's own.",
)
@budget_option("5m", "Time to spend: 90s, 5m, 1h.")
@click.option(
    "--memory-limit",
    type=Amount(),
    help="Memory that a step may use, as in 8GB. The default is the device memory or free RAM.",
)
@click.option(
    "--at-step", default=0, type=click.IntRange(0), help="Training steps before the gradients are measured."
)
@measurement_options
def command(
    sizes: list[int],
    budget: float,
    memory_limit: int | None,
    at_step: int,
    job: Path | None,
    as_json: bool,
    argv: tuple[str, ...],
) -> int:
    """Measure speed, memory and gradient noise of an unchanged program at several batch sizes.

    flatout starts the program at each size, measures whole steps including data loading, and stops it.
    It does not touch the program's files. The charts are in batch.html in the job's folder."""
    measurement = Measurement("batch", argv, job)
    record = BatchRecord(**measurement.header, budget_s=budget)
    options = BatchOptions(tuple(sizes), budget, memory_limit, at_step)
    measurement.run(
        record,
        budget,
        lambda progress, save: BatchCurve(
            measurement.command, measurement.folder, measurement.facts, record, options, progress.stage, save
        ).run(),
    )
    from flatout.render.batch_page import batch_page

    measurement.show(record, batch_page(record), as_json)
    return 0
