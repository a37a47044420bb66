"""`flatout plan`: show a plan with its evidence and the equivalent code."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.options.arguments import PROGRAM, program_argument, read_plan, require_program
from flatout.cli.options.output import json_option, print_json
from flatout.launch.command import parse_command
from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.render.formatting import shell
from flatout.render.terminal import plan_table
from flatout.schema.enums import Origin
from flatout.schema.errors import PlanError
from flatout.schema.lever import rejection
from flatout.schema.outputs import PlanChoice, PlanRecord
from flatout.schema.plan import Choice, Plan
from flatout.tune.plan_files import SkippedPlan, find_plan, job_folder
from flatout.tune.session import load_session

TEMPLATE = Plan((Choice("malloc", "tcmalloc", Origin.USER), Choice("channels_last", True, Origin.USER)))

INDENT = 4  # of code below its lever


@click.command(context_settings=PROGRAM)
@click.option(
    "--plan",
    "plan_path",
    help="Plan file. The default is the tuned plan of the command, or flatout.toml next to the script.",
)
@click.option("--template", is_flag=True, help="Print a plan to start from.")
@json_option
@program_argument
def command(plan_path: str | None, template: bool, as_json: bool, argv: tuple[str, ...]) -> None:
    """Show a plan: each lever with its value, origin and evidence, and the equivalent lines of code."""
    if template and as_json:
        print_json(_record("", TEMPLATE, {}, {}))
        return
    if template:
        click.echo(TEMPLATE.to_toml(), nl=False)
        return
    path, reasons = Path(plan_path or "flatout.toml"), {}
    if argv and plan_path is None:
        cmd = parse_command(require_program(argv, "plan"))
        job = job_folder(cmd)
        found = find_plan(cmd, look(cmd.argv))
        if found.path is None and found.skipped:
            raise PlanError(_why_no_plan_fits(shell(cmd.shown), found.skipped))
        path = found.path or job.plan
        session = load_session(job)
        levers = session.levers if session else ()
        reasons = {lever.name: lever.reason for lever in levers if lever.status != "applied"}
    if not path.is_file() and plan_path is None:
        raise PlanError(f"there is no plan in {path}. `flatout tune COMMAND...` makes one.")
    plan = read_plan(str(path))
    table = {lever.name: lever for lever in TABLE}
    valid = [c for c in plan if c.name in table and not rejection("", table[c.name].accepts, c.value)]
    code = {c.name: table[c.name].code(c.value) for c in valid}  # a name alone has no value yet
    if as_json:
        print_json(_record(str(path), plan, code, reasons))
        return
    console = Console()
    if not console.is_terminal:  # a file or a pipe: code keeps its lines, so that it can be used as it is
        lines = [line for text in code.values() for line in text.splitlines()]
        console.width = max(console.width, *(len(line) + INDENT for line in lines), 0)
    console.print(plan_table(plan, code, reasons))


def _record(path: str, plan: Plan, code: dict[str, str], reasons: dict[str, str]) -> PlanRecord:
    choices = [
        PlanChoice(c.name, c.value, c.origin.value, c.evidence, code.get(c.name, ""), reasons.get(c.name, ""))
        for c in plan
    ]
    return PlanRecord(path, choices, dict(plan.made_for))


def _why_no_plan_fits(command: str, skipped: Sequence[SkippedPlan]) -> str:
    usable = [entry.path for entry in skipped if entry.usable]
    plan_hint = f"; `flatout plan --plan {usable[0]}` shows that one" if usable else ""
    why = "; ".join(entry.remark.rstrip(".") for entry in skipped)
    return f"no plan fits `{command}`: {why}. `flatout tune {command}` makes one{plan_hint}."
