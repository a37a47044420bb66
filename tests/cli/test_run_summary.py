"""The record and the box at the end of a run, and live figures for trackers, through their own clients."""

import json
import os
import re
import signal
import socket
import time
import urllib.request

import pytest
from limits import hang_s

from flatout import __version__

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

PROGRAM = """
import sys, time
import torch
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, at):
        time.sleep(float(sys.argv[1]) / 8)
        return torch.ones(8)
for epoch in range(int(sys.argv[2])):
    for x in torch.utils.data.DataLoader(Slow(), batch_size=8):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
print(loss.item().hex())
"""


@pytest.fixture
def run(flatout, script):
    """``run(*options)`` runs the program with this pause a step and number of epochs."""

    def one(*options, source=PROGRAM, pause="0.001", epochs="1", **more):
        script(source)
        return flatout("run", *options, "python", "train.py", pause, epochs, **more)

    return one


def records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(".flatout/*/runs/*/rank0*.json"))]


def box(err):
    return [line for line in err.splitlines() if re.match(r"[|+].*[|+]$", line)]


@pytest.mark.parametrize("options", [(), ("--with", "gc_pause")])
def test_a_run_leaves_a_record_and_a_box_and_the_same_output(flatout, script, options):
    script(PROGRAM)
    words = ("python", "train.py", "0.02", "4")
    done, plain = flatout("run", *options, *words), flatout.plain(*words)
    assert (done.code, done.out) == (0, plain.out)
    (record,) = records(flatout.folder)
    assert (record["steps"], record["exit_reason"], record["rank"]) == (48, "ended", 0)
    assert record["data_wait"] > 0.8
    assert record["samples_per_s"] == pytest.approx(8 * record["steps_per_s"])
    assert record["steps_per_s"] * record["seconds"] == pytest.approx(46, abs=5)  # levers act first
    assert [choice["name"] for choice in record["plan"].get("choices", ())] == [
        o for o in options if o != "--with"
    ]
    assert (flatout.folder / ".flatout" / ".gitignore").read_text() == "*\n"
    lines = box(done.err)
    assert 5 <= len(lines) <= 8
    assert {len(line) for line in lines} == {78}
    assert any("limited by: waiting for data" in line for line in lines)
    assert any(f"next: flatout {'profile' if options else 'tune'} python train.py" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "made", "steps"),
    [((), "", 48), (("--with", "gc_pause"), "optimizer.step()", 6)],
    ids=["none", "each eighth"],
)
def test_steps_are_those_of_an_optimizer_or_else_backward_passes(flatout, run, options, made, steps):
    """As for tune: without a lever to apply and with one."""
    update = "optimizer.step()" if made else "model.zero_grad()"
    looped = PROGRAM.replace("optimizer.zero_grad()", "seen = globals().get('seen', 0) + 1")
    looped = looped.replace("optimizer.step()", f"if seen % 8 == 0: {update}")
    if not made:
        looped = looped.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n", "")
    done = run(*options, source=looped, epochs="4")
    assert not [line for line in done.said if "nothing was applied" in line]
    (record,) = records(flatout.folder)
    assert abs(record["steps"] - steps) <= 1  # the end of the last one is seen at the next


def test_a_run_that_fails_is_recorded_with_its_exception(flatout, run):
    done = run(source=PROGRAM.replace("print(", "raise KeyError('x')\nprint("))
    assert done.code == 1
    assert [each["exit_reason"] for each in records(flatout.folder)] == ["KeyError"]
    assert done.err.index("KeyError") < done.err.index("+-- flatout run")


def test_without_training_or_a_summary_nothing_is_left(flatout, run):
    assert run(source="import torch\nprint('looked')").out == "looked\n"
    assert box(run("--no-summary").err) == []
    assert not list(flatout.folder.glob(".flatout/*/runs"))


@pytest.mark.full
def test_each_rank_leaves_its_record_and_the_first_shows_the_box(flatout, run):
    done = run("--procs", "2", "--export", "jsonl", epochs="8")
    assert done.code == 0, done.err
    found = [json.loads(path.read_text()) for path in flatout.folder.glob(".flatout/*/runs/*/rank?.json")]
    assert sorted((each["rank"], each["world_size"], each["steps"]) for each in found) == [
        (0, 2, 96),
        (1, 2, 96),
    ]
    assert len(list(flatout.folder.glob(".flatout/*/runs/*/rank?.jsonl"))) == 2
    assert done.err.count("+-- flatout run") == 1


def wait_for(found, seconds=60.0):
    """Wait until the exporter, a process of its own, has done its work."""
    end = time.monotonic() + hang_s(seconds)
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError("the exporter did not finish")


OUTLIVES = {"FLATOUT_TEST_RUN": "exporter"}  # the exporter works on after the run; the fixture would end it


def exported(flatout, run, *names, env=()):
    options = [part for name in names for part in ("--export", name)]
    env = {**OUTLIVES, **dict(env)}
    done = run("--export-every", "0.2s", *options, pause="0.02", epochs="4", env=env)
    assert done.code == 0, done.err
    (record,) = records(flatout.folder)
    (path,) = flatout.folder.glob(".flatout/*/runs/*/rank0.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["end"] == record
    return record, lines[:-1]


def test_tensorboard_holds_the_runs_own_figures(flatout, run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record, lines = exported(flatout, run, "jsonl", "tensorboard")

    def read():
        (folder,) = flatout.folder.glob(".flatout/*/runs/*/tensorboard/rank0") or [None]
        events = EventAccumulator(str(folder))
        events.Reload()
        return events if len(events.Scalars("flatout/steps_per_s")) == len(lines) else None

    wait_for(lambda: list(flatout.folder.glob(".flatout/*/runs/*/tensorboard/rank0/*")))
    events = wait_for(read)
    for name in ("steps_per_s", "samples_per_s", "data_wait"):
        assert [(e.step, e.value) for e in events.Scalars(f"flatout/{name}")] == [
            (line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines
        ]
    assert lines[-1]["step"] == record["steps"] == 48


@pytest.mark.full
def test_mlflow_and_an_offline_wandb_hold_the_runs_own_figures(flatout, run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the client below
    uri = f"file://{tmp_path / 'mlruns'}"
    env = {"WANDB_MODE": "offline"}
    _, lines = exported(flatout, run, f"mlflow={uri}", "wandb=trial", env=env)
    client = MlflowClient(uri)

    def read():
        runs = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
        return runs if runs and runs[0].info.status == "FINISHED" else None

    (run,) = wait_for(read)
    seen = client.get_metric_history(run.info.run_id, "rank0/steps_per_s")
    assert [(m.step, m.value) for m in seen] == [(x["step"], pytest.approx(x["steps_per_s"])) for x in lines]
    files = wait_for(lambda: list(flatout.folder.glob(".flatout/*/runs/*/wandb/offline-run-*/*.wandb")))
    assert len(files) == 1


def test_prometheus_is_scraped_on_the_loopback_while_the_run_goes_on(flatout, script):
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script(PROGRAM)
    process = flatout.start(
        "run", "--export-every", "0.2s", "--export", f"prometheus={port}", "python", "train.py", "0.02", "40"
    )

    def scrape():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        return text if 'flatout_steps_per_s{rank="0"}' in text else None

    text = wait_for(scrape)
    assert 0 < float(re.search(r'flatout_steps_per_s\{rank="0"\} (\S+)', text)[1]) < 60
    assert flatout.finish(process).code == 0


@pytest.mark.parametrize("name", [pytest.param("mlflow", marks=pytest.mark.full), "prometheus"])
def test_a_tracker_that_is_down_does_not_reach_the_training(flatout, run, name):
    pytest.importorskip(name.replace("prometheus", "prometheus_client"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        target = f"http://127.0.0.1:{port}" if name == "mlflow" else str(port)
        options = ("--export-every", "0.2s", "--export", f"{name}={target}", "--export", "jsonl")
        done = run(*options, pause="0.05", epochs="6")
    assert done.code == 0
    (record,) = records(flatout.folder)
    assert (record["steps"], record["flatout"]) == (72, __version__)
    assert len(box(done.err)) <= 8
    if name == "prometheus":  # a client that waits for an answer has not failed yet
        assert "not exported: prometheus cannot be started (OSError" in done.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--export", "wanb"), "did you mean wandb?"),
        (("--export", "prometheus=abc"), "'abc' is not a port"),
        (("--export", "prometheus=99999"), "'99999' is not a port"),
        (("--export", "jsonl=a"), "jsonl takes no target"),
        (("--export", "jsonl", "--export-every", "0s"), "at least 0.1 s"),
        (("--export-every", "9s"), "has no effect without --export"),
    ],
)
def test_exports_that_cannot_work_are_named_before_the_run(flatout, script, options, says):
    pytest.importorskip("prometheus_client")
    script(PROGRAM)
    done = flatout.here("run", *options, "python", "train.py", "0.01", "1")
    assert done.code == 2
    assert says in done.err


def test_where_nothing_can_be_written_the_record_is_in_the_cache_or_the_box_says_so(flatout, run, tmp_path):
    (flatout.folder / ".flatout").write_text("a file")
    done = run("--export", "tensorboard", env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.code == 0
    assert "cannot write to" in done.err
    assert len(list((tmp_path / "cache").glob("flatout/jobs/*/train-*/runs/*/rank0.json"))) == 1
    (tmp_path / "file").touch()
    (tmp_path / f"flatout-{os.geteuid()}").touch()
    env = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    done = run(env=env)
    assert done.code == 0
    assert "record: not written: " in done.err
    assert "Traceback" not in done.err


def test_ctrl_c_ends_the_program_as_without_flatout(flatout, script):
    script(PROGRAM.replace("    for x in", "    print(epoch, flush=True)\n    for x in"))
    process = flatout.start("run", "python", "train.py", "0.01", "1000")
    assert process.stdout is not None
    while process.stdout.readline() != "1\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = flatout.finish(process)
    assert done.code == -signal.SIGINT  # Python's own end after an uncaught KeyboardInterrupt
    assert "| record: " in done.err
