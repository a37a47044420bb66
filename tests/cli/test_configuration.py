"""Options from pyproject.toml and environment variables, and completion in bash."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from limits import hang_s

import flatout as package
from flatout.cli.main import COMMANDS
from flatout.cli.options.configuration import options_of
from flatout.levers import TABLE

pytestmark = pytest.mark.timeout(60)

TUNE = ("tune", "python", "train.py")


@pytest.fixture
def config(flatout):
    def write(text):
        (flatout.folder / "pyproject.toml").write_text(text)

    return write


def budget(done):
    """The budget in the message about one that is too short."""
    assert done.code == 2
    return int(re.search(r"a budget of (\d) s cannot", done.err)[1])


def test_the_precedence(flatout, config, script):
    """The command line beats the variable, which beats the command's table, which beats the shared key."""
    script("pass")
    config('[tool.flatout]\nbudget = "1s"\n')
    assert budget(flatout.here(*TUNE)) == 1
    config(
        '[tool.flatout]\nbudget = "1s"\n[tool.flatout.tune]\nbudget = 2\n[tool.flatout.batch]\nbudget = 9\n'
    )
    assert budget(flatout.here(*TUNE)) == 2
    variable = {"FLATOUT_TUNE_BUDGET": "3s"}
    assert budget(flatout.here(*TUNE, env=variable)) == 3
    assert budget(flatout.here("tune", "--budget", "4s", *TUNE[1:], env=variable)) == 4


def test_the_nearest_file_above(flatout, script):
    script("pass", "project/part/deeper/train.py")
    outer, inner = (flatout.folder / "project" / name / "pyproject.toml" for name in (".", "part"))
    outer.write_text("[tool.flatout.levers]\njson = true\n")
    flatout.folder = flatout.folder / "project" / "part" / "deeper"
    assert json.loads(flatout.here("levers").out)["levers"]
    inner.write_text("")
    assert flatout.here("levers").out.startswith("  lever")
    inner.write_text('this is = "not TOML')  # of no concern to flatout
    assert flatout.here("levers").code == 0


def test_kinds_of_values(flatout, config, script):
    """Flags, options that repeat, lists with commas, and the commands of a group."""
    script("pass")
    config('[tool.flatout.check]\nselect = ["FL001", "FL003"]\njson = true\n')
    assert json.loads(flatout.here("check", "train.py").out)["findings"] == []
    config('[tool.flatout.tune]\neffects = ["exact", "exakt"]\n')
    assert "did you mean exact?" in flatout.here(*TUNE).err
    config('[tool.flatout.kernel.check]\nlimit = "soon"\n')
    assert "'soon' is not a time" in flatout.here("kernel", "check", "nothing").err
    several = {"FLATOUT_RUN_WITH": "tf32 'chanels_last={a = 1}'"}
    assert "did you mean channels_last?" in flatout.here("run", "python", "train.py", env=several).err
    config("[tool.flatout.profile]\nsteps = true\n")
    assert (
        "profile] steps: 'True' is not a valid integer" in flatout.here("profile", "python", "train.py").err
    )
    flag = {"FLATOUT_LEVERS_JSON": "1"}
    assert json.loads(flatout.here("levers", env=flag).out)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[tool.flatout.levers]\njsn = true",
            "[tool.flatout.levers] has the unknown key 'jsn'; did you mean json?",
        ),
        (
            "[tool.flatout.leverz]\njson = true",
            "[tool.flatout] has the unknown key 'leverz'; did you mean levers?",
        ),
        ("[tool.flatout.levers]\njson = 'ja'", "[tool.flatout.levers] json: 'ja' is not a valid boolean"),
        ("[tool]\nflatout = 3", "tool.flatout is not a table"),
        ("[tool.flatout", "cannot be read"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(flatout, config, text, says):
    config(text)
    done = flatout.here("levers")
    assert (done.code, done.out) == (2, "")
    assert done.said[0].startswith(f"flatout: {flatout.folder / 'pyproject.toml'}")
    assert says in done.said[0]
    assert flatout.here("levers", "--help").code == 0


def test_every_option_can_be_set(flatout, config):
    """Each option reads its variable: a value of a wrong type is an error that names the variable."""
    for name in COMMANDS:
        command = importlib.import_module(f"flatout.cli.{name}").command
        parts = command.commands.items() if isinstance(command, click.Group) else [("", command)]
        for part, leaf in parts:
            words = [word for word in (name, part) if word]
            variables = {
                key: "_".join(["FLATOUT", *words, key]).replace("-", "_").upper() for key in options_of(leaf)
            }
            words += ["x" for part in leaf.params if isinstance(part, click.Argument) and part.required]
            required = {variables[key]: "x" for key, option in options_of(leaf).items() if option.required}
            for key, option in options_of(leaf).items():
                texts = isinstance(option.type, (click.Path, type(click.STRING)))
                if option.multiple or (texts and not option.is_bool_flag):
                    continue
                done = flatout.here(*words, env={**required, variables[key]: "@ @"})
                assert done.code == 2, variables[key]
                assert variables[key] in done.err or f"'--{key}'" in done.err, done.err


def test_internal_variables_belong_to_no_command():
    """A variable that flatout sets for a program must not set an option of a command that the program starts."""
    source = Path(package.__file__).parent
    names = {
        name for path in source.rglob("*.py") for name in re.findall(r"FLATOUT_[A-Z_]+", path.read_text())
    }
    taken = {name for name in names for command in COMMANDS if name.startswith(f"FLATOUT_{command.upper()}_")}
    assert len(names) > 10
    assert taken == set()


def test_settings_of_another_user_are_not_used(flatout, config):
    config("[tool.flatout.levers]\njson = true\n")
    (flatout.folder / "pyproject.toml").chmod(0o666)
    done = flatout.here("levers")
    assert done.out.startswith("  lever")
    assert "is not used: anyone can write to it" in done.said[0]


# -- completion


@pytest.mark.processes
def test_completion_in_bash(flatout, script):
    """In a real bash: the script that click prints, with words as bash splits them."""
    script("pass")
    home = Path(sys.executable).parent
    wanted = {
        "flatout tu": {"tune"},
        "flatout run --with cha": {"channels_last"},
        "flatout levers chan": {"channels_last"},
        "flatout tune --levers tf32,chan": {"tf32,channels_last"},
        "flatout run --resc": {"--rescue"},
    }
    lines = ['eval "$(_FLATOUT_COMPLETE=bash_source flatout)"', "compopt() { echo files; }"]
    for line in [*wanted, "flatout run python tr"]:
        words = line.split()
        lines += [
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()",
            '_flatout_completion flatout; echo "${COMPREPLY[@]}"',
        ]
    env = {**flatout.environment(), "PATH": f"{home}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=flatout.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=hang_s(50),
    )
    assert done.stderr == ""
    shown = done.stdout.splitlines()
    assert [set(line.split()) for line in shown[: len(wanted)]] == list(wanted.values())
    assert shown[len(wanted)] == "files"  # bash completes the words of the program
    assert len(TABLE) > 1
