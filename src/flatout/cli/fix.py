"""`flatout fix`: edit the script where a finding has a certain fix."""

from codecs import BOM_UTF8
from pathlib import Path

import click

from flatout.cli.options.arguments import PROGRAM, complete_files
from flatout.cli.options.output import json_option, notify, print_json
from flatout.cli.options.scripts import read_program, rule_options
from flatout.diagnose.check import check
from flatout.diagnose.fix import fixes
from flatout.diagnose.rules import TABLE
from flatout.job.folder import write_atomically
from flatout.render.formatting import plural
from flatout.schema.errors import StorageError
from flatout.schema.findings import Finding
from flatout.schema.outputs import FixedFile, FixesRecord

CHANGES = {rule.code: rule.fix_changes for rule in TABLE}


@click.command(context_settings=PROGRAM)
@rule_options
@click.option("--diff/--apply", "only_diff", default=True, help="Show the edits (default), or write them.")
@click.option("--all", "all_edits", is_flag=True, help="Also edits that change what the program learns.")
@json_option
@click.argument(
    "argv", metavar="SCRIPT | COMMAND...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files
)
def command(
    argv: tuple[str, ...],
    select: list[str],
    ignore: list[str],
    only_diff: bool,
    all_edits: bool,
    as_json: bool,
) -> int:
    """Edit a script where `flatout check` has a certain fix.

    Without --apply it prints a diff and changes nothing. It reads the script or notebook, and the modules it
    imports from its own folder. All losses stay the same, bit for bit. With --all it also makes edits that change what the
    program learns, such as a missing call, and says what they change. Findings without a certain fix stay
    advice: `flatout check` shows them.

    The exit code is 0 without edits or after --apply, 1 if there are edits to apply, 2 for a usage error."""
    program = read_program(argv, "fix")
    findings = check(program, select, ignore)
    selected = [finding for finding in findings if all_edits or not CHANGES[finding.rule]]
    changed = fixes(program, selected)
    if not only_diff:
        for file, text in changed:
            if file.fixed:
                _write(Path(file.file), text)
    files = [file for file, _ in changed]
    advice = [finding for finding in findings if not finding.edits]
    if as_json:
        print_json(FixesRecord(not only_diff, files, advice))
    else:
        if only_diff:
            click.echo("".join(file.diff for file in files), nl=False)
        _report(files, only_diff)
        if withheld := [finding for finding in findings if finding.edits and finding not in selected]:
            notify(
                f"{plural(len(withheld), 'finding')} would change what the program learns when fixed: add --all"
            )
        if advice:
            notify(f"{plural(len(advice), 'finding')} without a certain fix: flatout check")
    return 1 if only_diff and any(file.fixed for file in files) else 0


def _report(files: list[FixedFile], only_diff: bool) -> None:
    for finding in (finding for file in files for finding in file.fixed):
        changes = CHANGES[finding.rule]
        effect = f"changes: {changes}" if changes else "losses stay the same, bit for bit"
        click.echo(f"{_location(finding)}: {finding.message}; {effect}", err=True)
    for finding in (finding for file in files for finding in file.not_fixed):
        why = "its edit overlaps another, or the notebook is not as Jupyter saves it: save it there"
        if not finding.place or ".ipynb" not in finding.place.file:
            why = "its edit overlaps another"
        click.echo(f"{_location(finding)}: not fixed, {why}; run the command again", err=True)
    count = sum(len(file.fixed) for file in files)
    counted = plural(count, "finding")
    summary = f"{counted} can be fixed: add --apply" if only_diff else f"fixed {counted}"
    notify(summary if count else "nothing to fix")


def _location(finding: Finding) -> str:
    place = finding.place
    return f"{place.file}:{place.line}: {finding.rule}" if place is not None else finding.rule


def _write(path: Path, text: str) -> None:
    """Replace the text of a file; keep its mode, its encoding and links to it. Raises StorageError."""
    real = path.resolve()
    try:
        mode, has_bom = real.stat().st_mode, real.read_bytes().startswith(BOM_UTF8)
        write_atomically(real, "\N{ZERO WIDTH NO-BREAK SPACE}" * has_bom + text)
        real.chmod(mode)
    except (OSError, StorageError) as error:
        why = error.__cause__ or error
        raise StorageError(
            f"{path} was not edited: {why}. Apply the diff yourself: flatout fix {path}."
        ) from None
