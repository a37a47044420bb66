"""`flatout compare`: measure two programs, revisions, environments or plans against each other."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flatout.cli.options.arguments import (
    PROGRAM,
    Share,
    ShareOrAmount,
    budget_option,
    read_plan,
    require_program,
    writable,
)
from flatout.cli.options.measurement import header, measurement_options, saved_on_exit, write_page
from flatout.cli.options.output import print_json, warn_untested
from flatout.cli.options.progress import LiveProgress
from flatout.compare import baselines, sides
from flatout.compare.attribution import blame
from flatout.compare.baselines import Baseline
from flatout.compare.evaluate import (
    MIN_PAIRS,
    compare_losses,
    fill_record,
    gates,
    stop_rule,
    training_verdict,
)
from flatout.compare.pairs import Pair, PairTimer
from flatout.compare.sides import Side, WorkTrees
from flatout.launch.command import check_measurable, parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.compare import CompareRecord
from flatout.schema.errors import StorageError, UsageError
from flatout.schema.facts import Facts
from flatout.schema.records import TrialRecord
from flatout.tune.plan_files import job_folder, plan_key

CANNOT_TELL = 12  # exit code
MIN_BLAME_PAIRS = 4  # more are measured until the difference is known well


@click.command(context_settings=PROGRAM)
@click.option("--rev", help="Two revisions: main..HEAD, or main.. for main and the folder as it is.")
@click.option("--plan", "plans", help="Two plans: files or `none`, with a comma between them.")
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="PATH",
    help="Twice: the interpreters of A and B, such as those before and after an upgrade.",
)
@click.option(
    "--blame", is_flag=True, help="Name the operators and lines that account for the difference in step time."
)
@click.option("--baseline", help="Compare with a stored baseline of this name.")
@click.option("--save", "save_as", help="Store this run, or side B, as a baseline of this name.")
@click.option("--any-machine", is_flag=True, help="Allow a baseline of another machine.")
@click.option(
    "--gate", type=Share(), help="Exit with 1 if B is slower than A by more than this, with confidence."
)
@click.option(
    "--gate-memory",
    type=ShareOrAmount(),
    help="The same for the peak memory of the process; or an amount, such as 2GB.",
)
@click.option(
    "--gate-loss",
    type=click.Choice(["bits", "spread"]),
    help="Exit with 1 if losses differ in a bit, or by more than the spread of A's seeds.",
)
@budget_option("5m", "Time for all pairs; the fewest are measured even if they take longer.")
@click.option(
    "--same-training",
    is_flag=True,
    help="Exit with 1 unless B learns the same as A, up to rounding; with 12 if that cannot be told.",
)
@click.option("--half", is_flag=True, help="With --same-training: B may compute in half precision.")
@click.option(
    "--pairs",
    show_default=f"{MIN_PAIRS}, with --blame {MIN_BLAME_PAIRS}",
    type=click.IntRange(2),
    help="Fewest pairs of processes; a small number gives wide intervals.",
)
@click.option(
    "--markdown",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append the result to this file as Markdown, such as $GITHUB_STEP_SUMMARY.",
)
@measurement_options
def command(
    argv: tuple[str, ...],
    rev: str | None,
    plans: str | None,
    pythons: tuple[str, ...],
    baseline: str | None,
    save_as: str | None,
    budget: float,
    pairs: int | None,
    as_json: bool,
    markdown: Path | None,
    job: Path | None,
    **limits: Any,
) -> int:
    """Measure two programs against each other: steps, memory, start-up, and losses bit for bit.

    \b
    flatout compare 'python a.py' 'python b.py'       two commands
    flatout compare --rev main.. python train.py      a revision and the folder as it is
    flatout compare 'A/bin/python a.py' 'B/bin/python a.py'       two environments
    flatout compare --plan none,flatout.toml python train.py
    flatout compare --save before python train.py     store a baseline
    flatout compare --baseline before python train.py compare with it
    flatout compare --same-training 'python a.py' 'python b.py'       do both learn the same?
    flatout compare --blame --python old/bin/python --python new/bin/python train.py

    Both programs run in pairs of fresh processes with the same seed, and their steps alternate. The charts
    are in compare.html in the job's folder. With a gate, the exit code is 1 if B fails it."""
    comparisons = {"--rev": rev, "--plan": plans, "--python": pythons, "--baseline": baseline}
    given_axes = [name for name, value in comparisons.items() if value]
    if len(given_axes) > 1:
        raise UsageError(f"{' and '.join(given_axes)} cannot be compared at once. Give one of them.")
    argv, facts = require_program(argv, "compare"), warn_untested(look(argv))
    if limits["any_machine"] and not baseline:
        raise UsageError("--any-machine has no effect without --baseline.")
    if limits["half"] and not limits["same_training"]:
        raise UsageError("--half has no effect without --same-training.")
    for name in ("same_training", "blame"):
        if limits[name] and baseline:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} needs both programs; a baseline has only the figures of one.")
    stores_only = bool(save_as) and not given_axes and not sides.are_two_commands(argv)
    _reject_early(save_as, markdown, limits if stores_only else {})
    with ExitStack() as stack:
        if rev:
            names, work_trees = sides.revisions(rev), stack.enter_context(WorkTrees())
            pair: tuple[Side, ...] = tuple(sides.revision_side(argv, name, work_trees) for name in names)
        elif plans:
            pair = sides.plan_sides(
                argv, [(name, read_plan(name)) for name in sides.split_pair(plans, "--plan")]
            )
        elif pythons:
            pair = sides.python_sides(argv, pythons)
        elif baseline or stores_only:
            if sides.are_two_commands(argv):
                raise UsageError(
                    "--baseline takes one command, not two; it is compared with the stored runs."
                )
            pair = (Side("now", check_measurable(parse_command(argv))),)
        else:
            pair = sides.command_sides(argv)
        limits["pairs"] = pairs or (MIN_BLAME_PAIRS if limits["blame"] else MIN_PAIRS)
        comparison = _Comparison(pair, facts, budget, job, limits)
        code = comparison.run(baseline, save_as, as_json)
    if markdown is not None and comparison.record.a is not None:
        from flatout.render.compare_page import compare_page
        from flatout.render.markdown import markdown as as_markdown

        _append_markdown(as_markdown(compare_page(comparison.record)), markdown)
    return code


def _reject_early(save_as: str | None, markdown: Path | None, ineffective: dict[str, Any]) -> None:
    """Raise UsageError or StorageError before the measurement for what would fail, or have no effect, after it.

    ``ineffective``: limits that nothing is compared with."""
    without_effect = [f"--{name.replace('_', '-')}" for name, value in ineffective.items() if value]
    if ineffective and markdown is not None:
        without_effect.append("--markdown")
    if without_effect:
        raise UsageError(
            f"--save with one command compares nothing, so {', '.join(without_effect)} would have no effect. "
            "Leave it out, or give --baseline, --rev, --plan or a second command."
        )
    if save_as:
        baselines.baseline_file(save_as)
    if markdown is not None:
        _append_markdown("", markdown)


def _append_markdown(text: str, path: Path) -> None:
    """Append to the file, which may hold the output of other steps. Raises StorageError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. Give --markdown a file in a folder that exists."
        ) from None


class _Comparison:
    """One comparison: measures, evaluates, writes the record and its page."""

    def __init__(
        self, pair: Sequence[Side], facts: Facts, budget_s: float, job: Path | None, limits: dict[str, Any]
    ) -> None:
        self.sides, self.facts, self.budget_s, self.limits = pair, facts, budget_s, limits
        self.folder = writable(job_folder(pair[-1].command, job), job is not None)
        self.record = CompareRecord(**header(pair[-1].command.shown, facts))
        self.key = plan_key(pair[-1].command, facts)
        self.record.machine = {"machine": self.key["machine"], "cores": facts.cores}

    def run(self, baseline: str | None, save_as: str | None, as_json: bool) -> int:
        record, gate, stored = self.record, self.limits["gate"], None
        if baseline:
            stored, record.notes = baselines.load(baseline, self.key, self.limits["any_machine"])
        with (
            saved_on_exit(record, self.folder.path / "compare.json"),
            LiveProgress(Console(stderr=True), self.budget_s) as progress,
        ):
            start_s = seconds()
            timer = PairTimer(self.sides, self.folder, self.facts, progress, self.limits["same_training"])
            timer.records_operators = self.limits["blame"]
            try:
                timer.run(
                    start_s + self.budget_s, stop_rule(gate, timer.records_operators), self.limits["pairs"]
                )
            finally:  # also after Ctrl-C
                if timer.pairs:
                    self._fill(timer.pairs, stored)
            unlike = record.losses.first_difference is not None and stored is None
            repeat = timer.repeat(0) if unlike or self.limits["same_training"] else None
            if unlike:
                self._fill(timer.pairs, None, repeat)
            if timer.records_operators:
                record.blame = blame(timer.pairs, record.step_time)
                if timer.not_recorded:
                    record.notes.append(f"the operators could not be recorded: {timer.not_recorded}")
            if self.limits["same_training"]:
                progress.stage(
                    "guard", "do both learn the same? If bits differ, A runs with rounded products"
                )
                record.training = training_verdict(timer, repeat, self.limits["half"])
            record.seconds, record.status = seconds() - start_s, "done"
            record.disturbance = timer.disturbance.beside
            if timer.one_at_a_time:
                record.notes.append(
                    "the programs did not fit into memory together, so they ran one after the other"
                )
            record.gates = gates(
                record, gate, self.limits["gate_memory"], self.limits["gate_loss"], timer.pair_s
            )
        lines = []
        if save_as:
            b_runs = [pair.b or pair.a for pair in timer.pairs]
            path = baselines.save(save_as, self.sides[-1], self.key, b_runs)
            saved_line = f"baseline: {path} ({len(b_runs)} processes)"
            lines.append(saved_line)
            if as_json:
                click.echo(saved_line, err=True)
        self._show(as_json, lines)
        training = record.training.verdict if record.training is not None else "same"
        if training == "cannot tell":
            return CANNOT_TELL
        return 1 if record.gate_failed or training == "different" else 0

    def _fill(
        self, pairs: Sequence[Pair], stored: Baseline | None, repeat_record: TrialRecord | None = None
    ) -> None:
        """Write what these pairs tell into the record. ``repeat_record``: a second run of A's first seed."""
        record, b_runs = self.record, [pair.b or pair.a for pair in pairs]
        if stored is not None:
            baseline_runs = stored.parsed_runs
            record.baseline = stored.name
            fill_record(
                record, (stored.side(self.sides[0]), self.sides[0]), baseline_runs, b_runs, paired=False
            )
            stored_runs = {run.record.seed: run.record for run in baseline_runs}
            records = [run.record for run in b_runs if run.record.seed in stored_runs]
            run_pairs = [(stored_runs[record.seed], record) for record in records]
        elif len(self.sides) == 2:
            fill_record(record, self.sides, [pair.a for pair in pairs], b_runs)
            run_pairs = [(pair.a.record, pair.b.record) for pair in pairs if pair.b is not None]
        else:
            return
        record.losses = compare_losses([x for x, _ in run_pairs], [y for _, y in run_pairs], repeat_record)

    def _show(self, as_json: bool, lines: list[str]) -> None:
        from flatout.render.compare_page import compare_page

        record = self.record
        if record.a is not None:
            write_page(record, self.folder.path / "compare.html", compare_page(record, lines), as_json)
        elif as_json:  # a single program was stored
            print_json(record)
        else:
            click.echo("\n".join(lines))
