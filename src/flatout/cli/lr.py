"""`flatout lr`: find a learning rate to start with."""

from pathlib import Path

import click

from flatout.cli.options.arguments import PROGRAM, budget_option
from flatout.cli.options.measurement import Measurement, measurement_options
from flatout.schema.batch import LrRecord
from flatout.schema.errors import UsageError
from flatout.tune.lr_range import MIN_POINTS, lr_range

RATE = click.FloatRange(0, min_open=True)


@click.command(context_settings=PROGRAM)
@click.option("--low", default=1e-6, show_default=True, type=RATE, help="Learning rate of the first step.")
@click.option("--high", default=10.0, show_default=True, type=RATE, help="Learning rate of the last step.")
@click.option(
    "--steps",
    default=150,
    show_default=True,
    type=click.IntRange(MIN_POINTS),
    help="Steps from the lowest to the highest rate.",
)
@budget_option("5m", "Time for all steps; slow programs run fewer steps.")
@measurement_options
def command(
    low: float, high: float, steps: int, budget: float, job: Path | None, as_json: bool, argv: tuple[str, ...]
) -> int:
    """Measure how the loss of an unchanged program depends on its learning rate.

    flatout starts the program and lets it train a few steps. It then raises the learning rate by a constant
    factor at each step (Smith, 2017), and stops the program. It does not touch the program's files. The chart
    is lr.html in the job's folder."""
    if not low < high:
        raise UsageError(f"--low {low:g} is not below --high {high:g}.")
    measurement = Measurement("lr", argv, job)
    record = LrRecord(**measurement.header)
    measurement.run(
        record,
        budget,
        lambda progress, save: lr_range(
            measurement.command,
            measurement.folder,
            measurement.facts,
            record,
            low,
            high,
            steps,
            budget,
            progress.stage,
        ),
    )
    from flatout.render.lr_page import lr_page

    measurement.show(record, lr_page(record), as_json)
    return 0
