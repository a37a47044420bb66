"""`flatout profile`: show how a step spends its time and memory."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.options.arguments import PROGRAM, budget_option, program_argument, require_program, writable
from flatout.cli.options.device import apply_device, device_option
from flatout.cli.options.measurement import header, job_option, saved_on_exit
from flatout.cli.options.output import json_option, print_json, warn_untested
from flatout.cli.options.progress import LiveProgress
from flatout.diagnose.profiling import MEMORY_STAGES, ProfiledProgram, ProfileOptions, run_profile
from flatout.job.folder import JobFolder, write_atomically
from flatout.launch.command import Command, check_measurable, parse_command
from flatout.probe.machine import look
from flatout.schema.errors import UsageError
from flatout.schema.facts import Facts
from flatout.schema.profile import ProfileRecord
from flatout.tune.plan_files import job_folder

MIN_BUDGET_S = 5.0
MEMORY_FACTOR = 3  # times as many steps with --memory


class Schedule(click.ParamType):
    """A profiler schedule (``1,2,3``): the numbers of wait, warm-up and active steps."""

    name = "wait,warmup,active"

    def convert(self, value: object, param: object, ctx: object) -> tuple[int, int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*(0*[1-9]\d*)\s*", str(value), re.ASCII)
        if match is None:
            self.fail(
                f"{value!r} is not a schedule; write the numbers of wait, warm-up and active steps (at least 1 active), as in 1,2,3"
            )
        return int(match[1]), int(match[2]), int(match[3])


@click.command(context_settings=PROGRAM)
@click.option(
    "--steps",
    default=40,
    show_default=True,
    type=click.IntRange(1),
    help="Unprofiled steps to measure times from.",
)
@click.option(
    "--schedule",
    default="1,2,3",
    show_default=True,
    type=Schedule(),
    help="Profiler schedule: numbers of wait, warm-up and active steps.",
)
@budget_option("30s", "Time to spend in steady state; what-ifs use the remaining time.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the trace of the profiled steps to this file (Chrome, Perfetto).",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the figures as a TensorBoard log into this folder.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Profile memory only, over three times as many steps; no operators, no what-ifs.",
)
@job_option
@json_option
@device_option
@program_argument
def command(
    steps: int,
    schedule: tuple[int, int, int],
    budget: float,
    trace: Path | None,
    tensorboard: Path | None,
    memory: bool,
    job: Path | None,
    as_json: bool,
    device: str | None,
    argv: tuple[str, ...],
) -> int:
    """Show how a step of an unchanged program spends its time and memory.

    flatout starts the program, measures unprofiled steps, and profiles a few more. It then removes one cost
    at a time, although this makes the results wrong: it repeats one batch, or skips the optimizer. These
    what-ifs show the speed-up from fixing each bottleneck. Then flatout stops the program. It does not touch
    the program's files."""
    if budget < MIN_BUDGET_S:
        raise UsageError(
            f"a budget of {budget:g} s cannot measure anything; give at least {MIN_BUDGET_S:g} s, as in --budget 30s."
        )
    if memory and trace is not None:
        raise UsageError(
            "--memory profiles no operators, so there is no trace to write. Remove --trace or --memory."
        )
    if tensorboard is not None and find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard, which is not installed here. Run `pip install tensorboard`, or remove the option."
        )
    cmd = check_measurable(parse_command(require_program(argv, "profile")))
    apply_device(device, cmd, "profile")
    folder = writable(job_folder(cmd, job), job is not None)
    options = ProfileOptions(steps, schedule, budget, trace=str(trace.resolve()) if trace is not None else "")
    if memory:
        options = replace(options, stages=MEMORY_STAGES, leak_ticks=MEMORY_FACTOR * options.leak_ticks)
    record = profile(cmd, folder, warn_untested(look(cmd.argv)), options)
    if tensorboard is not None:
        write_log(record, tensorboard)
    if as_json:
        print_json(record)
        return 0
    from flatout.render.profile_page import profile_page
    from flatout.render.terminal import print_page

    console = Console()
    print_page(console, profile_page(record))
    files = {"record": folder.profile, "page": folder.profile_page, "trace": trace, "log": tensorboard}
    lines = [f"{name}: {path}" for name, path in files.items() if path is not None]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return 0


def profile(cmd: Command, folder: JobFolder, facts: Facts, options: ProfileOptions) -> ProfileRecord:
    """Run a profile, and write its record and page to the folder. Raises FlatoutError, KeyboardInterrupt."""
    from flatout.measure.ceilings import load
    from flatout.render.page import html
    from flatout.render.profile_page import profile_page

    record = ProfileRecord(**header(cmd.shown, facts), machine=facts.description)
    ceilings = load(facts, "cuda" if facts.cuda else "cpu") or {}  # of `flatout doctor --bench`
    with (
        saved_on_exit(record, folder.profile) as save,
        LiveProgress(Console(stderr=True), options.budget_s) as progress,
    ):
        run_profile(ProfiledProgram(cmd, folder, facts, options, record, ceilings, progress, save))
    write_atomically(folder.profile_page, html(profile_page(record)))
    return record


def write_log(profile: ProfileRecord, folder: Path) -> None:
    """Write one event file into ``folder``.

    Raises ImportError without tensorboard, and OSError if the folder cannot be written."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(folder))
    try:
        for step, tag, value in _scalars(profile):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            writer.add_event(Event(step=step, summary=summary))
    finally:
        writer.close()


def _scalars(profile: ProfileRecord) -> Iterator[tuple[int, str, float]]:
    """Yield step, tag and value of each point. For memory, step is microseconds since the step began."""
    for step, ms in enumerate(profile.step_ms_list):
        yield step, "step_ms", ms
    for name, phase in profile.phases.items():
        yield 0, f"phases/{name}_ms", phase.median_ms
    for what_if in profile.what_ifs:
        if what_if.ratio is not None:
            yield 0, f"what_ifs/{what_if.name}", what_if.ratio.median
    for point in profile.memory.timeline if profile.memory is not None else ():
        for kind, amount in point.kinds.items():
            yield round(1000 * point.ms), f"memory/{kind}_bytes", amount
    for step, leaked in enumerate(profile.tensor_growth.series if profile.tensor_growth is not None else ()):
        yield step, "memory/after_each_step_bytes", leaked
