"""Every command on a page of the documentation exists, with every option that is shown; the tutorial runs."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from flatout.cli.main import COMMANDS
from flatout.levers import TABLE as LEVERS

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "src" / "flatout" / "cli" / "skill.md"
PAGES = [ROOT / "README.md", SKILL, *sorted((ROOT / "docs").rglob("*.md"))]
LEVER_NAMES = {lever.name for lever in LEVERS}


def commands(text):
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = [
        line
        for language, block in fences
        if language in ("", "console", "bash")
        for line in block.splitlines()
    ]
    lines = [
        line.partition("  #")[0].strip().removeprefix("$ ")
        for line in [*blocks, *re.findall(r"`(flatout [a-z][^`]*)`", text)]
    ]
    return [
        line
        for line in lines
        if re.match(r"flatout [a-z]+\b", line) and "..." not in line and "|" not in line
    ]


def unknown(line):
    """What flatout does not know of a command line, up to the command of the user's program."""
    _, name, *words = shlex.split(line)
    if name not in COMMANDS:
        return [name]
    options = {
        option: each
        for each in importlib.import_module(f"flatout.cli.{name}").command.params
        for option in (*each.opts, *each.secondary_opts)
    }
    found, value_of = [], ""
    for word in words:
        if value_of:
            if value_of == "--levers":
                found += sorted(set(word.split(",")) - LEVER_NAMES)
            value_of = ""
            continue
        if word in ("python", "torchrun", "CMD"):
            break
        if word.startswith("--") and word not in ("--help", "--version"):
            if word not in options:
                found.append(word)
            elif not options[word].is_flag:
                value_of = word
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page):
    assert {
        line: wrong for line in commands(page.read_text(encoding="utf-8")) if (wrong := unknown(line))
    } == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("flatout tun python train.py", ["tun"]),
        ("flatout run --fast python train.py", ["--fast"]),
        ("flatout tune --levers compile,quick python train.py", ["quick"]),
    ],
)
def test_a_command_that_does_not_exist_is_seen(line, wrong):
    assert unknown(line) == wrong


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_tutorial_runs(flatout):
    """In the order of the page: the script is written, then every command is run beside it."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (flatout.folder / "train.py").write_text(script, encoding="utf-8")
    lines = [
        line.removeprefix("$ flatout ")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    assert [line.split()[0] for line in lines] == [
        "tune",
        "run",
        "plan",
        "levers",
        "profile",
        "check",
        "batch",
        "run",
    ]
    for line in lines:
        done = flatout(*shlex.split(line), timeout=200)
        assert done.code == 0, f"{line}\n{done.out}{done.err}"
    assert "epoch 59" in done.out
