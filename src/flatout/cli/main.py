"""The `flatout` command. Subcommands are imported when they are called, so that `flatout --help` starts quickly."""

import importlib
import sys
from inspect import cleandoc
from shutil import which

import click

from flatout import __version__
from flatout.cli.options.output import Terminated
from flatout.job.interpreter import leave_uvx
from flatout.job.sanitize import sanitize
from flatout.job.streams import open_closed_streams
from flatout.schema.errors import FlatoutError, StorageError, UsageError

GROUPS = {
    "Tune and run": {
        "tune": "Find the fastest plan, and check that it learns the same.",
        "run": "Run a program under its plan, on one device or many.",
        "verify": "Run a tuned plan again, and check each claim of its certificate.",
        "plan": "Show a plan, its evidence, and the same as code.",
        "levers": "List the optimisations, or say why one was left out.",
    },
    "Compare": {"compare": "Measure two commands, revisions, environments or plans."},
    "Look": {
        "profile": "Measure where the time and memory of a step go.",
        "check": "Find mistakes that raise no error.",
        "explain": "Explain a crash: the cause, your line, the fix.",
        "doctor": "Check that this machine is ready to train.",
        "ui": "Show all runs and reports of a project as one page.",
    },
    "Sizes and large models": {
        "memory": "Predict the peak memory of a step, for any batch size.",
        "batch": "Measure speed, memory and use of larger batches.",
        "lr": "Find the learning rate to start with.",
        "scale": "Predict step time and efficiency on many devices.",
    },
    "Checkpoints and tools": {
        "rescue": "List or export the checkpoints of `flatout run --rescue`.",
        "trial": "Measure one run: steps, phases, exact losses.",
        "kernel": "Check, measure or start a kernel, ours or your own.",
    },
    "Agents": {
        "skill": "Print how a coding agent works with flatout.",
        "mcp": "Serve profile, compare, verify and explain to an agent (MCP).",
    },
}
HELP_OPTIONS = ["-h", "--help"]
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}


class Commands(click.Group):
    """Imports a subcommand when it is called, and lists them in groups."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"flatout.cli.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and give it the options of the environment and of pyproject.toml."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing and args[0][:1] != "-":
            from flatout.cli.options.arguments import did_you_mean

            unknown = args[0]
            hint = (
                f". Put `tune` or `run` before a program: `flatout run {unknown} ...`."
                if which(unknown) or unknown.endswith(".py")
                else f"{did_you_mean(unknown, COMMANDS)} `flatout --help` lists them."
            )
            raise UsageError(f"there is no command {unknown!r}{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        wants_help = set(HELP_OPTIONS) & set(rest[: 2 if isinstance(command, click.Group) else 1])
        if name is not None and command is not None and not ctx.resilient_parsing and not wants_help:
            from flatout.cli.options.configuration import configure

            configure(ctx, name, command)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Where it has --job, an error of a folder names it."""
        try:
            return super().invoke(ctx)
        except StorageError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is None or not any("--job" in option.opts for option in command.params):
                raise
            raise StorageError(f"{error} --job DIR names another folder for the records.") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))


@click.command(
    cls=Commands, invoke_without_command=True, context_settings={"help_option_names": HELP_OPTIONS}
)
@click.version_option(__version__, prog_name="flatout")
@click.pass_context
def flatout(ctx: click.Context) -> None:
    """Makes PyTorch training faster without editing your script, and checks that it still learns the same.

    \b
    flatout doctor                   is this machine ready?
    flatout tune python train.py     find the fastest plan, in about 90 s
    flatout run python train.py      run the job under it
    flatout profile python train.py  not faster? see what limits a step

    For `python train.py`, write your own training command with all its arguments."""
    if ctx.invoked_subcommand is None:
        help_text = cleandoc(ctx.command.help or "").replace("\b\n", "")
        click.echo(f"{help_text}\n`flatout --help` lists all commands.", err=True)
        ctx.exit(2)


def main() -> None:
    """The entry point. Only this function turns errors into exit codes."""
    open_closed_streams()
    leave_uvx()
    try:
        code = flatout(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as interruption:  # click turns the second into the first
        sys.stderr.write("flatout: stopped\n")
        sys.exit(143 if isinstance(interruption.__cause__ or interruption, Terminated) else 130)
    except FlatoutError as error:
        sys.stderr.write(f"flatout: {sanitize(str(error))}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
