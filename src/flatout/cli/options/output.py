"""`--json`: print one JSON document on standard output. What is for people goes to standard error."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from flatout.job.sanitize import sanitize

if TYPE_CHECKING:
    from flatout.schema.facts import Facts
    from flatout.schema.records import Record


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` to a command, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON record.")(function)


def print_json(data: Record | dict[str, Any]) -> None:
    """Print a record. A number that is not finite becomes null, because JSON has none."""
    table = data if isinstance(data, dict) else data.to_json()
    click.echo(json.dumps(_finite(table), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def notify(sentence: str) -> None:
    sys.stderr.write(f"flatout: {sanitize(sentence)}\n")


notify_once = cache(notify)


def warn_untested(facts: Facts) -> Facts:
    """Return the facts; a torch that is newer than the tested ones is named once."""
    from flatout.schema.facts import untested_torch

    if sentence := untested_torch(facts.versions.get("torch", "")):
        notify_once(sentence)
    return facts


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


def stop_on_sigterm() -> None:
    """Raise Terminated in the main thread when SIGTERM arrives."""

    def stop(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
