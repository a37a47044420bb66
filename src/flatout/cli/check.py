"""`flatout check`: find mistakes that raise no error, in the source and, with --run, in a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.options.arguments import PROGRAM, Duration, complete_files, words_or_usage, writable
from flatout.cli.options.each_script import findings_of_each
from flatout.cli.options.json_output import json_option, print_json
from flatout.cli.profile import SHORTEST_S, profile
from flatout.diagnose.check import check
from flatout.diagnose.profiled_program import ProfileOptions
from flatout.diagnose.rule import Rule
from flatout.diagnose.rules import TABLE
from flatout.job.secrets import masked
from flatout.launch.command import understand
from flatout.probe.machine import look
from flatout.probe.program import ScriptProgram
from flatout.probe.script import Unreadable
from flatout.render.findings import finding_lines, github_lines, sarif_text, summary
from flatout.render.formatting import shell
from flatout.schema.errors import ProgramNotFound, UsageError
from flatout.schema.findings import Finding
from flatout.schema.outputs import FindingsRecord, Page, PagesRecord
from flatout.tune.session import job_folder

FORMATS = ("text", "json", "github", "sarif")


def codes(ctx: object, option: object, value: tuple[str, ...]) -> list[str]:
    return [code.strip().upper() for each in value for code in each.split(",") if code.strip()]


@click.command(context_settings=PROGRAM)
@click.option(
    "--select",
    multiple=True,
    callback=codes,
    metavar="CODES",
    help="Check only these rules: FL012, or FL1 for all rules with this prefix.",
)
@click.option("--ignore", multiple=True, callback=codes, metavar="CODES", help="Skip these rules.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="Output format of the findings.",
)
@json_option
@click.option(
    "--run",
    "run_s",
    type=Duration(),
    help="Also run the program for this long in steady state, and check the measured rules.",
)
@click.option(
    "--each",
    is_flag=True,
    help="Check every FILE that follows as a script; report findings in these files only.",
)
@click.option("--explain", metavar="CODE", help="Show the page of a rule; `all` lists the rules.")
@click.argument(
    "words",
    metavar="SCRIPT | COMMAND... | FILES",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=complete_files,
)
def command(
    words: tuple[str, ...],
    select: list[str],
    ignore: list[str],
    form: str,
    as_json: bool,
    run_s: float | None,
    each: bool,
    explain: str | None,
) -> int:
    """Find mistakes that raise no error: wrong results, wasted time, wasted memory, fragile code.

    Reads a script, a notebook, or the script that a command starts, and the modules it imports from its own
    folder. The program runs only with --run, which adds the measured rules and keeps a profile as
    `flatout profile` does. The comment `# flatout: ignore FL012` disables a rule on its line.

    The exit code is 0 without findings, 1 with findings, 2 for a usage error.
    """
    form = "json" if as_json else form
    if explain is not None:
        _explain(explain.upper(), form)
        return 0
    if each and run_s is not None:
        raise UsageError("--each checks files that are not run. Remove --run, or check one command.")
    programs = [read((word,)) for word in words] if each and words else [read(words)]
    if each:
        found = findings_of_each(programs, select, ignore)
    else:
        found = check(programs[0], select, ignore, ran(words, run_s) if run_s is not None else ())
    unread = list(dict.fromkeys(note for program in programs for note in program.unread))
    files = list(dict.fromkeys(source.path for program in programs for source in program.sources))
    if form == "text":
        console = Console(highlight=False, soft_wrap=True)
        for note in unread:
            click.echo(f"flatout: not read: {note}", err=True)
        console.print(finding_lines(found, titles={rule.code: rule.title for rule in TABLE}))
        words = words[:1] if each else words
        command = words if len(words) > 1 and words[0] != "-m" else ("python", *words)
        shown = "python train.py" if words[-1].endswith(".ipynb") else shell(masked(command))
        console.print(summary(found, len(files), shown, run_s is not None))
    elif form == "github":
        click.echo("\n".join(github_lines(found)), nl=bool(found))
    elif form == "json":
        print_json(FindingsRecord(files, unread, found))
    else:
        rules = [
            (
                rule.code,
                rule.name,
                rule.title,
                rule.section("What"),
                rule.section("How to fix it"),
                rule.severity.value,
            )
            for rule in TABLE
        ]
        click.echo(sarif_text(found, rules))
    return 1 if found else 0


def ran(words: tuple[str, ...], run_s: float) -> list[Finding]:
    """Run the program and return the findings of the measured rules, with paths relative to this folder."""
    if run_s < SHORTEST_S:
        raise UsageError(
            f"a run of {run_s:g} s cannot measure anything; give at least {SHORTEST_S:g} s, as in --run 60s."
        )
    cmd = understand(("python", *words) if words[0] == "-m" else words)
    found = profile(cmd, writable(job_folder(cmd), False), look(), ProfileOptions(budget_s=run_s)).findings
    return [
        replace(
            finding, place=finding.place and replace(finding.place, file=os.path.relpath(finding.place.file))
        )
        for finding in found
    ]


def read(words: tuple[str, ...], name: str = "check") -> ScriptProgram:
    """Return the program that a command line starts. ``name``: the flatout command, for messages.

    Raises UsageError if its source is missing or unreadable."""
    if not words:
        raise UsageError(
            f"no program was given. Try `flatout {name} train.py`, or `flatout {name} python train.py --lr 0.1`."
        )
    if words[0] != "-m":
        words_or_usage(words, name)
    script, module = _script(words)
    try:
        return ScriptProgram.read(script, Path.cwd() if module else None)
    except Unreadable as error:
        raise UsageError(f"{error}. `flatout {name}` reads Python source; nothing was checked.") from None
    except FileNotFoundError:
        raise UsageError(
            f"no script {str(script)!r} here. Check the path, or change to the script's folder."
        ) from None
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror or error}.") from None


def _script(words: tuple[str, ...]) -> tuple[Path, bool]:
    first = Path(words[0])
    if words[0] == "-m":
        words = ("python", *words)
    elif first.suffix in (".py", ".ipynb") or first.is_dir() or (first.is_file() and len(words) == 1):
        return first, False
    try:
        understood = understand(words)
    except ProgramNotFound as error:
        raise UsageError(str(error)) from None
    if understood.script is None:
        what = (
            f"module {understood.module!r} has no file below this folder"
            if understood.module
            else f"`{' '.join(words)}` names no Python file"
        )
        raise UsageError(f"{what}, so there is nothing to check. Give the script: `flatout check train.py`.")
    if (
        understood.script.suffix == ""
        and understood.script.is_file()
        and understood.script.read_bytes()[:2] == b"#!"
        and b"python" not in understood.script.open("rb").readline()
    ):
        raise UsageError(
            f"{understood.script} is not a Python script. Give the script that it starts: `flatout check train.py`."
        )
    return understood.script, understood.module is not None


def _explain(code: str, form: str) -> None:
    """Print the page of a rule, or the list of all rules."""
    rules = list(TABLE) if code == "ALL" else [_rule(code)]
    if form == "json":
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
