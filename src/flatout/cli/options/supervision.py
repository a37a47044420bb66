"""The supervision options of `flatout run`, and the command that starts the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from flatout.cli.options.grouped import survival_option
from flatout.launch.command import Command
from flatout.render.formatting import shell
from flatout.schema.errors import UsageError

RESTARTS, GRACE_S, HANG_S = 20, 10.0, 600.0
HOME = Path(__file__).resolve().parents[3]


def options(duration: click.ParamType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the supervision options. ``duration`` parses 90s, 5m, 1h."""
    given = (
        survival_option(
            "--supervise",
            is_flag=True,
            help="Monitor the program: end it if it hangs, restart it from its newest checkpoint (--restarts).",
        ),
        survival_option(
            "--restarts",
            default=None,
            type=click.IntRange(0),
            help=f"Most restarts, with --supervise.  [default: {RESTARTS}]",
        ),
        survival_option(
            "--grace",
            default=None,
            type=duration,
            help=f"Time for a last checkpoint after SIGTERM, with --supervise.  [default: {GRACE_S:g}s]",
        ),
        survival_option(
            "--hang-after",
            default=None,
            type=duration,
            help="Time without a step, a backward pass, a batch or a checkpoint that counts as a hang, with --supervise.  [default: 10m]",
        ),
        survival_option(
            "--on-nan",
            default=None,
            type=click.Choice(["ignore", "stop"]),
            help="Reaction to a NaN or infinite loss, with --supervise.  [default: ignore]",
        ),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(given):
            command = option(command)
        return command

    return add


@dataclass(frozen=True)
class Supervision:
    """The supervision options of a command line; ``asked`` is whether --supervise is given."""

    asked: bool
    restarts: int
    grace_s: float
    hang_after_s: float
    on_nan: str

    def over(self, command: Command, incidents: Path) -> Command:
        """Return the command that supervises ``command``, or ``command`` itself."""
        if not self.asked:
            return command
        # -I: flatout's hook is for the program only. The option also prevents the import of, for example, a
        # json.py in the current folder.
        begin = f"import sys; sys.path.insert(0, {str(HOME)!r}); from flatout.launch.supervisor import main; sys.exit(main())"
        words = (
            sys.executable,
            "-I",
            "-c",
            begin,
            str(self.restarts),
            str(self.grace_s),
            str(self.hang_after_s),
            str(incidents.absolute()),
            shell(command.shown),
            *command.argv,
        )
        return Command(command.typed, words, command.script, command.module, command.disabled_by)

    @property
    def environment(self) -> dict[str, str]:
        return {"FLATOUT_ON_NAN": self.on_nan} if self.asked and self.on_nan != "ignore" else {}


def supervision(given: dict[str, Any]) -> Supervision:
    """Remove the supervision options from ``given`` and return them. Raises UsageError."""
    asked, restarts, grace_s, hang_after_s, on_nan = (
        given.pop(name) for name in ("supervise", "restarts", "grace", "hang_after", "on_nan")
    )
    if not asked:
        for option, value in (
            ("--restarts", restarts),
            ("--grace", grace_s),
            ("--hang-after", hang_after_s),
            ("--on-nan", on_nan),
        ):
            if value is not None:
                raise UsageError(f"{option} works only with a supervised program. Add --supervise.")
        return Supervision(False, 0, GRACE_S, HANG_S, "ignore")
    return Supervision(
        True,
        RESTARTS if restarts is None else restarts,
        GRACE_S if grace_s is None else grace_s,
        HANG_S if hang_after_s is None else hang_after_s,
        on_nan or "ignore",
    )
