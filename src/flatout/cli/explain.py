"""`flatout explain`: explain an error, locate it in your code, and show the fix."""

import io
import os
import re
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from flatout.cli.options.output import json_option, print_json
from flatout.diagnose.explain import Explanation, explain_text, format_lines
from flatout.diagnose.failures import TABLE
from flatout.diagnose.kind import FailureKind
from flatout.diagnose.logs import condense
from flatout.schema import outputs
from flatout.schema.errors import UsageError

CODE = re.compile(r"FE\d{3}")
EXIT_UNKNOWN = 1
MAX_LOG_BYTES = 1 << 27  # read from a log; only the end of a longer one
USAGE = """give the error's text, a file, or - for standard input:
  flatout explain train.log
  flatout explain "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)"
  python train.py 2>&1 | tee train.log | flatout explain -
  flatout explain FE020                      the page of one kind of failure"""


@click.command()
@click.argument("inputs", metavar="[ERROR TEXT|FILE|-|FE...]", nargs=-1)
@json_option
@click.option("--list", "all_kinds", is_flag=True, help="List the kinds of failure that flatout knows.")
def command(inputs: tuple[str, ...], as_json: bool, all_kinds: bool) -> int:
    """Explain an error: the cause in one sentence, the line in your own code, and the fix.

    Takes a traceback or a log, of one process or of many ranks. In a log without an exception it finds a loss
    that is NaN. The exit code is 0 if flatout knows the error and 1 if it does not; it never guesses."""
    if all_kinds:
        text = "\n".join(f"{kind.code}  {kind.page.strip().splitlines()[0]}" for kind in TABLE)
        return _show_pages(TABLE, text, as_json)
    if len(inputs) == 1 and CODE.fullmatch(inputs[0]):
        kind = _kind(inputs[0])
        return _show_pages([kind], f"{kind.code} {kind.name}\n\n{kind.page.strip()}", as_json)
    explanations = explain_text(_text(inputs))
    if as_json:
        records = [outputs.Explanation(**vars(each.finding), ranks=each.ranks) for each in explanations]
        print_json(outputs.ExplanationsRecord(records))
    elif explanations:
        click.echo("\n\n".join(map(_paragraph, explanations)))
    else:
        click.echo(
            "flatout does not know this failure, and it does not guess. `flatout explain --list` lists the failures that it knows."
        )
    return 0 if explanations else EXIT_UNKNOWN


def _text(inputs: tuple[str, ...]) -> str:
    if not inputs and sys.stdin.isatty():
        raise UsageError(USAGE)
    if not inputs or inputs == ("-",):
        return condense(io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace"))
    if len(inputs) == 1 and inputs[0].endswith(".json"):
        raise UsageError(
            f"{inputs[0]} is a record, not a log. Its page lies beside it (.html) and shows what is slow. Give a log, an error's text, or -."
        )
    if len(inputs) == 1 and _is_path(inputs[0]):
        try:
            with open(inputs[0], "rb") as file:
                stats = os.fstat(file.fileno())
                if stat.S_ISCHR(stats.st_mode) or stat.S_ISBLK(stats.st_mode):
                    raise UsageError(
                        f"{inputs[0]} is a device and may never end. Give a log, an error's text, or - for standard input."
                    )
                if stats.st_size > MAX_LOG_BYTES:
                    file.seek(-MAX_LOG_BYTES, os.SEEK_END)
                return condense(io.TextIOWrapper(file, encoding="utf-8", errors="replace"))
        except OSError as error:
            raise UsageError(
                f"{inputs[0]} cannot be read: {error.strerror}. Give a log, an error's text, or - for standard input."
            ) from None
    return " ".join(inputs)


def _is_path(text: str) -> bool:
    """Return whether the word names a file or was meant to: an error's text has spaces or a colon."""
    try:
        if Path(text).exists():
            return True
    except (OSError, ValueError):  # too long for a file name
        return False
    return not re.search(r"[\s:]", text) and bool(re.search(r"/|\.(?:log|txt|out|err)$", text))


def _paragraph(explanation: Explanation) -> str:
    first, *others = format_lines(explanation.finding, explanation.ranks)
    return "\n".join([f"{explanation.finding.rule} {explanation.finding.name}: {first}", *others])


def _show_pages(kinds: Iterable[FailureKind], text: str, as_json: bool) -> int:
    if as_json:
        pages = [outputs.Page(kind.code, kind.name, kind.page.strip()) for kind in kinds]
        print_json(outputs.PagesRecord(pages))
    else:
        click.echo(text)
    return 0


def _kind(code: str) -> FailureKind:
    kind = next((kind for kind in TABLE if kind.code == code), None)
    if kind is None:
        raise UsageError(
            f"there is no kind {code}. The codes range from {TABLE[0].code} to {TABLE[-1].code}; `flatout explain --list` lists them."
        )
    return kind
