"""`flatout check`: find mistakes that raise no error, in a run of the program and in its source."""

import os
import re
from collections.abc import Collection, Sequence

import click
from rich.console import Console

from flatout.cli.options.arguments import PROGRAM, budget_option, complete_files, writable
from flatout.cli.options.configuration import ignored
from flatout.cli.options.output import json_option, print_json, warn_untested
from flatout.cli.options.progress import LiveProgress
from flatout.cli.options.scripts import command_of, is_command, read_program, rule_options
from flatout.diagnose.check import check, sort_key
from flatout.diagnose.observed_run import ObservedRun, observe_twice
from flatout.diagnose.rule import Rule
from flatout.diagnose.rules import TABLE
from flatout.diagnose.rules.ignore_without_effect import RULE as UNUSED
from flatout.job.sanitize import masked
from flatout.launch.command import check_measurable, parse_command
from flatout.probe.machine import look
from flatout.probe.program import ScriptProgram
from flatout.render.findings import finding_lines, github_lines, summary
from flatout.render.formatting import shell
from flatout.schema.errors import UsageError
from flatout.schema.findings import Finding
from flatout.schema.outputs import FindingsRecord, Page, PagesRecord
from flatout.tune.plan_files import job_folder


@click.command(context_settings=PROGRAM)
@rule_options
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "github"]),
    default="text",
    show_default=True,
    help="Output format of the findings.",
)
@json_option
@budget_option("30s", "Time to observe the program, from its first backward pass on.")
@click.option("--no-run", is_flag=True, help="Do not start the program: only read its source.")
@click.option(
    "--each",
    "separately",
    is_flag=True,
    help="Check every FILE that follows as a script; report findings in these files only.",
)
@click.option("--explain", metavar="CODE", help="Show the page of a rule; `all` lists the rules.")
@click.argument(
    "argv",
    metavar="SCRIPT | COMMAND... | FILES",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=complete_files,
)
def command(
    argv: tuple[str, ...],
    select: list[str],
    ignore: list[str],
    output_format: str,
    as_json: bool,
    budget: float,
    no_run: bool,
    separately: bool,
    explain: str | None,
) -> int:
    """Find mistakes that raise no error: wrong results, wasted time, wasted memory, fragile code.

    `flatout check python train.py` runs the program for up to 30 s, and holds what it does against facts of correct
    training. It changes no file of yours. `flatout check train.py` runs nothing: it reads the file, and the modules
    that it imports from its own folder. The comment `# flatout: ignore FL012` disables a rule on its line.

    The exit code is 0 without findings, 1 with findings, 2 for a usage error."""
    if as_json and output_format != "text":
        raise UsageError(f"--json and --format {output_format} cannot be printed at once. Give one of them.")
    output_format = "json" if as_json else output_format
    if explain is not None:
        _explain(explain.upper(), output_format)
        return 0
    programs = [read_program((word,)) for word in argv] if separately and argv else [read_program(argv)]
    run = None
    if separately:
        findings = _check_separately(programs, select, ignore)
    else:
        if not no_run and is_command(argv):
            run = observe_program(argv, budget, programs[0])
        ignore = [*ignore, *ignored()]
        findings = check(programs[0], select, ignore, run.findings if run is not None else ())
    unread = list(dict.fromkeys(note for program in programs for note in program.unread))
    files = list(dict.fromkeys(source.path for program in programs for source in program.sources))
    notes = run.notes if run is not None else []
    error = run.error if run is not None else None
    if output_format == "text":
        console = Console(highlight=False, soft_wrap=True)
        for note in (*(f"not read: {note}" for note in unread), *notes):
            click.echo(f"flatout: {note}", err=True)
        console.print(finding_lines(findings, titles={rule.code: rule.title for rule in TABLE}))
        argv = argv[:1] if separately else argv
        command = argv if len(argv) > 1 and not argv[0].startswith("-m") else ("python", *argv)
        command_text = "python train.py" if argv[-1].endswith(".ipynb") else shell(masked(command))
        if findings or error is None:
            console.print(summary(findings, len(files), command_text, run.scope if run is not None else ""))
    elif output_format == "github":
        click.echo("\n".join(github_lines(findings)), nl=bool(findings))
    else:
        seen = (run.steps, run.passes) if run is not None else (0, 0)
        why = [str(error).partition("\n")[0]] if error is not None else []
        print_json(FindingsRecord(files, unread, findings, *seen, [*notes, *why]))
    if error is not None:
        raise error
    return 1 if findings else 0


def _check_separately(
    programs: Sequence[ScriptProgram], select: Collection[str], ignore: Collection[str]
) -> list[Finding]:
    """Check each file as a script; return the findings in these files, each once.

    The modules that a file imports give context, but are reported only if they are among the files."""
    checked_paths = {os.path.realpath(program.main.path) for program in programs}
    # A file is read without the scripts that import it, in which its comments may have an effect.
    ignored = [*ignore, *([] if UNUSED.code in select else [UNUSED.code])]
    findings: dict[tuple[object, ...], Finding] = {}
    for program in programs:
        for finding in check(program, select, ignored):
            place = finding.place
            file = re.sub(r"\[\d+\]$", "", place.file) if place is not None else program.main.path
            if os.path.realpath(file) in checked_paths:
                position = (place.line, place.column, place.file.removeprefix(file)) if place else ()
                findings.setdefault((finding.rule, os.path.realpath(file), *position), finding)
    return sorted(findings.values(), key=sort_key)


def observe_program(argv: tuple[str, ...], budget_s: float, program: ScriptProgram) -> ObservedRun:
    """Run the program under the invariants. Paths of the findings are relative to this folder."""
    command = check_measurable(parse_command(command_of(argv)))
    job, facts = writable(job_folder(command), False), warn_untested(look(command.argv))
    with LiveProgress(Console(stderr=True), budget_s) as progress:
        run = observe_twice(command, job, facts, budget_s, program, progress)
    for finding in run.findings:
        for place in (finding.place, *finding.others):
            if place is not None:
                place.file = os.path.relpath(place.file)
    return run


def _explain(code: str, output_format: str) -> None:
    rules = list(TABLE) if code == "ALL" else [_rule(code)]
    if output_format == "json":
        print_json(PagesRecord([Page(rule.code, rule.name, rule.page.strip()) for rule in rules]))
    elif code == "ALL":
        click.echo("\n".join(f"{rule.code}  {rule.severity.value:13}  {rule.title}" for rule in rules))
    else:
        (rule,) = rules
        text = f"{rule.code} {rule.name} ({rule.severity.value})\n\n{rule.page.strip()}"
        click.echo(text.replace("  # <-", "  # <- here"))


def _rule(code: str) -> Rule:
    rule = next((rule for rule in TABLE if rule.code == code or rule.name.upper() == code), None)
    if rule is None:
        raise UsageError(f"no rule is called {code!r}. `flatout check --explain all` lists them.")
    return rule
