"""`flatout bisect`: find the commit that made a program slower."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from flatout.cli.options.arguments import PROGRAM, Duration, words_or_usage, writable
from flatout.cli.options.json_output import print_json
from flatout.cli.options.measurement import header, kept, measurement_options, pairs_option
from flatout.cli.options.messages import warned
from flatout.cli.options.progress import LiveProgress
from flatout.compare.bisect import Bisection
from flatout.compare.pairs import PairTimer
from flatout.compare.sides import Side, at_revision
from flatout.compare.work_trees import WorkTrees
from flatout.launch.command import measurable, understand
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.compare import WHAT, BisectRecord
from flatout.tune.plan_files import job_folder


@click.command(context_settings=PROGRAM)
@click.option("--good", required=True, help="A revision that is fast.")
@click.option("--bad", default="HEAD", show_default=True, help="A later revision that is slow.")
@click.option(
    "--of",
    "what",
    type=click.Choice(WHAT),
    default="time",
    show_default=True,
    help="What changed: the time of a step, the peak memory, or the losses.",
)
@click.option(
    "--budget",
    default="5m",
    show_default=True,
    type=Duration(),
    help="Time for the test of one commit; the fewest pairs are measured even if they take longer.",
)
@pairs_option
@measurement_options
def command(
    good: str,
    bad: str,
    what: str,
    budget: float,
    pairs: int,
    as_json: bool,
    job: Path | None,
    words: tuple[str, ...],
) -> int:
    """Find the commit between two revisions that made a program slower.

    Each commit is checked out in a temporary work tree and compared with the good revision: pairs of fresh
    processes, until the result is certain. Commits that do not run are skipped. `--of losses` finds the
    commit that changed the losses in any bit.
    """
    words, facts = words_or_usage(words, "bisect"), warned(look(words))
    with WorkTrees() as trees:
        commits = trees.between(good, bad)
        cmd = measurable(understand(words, trees.at(bad)))
        folder = writable(job_folder(cmd, job), job is not None)
        record = BisectRecord(
            **header(cmd.shown, facts), what=what, good=trees.commit(good), bad=trees.commit(bad)
        )
        with (
            kept(record, folder.path / "bisect.json") as save,
            LiveProgress(Console(stderr=True), budget) as progress,
        ):

            def timer(a: Side, b: Side) -> PairTimer:
                progress.until(seconds() + budget)
                progress.stage("comparing", f"{good} with {b.revision[:10]}: {trees.subject(b.revision)}")
                return PairTimer((a, b), folder, facts, progress)

            search = Bisection(
                record, lambda at: at_revision(words, at, trees), trees.subject, timer, (budget, pairs), save
            )
            search.run(commits)
            record.status = "done"
    if as_json:
        print_json(record)
        return 0
    console = Console()
    for each in record.tested:
        console.print(
            Text(f"{each.commit[:10]}  {each.verdict:11}  {each.why:28}  {each.subject}"), soft_wrap=True
        )
    console.print(Text(verdict(record), style="bold"), soft_wrap=True)
    for each in record.first_bad:
        console.print(Text(f"  {each.commit[:10]}  {each.subject}"), soft_wrap=True)
    return 0


def verdict(record: BisectRecord) -> str:
    """Say which commit it is, or which ones it may be."""
    if len(record.first_bad) == 1:
        return f"{record.what}: {record.change}. The first bad commit is:"
    return f"{record.what}: {record.change}. The first bad commit is one of these {len(record.first_bad)}; those between could not be tested:"
