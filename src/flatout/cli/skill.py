"""`flatout skill`: print how a coding agent works with flatout, as a skill file."""

from pathlib import Path

import click

PAGE = Path(__file__).with_name("skill.md")


@click.command()
def command() -> None:
    """Print how a coding agent works with flatout, as a skill file.

    flatout skill > .claude/skills/flatout/SKILL.md gives it to an agent that reads such files."""
    click.echo(PAGE.read_text(encoding="utf-8"), nl=False)
