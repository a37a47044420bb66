"""`flatout levers` and `plan`, and the help of the command."""

import json
import os
import shutil
from pathlib import Path

import pytest

from flatout.launch.command import parse_command
from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.plan import Choice, Plan, read_toml
from flatout.tune.plan_files import job_folder, plan_key

pytestmark = pytest.mark.timeout(60)

RECORDED = Path(__file__).parent.parent / "render" / "session.json"


@pytest.mark.parametrize(
    "words",
    [
        "levers nonesuch",
        "levers a b",
        "plan --nonesuch",
        "levers --why",
    ],
)
def test_mistakes_exit_with_two_and_a_message(flatout, words):
    done = flatout.here(*words.split())
    assert done.code in (2, 127)
    assert "Traceback" not in done.err
    assert done.out == ""
    assert len(done.err.strip()) > 20


def test_levers_are_listed_in_the_order_in_which_they_act(flatout):
    done = flatout.here("levers", env={"COLUMNS": "200"})
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()[1:]]
    assert [line[0] for line in lines] == [lever.name for lever in TABLE]
    for line, lever in zip(lines, TABLE, strict=True):
        assert line[1] == lever.effect.value


def test_why_levers_were_left_out_of_the_newest_session(flatout):
    left_out = [lever for lever in json.loads(RECORDED.read_text())["levers"] if lever["status"] == "skipped"]
    for name in ("older", "newer"):
        folder = flatout.folder / ".flatout" / name
        folder.mkdir(parents=True)
        (folder / "session.json").write_text(RECORDED.read_text() if name == "newer" else "{}")
        os.utime(folder / "session.json", (0, 0) if name == "older" else None)
    for words in (("--why",), ("--why", "--job", ".flatout/newer")):
        done = flatout.here("levers", *words, env={"COLUMNS": "200"})
        assert done.code == 0
        assert all(f"{lever['name']} " in done.out and lever["reason"] in done.out for lever in left_out)
        assert len(done.out.splitlines()) == len(left_out)
    assert flatout.here("levers", "--why", "--job", ".flatout/older").code == 2
    alone = flatout.here("levers", "--job", ".flatout/newer")
    assert alone.code == 2
    assert "Use `flatout levers --why --job .flatout/newer`." in alone.err


def test_why_one_lever_was_left_out(flatout):
    record = json.loads(RECORDED.read_text())
    (flatout.folder / ".flatout" / "job").mkdir(parents=True)
    (flatout.folder / ".flatout" / "job" / "session.json").write_text(json.dumps(record))
    skipped = next(lever for lever in record["levers"] if lever["status"] == "skipped")
    applied = next(lever for lever in record["levers"] if lever["status"] == "applied")
    done = flatout.here("levers", "--why", skipped["name"], env={"COLUMNS": "200"})
    assert done.out.split(maxsplit=1) == [skipped["name"], skipped["reason"] + "\n"]
    done = flatout.here("levers", "--why", applied["name"])
    assert done.out == f"{applied['name']} was not left out: it was applied.\n"
    assert "did you mean" in flatout.here("levers", "--why", "chanels_last").err


def test_why_after_a_failed_session_says_that_it_failed(flatout):
    record = {
        **json.loads(RECORDED.read_text()),
        "status": "failed",
        "message": "no [data] here",
        "levers": [],
    }
    (flatout.folder / ".flatout" / "train-1").mkdir(parents=True)
    (flatout.folder / ".flatout" / "train-1" / "session.json").write_text(json.dumps(record))
    done = flatout.here("levers", "--why")
    assert done.code == 0
    assert done.out == (
        "The newest session, in .flatout/train-1, failed: no [data] here\n\n"
        "`flatout levers --why --job DIRECTORY` shows another session.\n"
    )


# -- mistyped words


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("run", "--resmue", "--resume"),
        ("tune", "--bugdet=60s", "--budget"),
        ("scale", "--network nvlink4 --noed", "--node"),
    ],
)
def test_a_suggestion_for_a_mistyped_option(flatout, script, command, option, meant):
    script("pass")
    done = flatout.here(command, *option.split(), "60s", "python", "train.py")
    assert done.code == 2
    name = option.split()[-1].partition("=")[0]
    assert done.said == [
        f"flatout: `flatout {command}` has no option {name}; did you mean {meant}? `flatout {command} --help` lists them."
    ]


def test_a_word_that_is_no_option(flatout):
    assert flatout.here("tune", "--zzz", "python", "train.py").said == [
        "flatout: `flatout tune` has no option --zzz. `flatout tune --help` lists them."
    ]
    assert flatout.here("run", "-m", "package").said == [
        "flatout: `flatout run` has no option -m. Put `python` before it: `flatout run python -m ...`."
    ]


def test_the_pages_of_levers(flatout):
    for lever in TABLE:
        shown = flatout.here("levers", lever.name)
        assert (shown.code, shown.out.partition("\n\n`flatout tune` measures it")[0]) == (
            0,
            lever.page.strip(),
        )
        assert "measures it before it keeps it" in shown.out


# -- plan


def test_the_template_is_a_plan(flatout):
    done = flatout.here("plan", "--template")
    assert read_toml(done.out)["schema"] == 1
    assert {choice.name for choice in Plan.from_toml(done.out)} <= {lever.name for lever in TABLE}


def test_a_plan_is_shown_with_its_code_and_evidence(flatout):
    (flatout.folder / "flatout.toml").write_text(
        '[levers.channels_last]\nvalue = true\norigin = "tuner"\nevidence = "alone 1.30x (1.20-1.40, n=6)"\n[levers.of_tomorrow]\nvalue = 3\n'
    )
    for done in (flatout.here("plan"), flatout.here("plan", "--plan", "flatout.toml")):
        assert done.code == 0, done.err
        assert "channels_last" in done.out
        assert "1.30x (1.20-1.40, n=6)" in done.out
        assert "model.to(memory_format=torch.channels_last)" in done.out
        assert "of_tomorrow" in done.out  # unknown here, but shown


@pytest.mark.parametrize("content", ["[levers", "schema = 7", "threads = 1"])
def test_a_broken_plan(flatout, content):
    (flatout.folder / "flatout.toml").write_text(content)
    done = flatout.here("plan")
    assert done.code == 2
    assert done.said[0].startswith("flatout: flatout.toml")


def test_the_plan_of_a_command_is_the_one_that_run_uses(flatout, script, monkeypatch):
    """The file beside the script may belong to another script of the folder."""
    for name in ("one.py", "two.py"):
        script("pass", name=name)
    monkeypatch.chdir(flatout.folder)
    one, two = (parse_command(["python", name]) for name in ("one.py", "two.py"))
    chosen = Plan((Choice("channels_last", True),), plan_key(one, look()))
    job_folder(one).make().plan.write_text(chosen.to_toml())
    beside = flatout.folder / "flatout.toml"
    beside.write_text(Plan((), plan_key(two, look())).to_toml())
    assert "channels_last" in flatout.here("plan", "python", "one.py").out
    assert flatout.here("plan", "python", "two.py").out == "The plan is empty: the program runs as it is.\n"
    done = flatout.here("plan", "python", "one.py", "--fast")
    assert done.code == 2
    assert done.said == [
        "flatout: no plan fits `python one.py --fast`: the plan in flatout.toml is not used: another command ('python two.py'). "
        "`flatout tune python one.py --fast` makes one; `flatout plan --plan flatout.toml` shows that one."
    ]
    beside.write_text("[levers")
    assert "flatout.toml" in flatout.here("plan", "python", "two.py").said[0]


def test_no_plan(flatout, script):
    script("pass")
    for words in ((), ("python", "train.py"), ("--plan", "missing.toml")):
        done = flatout.here("plan", *words)
        assert done.code == 2
        assert "flatout tune" in done.said[0]


# -- sessions


@pytest.fixture
def job(flatout):
    folder = flatout.folder / ".flatout" / "train-01234567"
    folder.mkdir(parents=True)
    shutil.copy(RECORDED, folder / "session.json")
    return folder


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": 1, "command": [], "cwd": "", "key": {}, "levers": [5]}',
        b'{"schema": 1, "command": [], "cwd": "", "key": {}, "best": 5}',
        b'{"schema": 1, "command": 3, "cwd": 4, "key": 5}',
        b"[" * 100_000,
        b"\x80",
    ],
)
def test_a_broken_session_is_reported(flatout, job, content):
    (job / "session.json").write_bytes(content)
    done = flatout.here("levers", "--why", "--job", str(job))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "there is no session" in done.said[0]


def test_a_session_of_a_newer_flatout_is_shown(flatout, job):
    data = json.loads((job / "session.json").read_text())
    data["of tomorrow"] = {"x": 1}
    data["levers"][0]["of tomorrow"] = 1
    (job / "session.json").write_text(json.dumps(data))
    assert flatout.here("levers", "--why", "--job", str(job)).code == 0
