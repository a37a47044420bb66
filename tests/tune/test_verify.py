"""Certificates: what they keep, and what `flatout verify` says of each claim."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator
from schemas import json_schema

from flatout.launch.command import parse_command
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio, TrialRecord
from flatout.schema.session import CertificateRecord, GuardRecord, SessionRecord
from flatout.tune.confirm import certify
from flatout.tune.pairs import Pairs
from flatout.tune.plan_files import certificate_beside, job_folder, plan_key, sources_key
from flatout.tune.session import write_plan
from flatout.tune.verify import compare_certificates

FACTS = Facts(cpu="Z80", cores=1, python="3.12.1", versions={"torch": "2.14.1"})
PLAN = Plan((Choice("gc_pause", True),))
GUARD = GuardRecord("same", "bit for bit")


def run(seed):
    losses = [float(step + seed).hex() for step in range(20)]
    digests = {str(step): f"{seed}{step}" for step in (1, 2, 4)}
    return TrialRecord(
        "finished",
        seed=seed,
        warmup_steps=5,
        steps=15,
        losses=losses,
        weights_digests=digests,
        batch_hashes=["a"],
    )


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    home = tmp_path / "alice"
    (home / "project").mkdir(parents=True)
    (home / "project" / "train.py").touch()
    monkeypatch.chdir(home / "project")
    monkeypatch.setenv("HOME", str(home))
    train = f"{home}/project/train.py"
    command = parse_command(["/usr/bin/env", train, f"--data={home}/set", "-o", "/mnt/bob/out", "a/b"])
    sources = {"net.py": "11", "../../bob/lib.py": "22"}
    key = {**plan_key(command, FACTS), "sources": sources_key(sources)}
    session = SessionRecord(list(command.shown), str(home), key)
    tuning = SimpleNamespace(command=command, facts=FACTS, session=session, first_record=run(0))
    runs = {seed: run(seed) for seed in (0, 1)}
    pairs = Pairs(dict(runs), dict(runs))
    return certify(tuning, PLAN, GUARD, pairs, Ratio(2.0, 1.9, 2.1, 9))


def changed(certificate, change):
    """A copy after ``change`` of its JSON, and the lines that differ from those of the original."""
    data = json.loads(json.dumps(certificate.to_json()))
    change(data)
    lines = compare_certificates(CertificateRecord.from_json(data), certificate)
    return {line.name: line.status for line in lines if line.status != "holds"}


def test_a_certificate_names_no_user_and_no_absolute_path(certificate, tmp_path):
    text = json.dumps(certificate.to_json())
    assert certificate.command == ["***", "train.py", "--data=~/set", "-o", "***", "a/b"]
    assert certificate.key["sources"] == "net.py 11, *** 22"
    assert not any(word in text for word in (str(tmp_path), "alice", "bob", "/usr", "/mnt"))
    Draft202012Validator(json_schema("certificate")).validate(certificate.to_json())


def test_what_ran_the_same_holds(certificate):
    assert changed(certificate, lambda data: None) == {}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda d: d["key"].update(sources="net.py 12, *** 22"), {"sources": "FAILED"}),
        (lambda d: d["plain"][1]["weights_digests"].update({"2": "x"}), {"plain weights digests": "FAILED"}),
        (lambda d: d["tuned"][0]["losses"].__setitem__(3, "0x1.0p-9"), {"tuned losses": "FAILED"}),
        (lambda d: d["plain"][0]["losses"].append("0x1.0p-9"), {"plain losses": "not checked"}),
        (lambda d: d["plain"][0]["batch_hashes"].append("b"), {}),  # only the warm-up has them
        (lambda d: d.update(plan=Plan((Choice("threads", 1),)).to_json()), {"plan": "FAILED"}),
        (lambda d: d["speedup"].update(low=2.2, median=2.3, high=2.4), {"speed": "FAILED"}),
        (lambda d: d["plain"].clear(), dict.fromkeys(("plain losses", "plain weights digests"), "not checked") | {"plain batch hashes": "not claimed"}),
    ],
)  # fmt: skip
def test_each_claim_fails_by_itself(certificate, change, lines):
    assert changed(certificate, change) == lines


def test_bits_and_speed_of_another_torch_are_of_that_machine_alone(certificate):
    def change(data):
        data["key"]["versions"] = "python 3.12.1, torch 2.13.0"
        data["plain"][0]["losses"][3] = "0x1.0p-9"

    lines = changed(certificate, change)
    assert lines.pop("versions") == "differs"
    assert len(lines) == 7
    assert set(lines.values()) == {"not claimed"}


def test_the_verdict_of_now_decides_and_an_interval_may_be_too_wide(certificate):
    def lines(**now):
        changed = compare_certificates(certificate, replace(certificate, **now))
        return {line.name: line.status for line in changed if line.status != "holds"}

    assert lines(verdict="equivalent") == {"guard": "FAILED"}
    assert lines(verdict="failed") == {"guard": "FAILED"}
    assert lines(verdict="not checked") == {"guard": "not checked"}
    assert lines(speedup=Ratio(2.0, 0.5, 8.0, 2)) == {"speed": "not checked"}


def test_a_plan_without_a_certificate_leaves_none_of_an_earlier_plan(certificate):
    command = parse_command(["train.py"])
    job, session = job_folder(command).make(), SessionRecord(["train.py"], "", plan_key(command, FACTS))
    session.certificate = certificate
    path = certificate_beside(write_plan(job, session, command, True))
    assert CertificateRecord.from_json(json.loads(path.read_text())) == certificate
    session.certificate = None
    write_plan(job, session, command, True)
    assert not path.exists()
    assert not certificate_beside(job.plan).exists()


def test_the_program_runs_again(certificate, flatout, script, tiny):
    """The record is of another program, so its bits and files fail; the guard compares what ran now."""
    script(tiny)
    missing = flatout.here("verify")
    assert missing.code == 2
    assert "flatout.certificate.json is missing" in missing.err
    assert "`flatout tune COMMAND...`" in missing.err
    path = flatout.folder / "flatout.certificate.json"
    other = replace(certificate, command=["python", "train.py"], speedup=Ratio(1.0, 0.5, 2.0, 2))
    other.plain, other.tuned = other.plain[:1], other.tuned[:1]
    other.plain[0].steps = 40
    path.write_text(json.dumps(other.to_json()))
    done = flatout("verify", "--json", path.name)
    record = json.loads(done.out)
    Draft202012Validator(json_schema("verification")).validate(record)
    lines = {line["name"]: line["status"] for line in record["lines"]}
    assert (done.code, record["holds"]) == (1, False)
    assert lines["guard"] == lines["plan"] == lines["command"] == "holds"
    assert lines["sources"] == "FAILED"
    assert lines["plain losses"] != "holds"
