"""Sessions on disk: their keys, when one continues, and the sentence at their end."""

import dataclasses

import pytest

from flatout.job.trust import file_digest
from flatout.launch.command import parse_command
from flatout.schema.facts import Facts, Gpu
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio
from flatout.schema.session import GuardRecord, TimeMemoryPoint
from flatout.tune.plan_files import differences, find_plan, job_folder, plan_key, sources_key
from flatout.tune.session import (
    load_session,
    made_for_another,
    open_session,
    plan_of,
    save_session,
    verdict,
    write_plan,
)

FACTS = Facts(cpu="Z80", cores=1, python="3.12.1", versions={"torch": "2.14.1", "numpy": "2.0"})
EFFECTS = ["exact", "rounding"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("pass\n")
    return parse_command(["sub/train.py", "--lr", "0.1"])


@pytest.fixture
def job(command):
    return job_folder(command).make()


def begin(job, command, facts=FACTS, budget_s=60.0, effects=EFFECTS, again=False):
    return open_session(job, command, facts, budget_s, effects, again)


def test_the_key_names_what_a_plan_depends_on(command, tmp_path):
    key = plan_key(command, FACTS)
    assert key["command"] == "sub/train.py --lr 0.1"
    assert key["machine"] == "Z80, 1 cores"
    assert key["versions"] == "torch 2.14.1"
    assert differences(key, key) == []
    other = plan_key(
        command, dataclasses.replace(FACTS, gpus=(Gpu("H200", 1, (9, 0)),), versions={"torch": "2.13.0"})
    )
    (tmp_path / "sub" / "train.py").write_text("pass  # changed\n")
    changed = plan_key(command, FACTS)
    assert differences(key, other) == ["another machine ('Z80, 1 cores')", "other versions ('torch 2.14.1')"]
    assert differences(key, changed) == ["the script has changed"]
    assert "unknown" in differences({}, key)[0]


def with_source(job, command, folder):
    """A session whose program imported a file."""
    (folder / "sub" / "net.py").write_text("WIDTH = 1\n")
    session = begin(job, command)
    session.key["sources"] = sources_key({"sub/net.py": file_digest(folder / "sub" / "net.py")})
    return session


def test_a_plan_fits_only_the_files_that_the_program_imported(job, command, tmp_path):
    session = with_source(job, command, tmp_path)
    session.best.plan = Plan((Choice("threads", 1),)).to_json()
    write_plan(job, session, command, write_beside=True)
    assert find_plan(command, FACTS).plan is not None
    (tmp_path / "sub" / "net.py").write_text("WIDTH = 2\n")
    found = find_plan(command, FACTS)
    assert found.plan is None
    assert {skipped.why for skipped in found.skipped} == {"sub/net.py has changed"}
    (tmp_path / "sub" / "net.py").unlink()
    assert find_plan(command, FACTS).plan is None


def test_a_search_starts_anew_if_an_imported_file_has_changed(job, command, tmp_path):
    session = with_source(job, command, tmp_path)
    session.message = "old"
    save_session(job, session)
    assert begin(job, command).message == "old"
    (tmp_path / "sub" / "net.py").write_text("WIDTH = 2\n")
    assert begin(job, command).message == ""


def test_the_files_of_a_command_that_is_no_python_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("python train.py\n")
    command = parse_command(["bash", "train.sh"])
    before = plan_key(command, FACTS)
    assert differences(before, plan_key(command, FACTS)) == []
    (tmp_path / "train.sh").write_text("python train.py --fast\n")
    assert differences(before, plan_key(command, FACTS)) == ["the script has changed"]
    for words in (["python", "-c", "pass\n" * 10_000], ["python", "-c", "\0"], ["bash", "."], ["bash", ""]):
        assert plan_key(parse_command(words), FACTS)["script"] == ""


def test_an_interrupted_session_continues(job, command):
    session = begin(job, command)
    session.spent_s = 59.0
    save_session(job, session)
    again = begin(job, command, budget_s=30.0)
    assert again.created == session.created
    assert again.budget_s == 60.0
    assert again.spent_s <= 30.0  # continuing needs time, even where the old budget was used up
    longer = begin(job, command, budget_s=300.0)
    assert longer.budget_s == 300.0


@pytest.mark.parametrize(
    "change",
    ["done", "failed", "broken", "another machine", "other effects", "asked for", "a changed script"],
)
def test_any_other_session_starts_from_scratch(job, command, change, tmp_path):
    session = begin(job, command)
    session.message = "old"
    if change in ("done", "failed"):
        session.status = change
    save_session(job, session)
    if change == "broken":
        job.session.write_bytes(b"{\x00\xff")
        job.plan.write_bytes(b"[levers")
    if change == "a changed script":
        (tmp_path / "sub" / "train.py").write_text("pass  # changed\n")
    new = begin(
        job,
        command,
        facts=Facts(cpu="6502") if change == "another machine" else FACTS,
        effects=["exact"] if change == "other effects" else EFFECTS,
        again=change == "asked for",
    )
    assert new.message == ""
    assert new.status == "running"


def test_the_plan_records_its_keys_and_lies_beside_the_script(job, command, tmp_path):
    session = begin(job, command)
    session.best.plan = Plan((Choice("threads", 1, evidence="alone 1.2x"),)).to_json()
    assert write_plan(job, session, command, write_beside=True) is not None
    for path in (job.plan, tmp_path / "sub" / "flatout.toml"):
        plan = Plan.from_toml(path.read_text())
        assert dict(plan.made_for) == session.key
        assert plan.digest == plan_of(session).digest
        assert plan.choices[0].evidence == "alone 1.2x"
    (tmp_path / "sub" / "flatout.toml").unlink()
    assert write_plan(job, session, command, write_beside=False) is None
    assert not (tmp_path / "sub" / "flatout.toml").exists()


def test_a_plan_of_another_command_stays_beside_the_script(job, command, tmp_path):
    session, beside = begin(job, command), tmp_path / "sub" / "flatout.toml"
    others = Plan((), {**session.key, "command": "python other.py"}).to_toml()
    beside.write_text(others)
    assert write_plan(job, session, command, write_beside=True) is None
    assert made_for_another(beside, session) == "python other.py"
    assert beside.read_text() == others
    assert job.plan.is_file()
    for own in ("[levers]\n", Plan((), {**session.key, "machine": "6502"}).to_toml(), "[broken"):
        beside.write_text(own)
        assert write_plan(job, session, command, write_beside=True) is not None
        assert beside.read_text() == job.plan.read_text()


def test_a_finished_session_stays_until_the_next_one_ends(job, command):
    finished = begin(job, command)
    finished.status = "done"
    save_session(job, finished)
    new = begin(job, command)
    new.spent_s = 7.0
    save_session(job, new)
    assert load_session(job) == finished
    again = begin(job, command)
    assert again == new
    again.status = "done"
    save_session(job, again)
    assert load_session(job) == again
    assert not job.unfinished.exists()
    assert begin(job, command).spent_s == 0


def test_a_plan_that_cannot_lie_beside_the_script_is_in_the_job(job, command, tmp_path):
    (tmp_path / "sub" / "flatout.toml").mkdir()
    assert write_plan(job, begin(job, command), command, write_beside=True) is None
    assert job.plan.is_file()


@pytest.mark.parametrize(
    ("speedup", "guard", "words"),
    [
        (Ratio(1.34, 1.2, 1.5, 6), "same", ["1.34x", "bitwise identical"]),
        (Ratio(1.34, 1.2, 1.5, 6), "equivalent", ["1.34x", "up to rounding"]),
        (Ratio(1.12, 0.99, 1.3, 2), "same", ["probably 1.12x", "bitwise identical"]),
        (None, "same", ["plain program is kept", "beyond the noise"]),
        (None, "failed", ["plain program is kept", "rejected", "the loss leaves"]),
    ],
)
def test_the_verdict_is_a_sentence(job, command, speedup, guard, words):
    session = begin(job, command)
    session.speedup, session.guard = speedup, GuardRecord(guard, "the loss leaves the spread")
    assert all(word in verdict(session) for word in words)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([Choice("autocast", "bfloat16")], "up to bfloat16 products"),
        ([Choice("autocast", "float16"), Choice("channels_last", True)], "up to float16 products"),
        (
            [
                Choice("reduced_precision", True),
                Choice("autocast", "bfloat16"),
                Choice("comm_compression", "fp16"),
            ],
            "up to bfloat16 products and float16 gradients between ranks",
        ),
        ([Choice("tf32", True)], "up to TF32 products"),
        ([Choice("channels_last", True)], "up to rounding"),
    ],
)
def test_the_verdict_names_levers_with_fewer_bits(job, command, choices, words):
    """This also holds where the plain program does not fit into the allowed memory."""
    session = begin(job, command)
    session.speedup, session.guard = Ratio(1.34, 1.2, 1.5, 6), GuardRecord("equivalent", "")
    session.best.plan = Plan(tuple(choices)).to_json()
    assert verdict(session).endswith(f"with the same results {words}")
    session.memory_limit_bytes, session.frontier = (
        2**30,
        [TimeMemoryPoint("plain", 2**31, fits=False), TimeMemoryPoint("the plan", 2**29, chosen=True)],
    )
    assert verdict(session).endswith(f"with the same results {words}")
