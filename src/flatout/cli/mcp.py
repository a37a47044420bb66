"""`flatout mcp`: flatout as tools of a coding agent, over the Model Context Protocol."""

import json
import sys
from typing import Any

import click

from flatout.launch.process import TimedCommand
from flatout.schema.errors import UsageError

LIMIT_S = 2 * 3600.0
INSTRUCTIONS = (
    "flatout measures PyTorch training programs. After each edit of a training program, call compare: it says "
    "whether the new program learns the same, and how much faster it is, with an interval. `flatout skill` says more."
)


@click.command()
def command() -> int:
    """Serve profile, compare, verify and explain to a coding agent, over standard input and output.

    Register `flatout mcp` as a server of the Model Context Protocol with your agent. Each call starts the programs
    that it names, with your rights, as the command does. Needs `pip install 'flatout[mcp]'`."""
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise UsageError("the package mcp is missing. Install it: pip install 'flatout[mcp]'.") from None
    server = MCPServer("flatout", instructions=INSTRUCTIONS)
    for tool in (profile, compare, verify, explain):
        server.add_tool(tool)
    server.run()
    return 0


def profile(command: list[str], folder: str = ".") -> dict[str, Any]:
    """Measure where the time and memory of a training step go, in about two minutes.

    ``command``: the words of the program, such as ["python", "train.py"]."""
    return _flatout(folder, "profile", "--json", *command)


def compare(old: str, new: str, half: bool = False, folder: str = ".") -> dict[str, Any]:
    """Say whether two programs learn the same (`training`), and the change of the step time (`step_time`).

    ``old`` and ``new``: command lines, such as "python old.py". ``half``: new may compute in half precision.
    The exit code is 0 if they learn the same, 1 if not, 12 if that cannot be told."""
    return _flatout(folder, "compare", "--same-training", "--json", *(["--half"] if half else []), old, new)


def verify(plan: str = "flatout.toml", folder: str = ".") -> dict[str, Any]:
    """Run a tuned plan again, and check each claim of its certificate. The exit code is 0 if all hold."""
    return _flatout(folder, "verify", "--json", plan)


def explain(log: str, folder: str = ".") -> dict[str, Any]:
    """Explain a crash: the cause, the line of the program, the fix. ``log``: a file with its output."""
    return _flatout(folder, "explain", "--json", log)


def _flatout(folder: str, *words: str) -> dict[str, Any]:
    # -P: a file of the user's folder must not hide a module of flatout
    started = TimedCommand([sys.executable, "-P", "-m", "flatout", *words], folder=folder)
    result = started.result(LIMIT_S)
    try:
        document = json.loads(result.out)
    except ValueError:
        document = None
    return {"exit_code": result.code, "result": document, "messages": result.err[-4000:]}
