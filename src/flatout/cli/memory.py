"""`flatout memory`: predict the memory of a training step before it runs."""

from pathlib import Path

import click

from flatout.cli.options.arguments import PROGRAM, Amount, Sizes, budget_option
from flatout.cli.options.measurement import Measurement, measurement_options
from flatout.schema.batch import MemoryForecast
from flatout.tune.memory_forecast import Forecast, ForecastOptions


@click.command(context_settings=PROGRAM)
@click.option(
    "--sizes", default="", type=Sizes(), help="Batch sizes in addition to the script's own: 32,64,128."
)
@click.option(
    "--memory-limit",
    type=Amount(),
    help="Find the largest batch that fits into 8GB or 500MiB. The default is the device's memory.",
)
@click.option(
    "--allocator",
    type=click.Choice(["own", "cuda"]),
    default="own",
    show_default=True,
    help="Allocator to simulate; `cuda` predicts GPU memory for a program that runs on the CPU.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Then measure real steps at the script's own batch size and one requested size.",
)
@budget_option("5m", "Time limit for each measurement.")
@measurement_options
def command(
    sizes: list[int],
    memory_limit: int | None,
    allocator: str,
    measure: bool,
    budget: float,
    job: Path | None,
    as_json: bool,
    argv: tuple[str, ...],
) -> int:
    """Predict the peak memory of a training step, and its contents, for any batch size.

    flatout starts the unchanged program. From its first batch on, operators compute shapes only: they compute
    no values and take no memory, and the program learns nothing. flatout then starts it again and measures
    some real steps, to report the error of the prediction. The chart is memory.html in the job's folder."""
    measurement = Measurement("memory", argv, job)
    record = MemoryForecast(**measurement.header)
    options = ForecastOptions(sizes, allocator == "cuda", memory_limit, measure, budget)
    measurement.run(
        record,
        budget,
        lambda progress, save: Forecast(
            measurement.command, measurement.folder, measurement.facts, record, options, progress.stage
        ).run(),
    )
    from flatout.render.memory_page import memory_page

    measurement.show(record, memory_page(record), as_json)
    return 0
