"""The guides end in commands: every command exists, with every option that is shown."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from flatout.cli.main import COMMANDS
from flatout.levers import TABLE as LEVERS

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = ("slow.md", "memory.md", "batch.md", "ranks.md", "nodes.md", "rescue.md", "resume.md", "device.md")
LEVER_NAMES = {lever.name for lever in LEVERS}


def commands(name: str) -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in [*blocks, *re.findall(r"`(flatout [^`]+)`", text)] if line.startswith("flatout ")]


@pytest.mark.parametrize("line", [line for name in GUIDES for line in commands(name)])
def test_a_command_of_a_guide_exists(line):
    _, name, *words = shlex.split(line)
    assert name in COMMANDS
    known = {option: each for each in importlib.import_module(f"flatout.cli.{name}").command.params for option in each.opts}
    given = False  # the word before was an option that takes this one
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if word in ("python", "torchrun"):
            break
        if given:
            given = False
            continue
        given = word in known and not known[word].is_flag
        if word.startswith("--"):
            assert word in known, f"{word} is no option of flatout {name}"
        if word == "--levers":
            assert set(value.split(",")) <= LEVER_NAMES


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_ends_in_commands(name):
    text = (DOCS / name).read_text(encoding="utf-8").rstrip()
    assert re.search(r"```\nflatout [^`]+```\Z", text)


@pytest.mark.parametrize("name", GUIDES)
def test_links_of_a_guide_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / name).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (DOCS / target).exists(), target
