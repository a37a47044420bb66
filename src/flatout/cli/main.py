"""The `flatout` command. Subcommands are imported when they are called, so that `flatout --help` stays light."""

from __future__ import annotations

import importlib
import sys

import click

from flatout import __version__
from flatout.plan.errors import FlatoutError
from flatout.plan.legible import harmless

COMMANDS = {
    "tune": "Find the fastest plan for a program, and prove that it learns the same.",
    "run": "Run a program under its plan.",
    "rescue": "List what `flatout run --rescue` has kept, or write it as ordinary files.",
    "profile": "See where the time and the memory of a step go, and what fixing it would bring.",
    "batch": "See how speed and memory answer to the batch size, and how large a one still helps learning.",
    "memory": "Foretell the peak memory of a training step, for any batch size.",
    "scale": "Foretell a step on many devices: its time, its efficiency, what bounds it.",
    "lr": "See how the loss answers to the learning rate, and which one to begin with.",
    "trial": "Measure one run of a program and write its record.",
    "plan": "Show a plan with its evidence, and the code that would do the same by hand.",
    "report": "Write the pages of a session or a profile again.",
    "kernel": "Check, measure or begin a kernel, ours or your own.",
    "doctor": "Say whether this machine is ready to train, and how to mend what is not.",
    "explain": "Explain an error: cause, line, and what mends it.",
    "check": "Look for mistakes that raise nothing, in the source.",
    "levers": "List the levers, or show the page of one.",
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"flatout.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flatout")
def flatout() -> None:
    """A PyTorch training program, as it is, as fast as the machine allows, with the same results.

    \b
    flatout tune python train.py --lr 0.1     find the fastest plan
    flatout run  python train.py --lr 0.1     run the real job under it
    """


def main() -> None:
    """The only place that turns errors into exit codes."""
    try:
        code = flatout(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.stderr.write("flatout: stopped\n")
        sys.exit(130)
    except KeyboardInterrupt:
        sys.stderr.write("flatout: stopped\n")
        sys.exit(130)
    except FlatoutError as error:
        sys.stderr.write(f"flatout: {harmless(str(error))}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
