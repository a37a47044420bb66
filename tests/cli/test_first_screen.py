"""`flatout` without a command."""

import re

from flatout import __version__
from flatout.cli.main import COMMANDS


def test_it_says_what_to_do_first(flatout):
    done = flatout.here()
    assert (done.code, done.out) == (2, ""), "nothing was done, so a script must not take it for success"
    lines = done.err.splitlines()
    assert len(lines) <= 12
    named = re.findall(r"^ *flatout (\w+)", done.err, re.MULTILINE)
    assert named[:3] == ["doctor", "tune", "run"]
    assert set(named) <= set(COMMANDS)
    assert "flatout --help" in lines[-1]


def test_help_lists_every_command(flatout):
    done = flatout.here("--help")
    assert done.code == 0
    assert set(re.findall(r"^  (\w+)  ", done.out, re.MULTILINE)) >= set(COMMANDS)
    assert flatout.here("-h").out == done.out
    assert flatout.here("--version").out == f"flatout, version {__version__}\n"
    for command in COMMANDS:
        for word in ("--help", "-h"):
            helped = flatout.here(command, word)
            assert (helped.code, helped.out[:7]) == (0, "Usage: ")
