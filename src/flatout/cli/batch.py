"""`flatout batch`: which batch size is the fastest that fits, and how large a one still helps learning."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli.arguments import PROGRAM, Amount, Duration, Sizes
from flatout.cli.asking import Asked, question
from flatout.plan.batch import BatchRecord
from flatout.tune.batch_curve import BatchCurve, Wishes


@click.command(context_settings=PROGRAM)
@click.option("--sizes", default="", type=Sizes(), help="Batch sizes, separated by commas; else parts and multiples of the program's own.")
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="Time to spend: 90s, 5m, 1h.")
@click.option("--memory-limit", default=None, type=Amount(), help="What a step may take, as 8GB; else the device's memory, or what is free on this machine.")
@click.option("--at-step", default=0, type=click.IntRange(0), help="Look at the gradients once the program has trained so many steps.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of torch, numpy and random, set as they are imported.")
@question
def command(sizes: list[int], budget: float, memory_limit: int | None, at_step: int, seed: int, job: Path | None, as_json: bool,
            words: tuple[str, ...]) -> int:
    """Measure the speed and the memory of a program, as it is, against its batch size, and how noisy its gradients are.

    The program is started at each size, measured step by step with its loader in it, and stopped; its files are not touched. The picture is batch.html
    in the job's folder.
    """
    asked = Asked("batch", words, job)
    record = BatchRecord(**asked.header, budget_s=budget)
    wishes = Wishes(tuple(sizes), budget, memory_limit, at_step, seed)
    asked.answer(record, budget, lambda stage, save: BatchCurve(asked.command, asked.folder, asked.facts, record, wishes, stage, save).run())
    from flatout.render.batch_page import batch_html, batch_table, sentences

    asked.show(record, batch_html(record), [*([batch_table(record)] if record.points else []), *sentences(record)], as_json)
    return 0
