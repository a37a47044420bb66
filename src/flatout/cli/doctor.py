"""`flatout doctor`: check whether this machine is ready to train."""

import click
from rich.console import Console
from rich.text import Text

from flatout.cli.options.output import json_option, print_json
from flatout.diagnose.doctor.snapshot import SnapshotTaker
from flatout.schema.errors import UsageError
from flatout.schema.machine_snapshot import CeilingsRecord, Verdict
from flatout.schema.outputs import DoctorRecord

QUOTE_LIMIT_S = 120.0  # collect_env lists the packages of pip and conda


@click.command()
@click.option(
    "--bench", is_flag=True, help="Also measure the machine's peak rates (about 30 s), for `flatout profile`."
)
@click.option(
    "--all",
    "quotes",
    is_flag=True,
    help="Also quote torch.utils.collect_env and nvidia-smi -q: clocks, power, ECC, NVLink, MIG, versions.",
)
@json_option
def command(bench: bool, quotes: bool, as_json: bool) -> int:
    """Check whether this machine is ready to train.

    Shows each problem, why it matters, and the command that fixes it. Works even if torch is broken or
    missing. The exit code is 1 if there is a problem."""
    if quotes and as_json:
        raise UsageError("--all quotes texts, which are no JSON. Run it without --json.")
    # the status is shown only on a terminal
    with (
        SnapshotTaker() as taker,
        Console(stderr=True).status("inspecting this machine; importing torch in a child process"),
    ):
        # Imported while the child imports torch, which takes the longest.
        from flatout.diagnose.doctor.checks import run_checks
        from flatout.render.doctor import doctor_page

        snapshot = taker.take()
    checks = run_checks(snapshot)
    console = Console(highlight=False)
    if not as_json:
        console.print(doctor_page(checks), crop=False)
    if quotes:
        _quote(console)
    ceilings = _bench(console, as_json) if bench else None
    if as_json:
        print_json(DoctorRecord(snapshot, checks, ceilings))
    return int(any(check.verdict == Verdict.PROBLEM for check in checks))


def _quote(console: Console) -> None:
    """Print what PyTorch and the driver themselves report of the machine."""
    from flatout.job.interpreter import program_python
    from flatout.launch.process import TimedCommand

    for command in (
        [program_python(), "-m", "torch.utils.collect_env"],
        ["nvidia-smi", "-q"],
        ["nvidia-smi", "topo", "-m"],
    ):
        timed_command = TimedCommand(command)
        console.print(Text(f"\n{' '.join(command)}", style="bold"), soft_wrap=True)
        console.print(Text(timed_command.result(QUOTE_LIMIT_S).output or "no answer"), soft_wrap=True)


def _bench(console: Console, quiet: bool) -> CeilingsRecord:
    from flatout.diagnose.doctor.ceilings import measure
    from flatout.measure.ceilings import save
    from flatout.probe.machine import look
    from flatout.render.doctor import ceilings_table

    def report(command: str) -> None:
        if not quiet:
            console.print(Text(f"measuring: {command}", style="dim"))

    record = measure(look(), report)
    path = save(record)
    if not quiet:
        console.print(ceilings_table(record), crop=False)
        console.print(Text(str(path), style="dim"), soft_wrap=True)
    return record
