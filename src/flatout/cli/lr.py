"""`flatout lr`: which learning rate to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli.arguments import PROGRAM, Duration
from flatout.cli.asking import Asked, question
from flatout.plan.errors import UsageError
from flatout.plan.lr_range import OWN, LrRecord, read_optimizers
from flatout.tune.lr_range import FEWEST, Ranging


@click.command(context_settings=PROGRAM)
@click.option("--low", default=1e-6, show_default=True, type=click.FloatRange(0, min_open=True), help="The learning rate of the first step.")
@click.option("--high", default=10.0, show_default=True, type=click.FloatRange(0, min_open=True), help="The learning rate of the last step.")
@click.option("--steps", default=150, show_default=True, type=click.IntRange(FEWEST), help="Steps from the lowest to the highest.")
@click.option("--optimizers", default=OWN, show_default=True,
              help="Optimizers to test, separated by commas: own, names of torch.optim, package.Class, with options: \"own,adamw,sgd(momentum=0.9)\".")
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="Time for all steps; fewer are taken where they would last longer.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the program's hashes; its own seeds stay.")
@question
def command(low: float, high: float, steps: int, optimizers: str, budget: float, seed: int, job: Path | None, as_json: bool, words: tuple[str, ...]) -> int:
    """See how the loss of a program, as it is, answers to its learning rate.

    The program is started, trains some steps of its own, and then has its learning rate raised by a constant factor from step to step (Smith, 2017).
    Then it is stopped; its files are not touched. Of several optimizers each has its own test and then trains at the learning rate that was found, for the
    same time of computing. The pictures are in lr.html in the job's folder.
    """
    if not low < high:
        raise UsageError(f"--low {low:g} is not below --high {high:g}.")
    wishes = read_optimizers(optimizers)
    asked = Asked("lr", words, job)
    record = LrRecord(**asked.header)
    asked.answer(record, budget, lambda stage, save:
                 Ranging(asked.command, asked.folder, asked.facts, record, budget, seed, stage).run(wishes, low, high, steps))
    from flatout.render.lr_page import because, headline, lr_html, lr_table

    asked.show(record, lr_html(record), [f"{headline(record)}: {because(record)}\n", lr_table(record), *(f"note: {note}" for note in record.notes)], as_json)
    return 0
