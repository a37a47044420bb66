"""The supervision options of `flatout run`, and the command that starts the supervisor."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from flatout.cli.options.arguments import Duration, add_options, recovery_option
from flatout.launch.command import Command
from flatout.render.formatting import shell
from flatout.schema.errors import UsageError

RESTARTS, GRACE_S, HANG_S = 20, 10.0, 600.0
SOURCE_ROOT = Path(__file__).resolve().parents[3]


add_supervision_options = add_options(
    recovery_option(
        "--supervise",
        is_flag=True,
        help="Monitor the program: end it if it hangs, restart it from its newest checkpoint (--restarts).",
    ),
    recovery_option(
        "--restarts",
        type=click.IntRange(0),
        help=f"Most restarts, with --supervise.  [default: {RESTARTS}]",
    ),
    recovery_option(
        "--grace",
        type=Duration(),
        help=f"Time for a last checkpoint after SIGTERM, with --supervise.  [default: {GRACE_S:g}s]",
    ),
    recovery_option(
        "--hang-after",
        type=Duration(),
        help="Time without a step, a backward pass, a batch or a checkpoint that counts as a hang, with --supervise.  [default: 10m]",
    ),
    recovery_option(
        "--on-nan",
        type=click.Choice(["ignore", "stop"]),
        help="Reaction to a NaN or infinite loss, with --supervise.  [default: ignore]",
    ),
)


@dataclass(frozen=True)
class Supervision:
    """The supervision options of a command line; ``enabled`` is whether --supervise is given."""

    enabled: bool
    restarts: int
    grace_s: float
    hang_after_s: float
    on_nan: str

    def wrap(self, command: Command, incidents: Path) -> Command:
        """Return the command that supervises ``command``, or ``command`` itself."""
        if not self.enabled:
            return command
        # -I: flatout's hook is for the program only. The option also prevents the import of, for example, a
        # json.py in the current folder.
        code = f"import sys; sys.path.insert(0, {str(SOURCE_ROOT)!r}); from flatout.launch.supervisor import main; sys.exit(main())"
        argv = (
            sys.executable,
            "-I",
            "-c",
            code,
            str(self.restarts),
            str(self.grace_s),
            str(self.hang_after_s),
            str(incidents.absolute()),
            shell(command.shown),
            *command.argv,
        )
        return Command(command.typed, argv, command.script, command.module, command.disabled_by)

    @property
    def environment(self) -> dict[str, str]:
        return {"FLATOUT_ON_NAN": self.on_nan} if self.enabled and self.on_nan != "ignore" else {}


def read_supervision(options: dict[str, Any]) -> Supervision:
    """Remove the supervision options from ``options`` and return them. Raises UsageError."""
    enabled = options.pop("supervise")
    defaults: dict[str, Any] = {
        "restarts": RESTARTS,
        "grace": GRACE_S,
        "hang_after": HANG_S,
        "on_nan": "ignore",
    }
    given = {name: value for name in defaults if (value := options.pop(name)) is not None}
    if given and not enabled:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise UsageError(f"{option} works only with a supervised program. Add --supervise.")
    return Supervision(enabled, *(defaults | given).values())
