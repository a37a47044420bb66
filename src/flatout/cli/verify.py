"""`flatout verify`: run a confirmed plan again, and compare it with its certificate."""

import os
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.options.arguments import PROGRAM, program_argument, read_plan, writable
from flatout.cli.options.device import apply_device
from flatout.cli.options.output import json_option, print_json, stop_on_sigterm, warn_untested
from flatout.cli.options.progress import LiveProgress
from flatout.job.folder import read_json
from flatout.job.sanitize import MASK, sanitize
from flatout.job.trust import distrusted
from flatout.launch.command import check_measurable, parse_command
from flatout.levers import checked
from flatout.probe.machine import look
from flatout.render.formatting import shell
from flatout.schema.errors import MALFORMED, PlanError, UsageError
from flatout.schema.plan import Plan
from flatout.schema.session import CERTIFICATE_SCHEMA, CertificateRecord, SessionRecord, VerificationRecord
from flatout.tune.budget import LONGER_BUDGET_S
from flatout.tune.goal import Goal
from flatout.tune.plan_files import certificate_beside, job_folder, plan_key
from flatout.tune.tuning import Tuning
from flatout.tune.verify import FAILED, NOT_CHECKED, compare_certificates, verify


@click.command(context_settings=PROGRAM)
@json_option
@click.argument("plan_path", metavar="[PLAN]", default="flatout.toml", type=click.Path(path_type=Path))
@program_argument
def command(plan_path: Path, as_json: bool, argv: tuple[str, ...]) -> int:
    """Run a tuned plan again, and check each claim of its certificate.

    PLAN is flatout.toml, with flatout.certificate.json beside it, or a certificate alone. Give COMMAND if its
    paths differ here. The exit code is 1 if a claim fails or could not be checked."""
    alone = plan_path.suffix == ".json"
    path = plan_path if alone else certificate_beside(plan_path)
    old = _read(path)
    plan = checked(Plan.from_json(old.plan), path) if alone else read_plan(str(plan_path))
    if not len(plan):
        raise PlanError(f"{plan_path} has no lever to verify. Run `flatout tune` again.")
    if not argv and MASK in " ".join(old.command):
        raise UsageError(
            f"the certificate has no secrets and paths of its machine: {shell(old.command)}. Give them: `flatout verify {plan_path} COMMAND...`."
        )
    words = argv or [word.replace("~/", os.path.expanduser("~/")) for word in old.command]
    cmd = check_measurable(parse_command(words))
    apply_device(old.key.get("device"), cmd, "verify")
    facts, job = warn_untested(look(cmd.argv)), writable(job_folder(cmd), False)
    session = SessionRecord(list(cmd.shown), os.getcwd(), plan_key(cmd, facts))
    stop_on_sigterm()
    with LiveProgress(Console(stderr=True), LONGER_BUDGET_S) as progress:
        progress.report(f"running {shell(cmd.shown)}")
        goal = Goal(None, only_levers=frozenset(plan.names))
        lines = verify(Tuning(cmd, job, facts, session, goal, progress), plan, old)
    holds = not any(line.status in (FAILED, NOT_CHECKED) for line in lines)
    if as_json:
        print_json(VerificationRecord(holds, lines))
    for line in () if as_json else lines:
        click.echo(f"{line.status:11}  {line.name:21}  {sanitize(line.why)}")
    return 0 if holds else 1


def _read(path: Path) -> CertificateRecord:
    if why := distrusted(path):
        raise PlanError(f"{path} names a command to run, and is not trusted: {why}. Copy it.")
    try:
        data = read_json(path)
        old = CertificateRecord.from_json(data)
        list(compare_certificates(old, old))  # raises if a field has another type
        runs = min(run.warmup_steps + run.steps for run in (*old.plain, *old.tuned))
        if data["schema"] == CERTIFICATE_SCHEMA and runs > 0:
            return old
    except MALFORMED:
        pass
    raise PlanError(
        f"{path} is missing, or is no certificate of this flatout. `flatout tune COMMAND...` writes it when it confirms a plan of one process."
    )
