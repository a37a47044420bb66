"""`flatout trial`, one measured run: losses are bitwise those of the program, and output and exit code pass
through.
"""

import json
import os
import re
import signal

import pytest
from limits import hang_s
from programs import STEPS_BY_HAND

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

LINES = re.compile(r"^loss \d+ (\S+)$", re.MULTILINE)


@pytest.fixture
def measure(flatout, tmp_path):
    """``done, record = measure("python", "train.py", steps=3)``; record is None where none was written."""

    def run(*words, steps=3, options=(), **more):
        out = tmp_path / "record.json"
        out.unlink(missing_ok=True)
        done = flatout("trial", "--steps", str(steps), "--out", str(out), *options, *words, **more)
        assert done.left == []
        return done, json.loads(out.read_text()) if out.exists() else None

    return run


@pytest.fixture(scope="module")
def observed(flatout_in, tmp_path_factory, tiny):
    """One trial of the small script, and fifty steps of it without flatout."""
    cli = flatout_in(tmp_path_factory.mktemp("trial"))
    (cli.folder / "train.py").write_text(tiny)
    out = cli.folder / "record.json"
    done = cli("trial", "--steps", "8", "--out", str(out), "python", "train.py")
    plain = cli.plain("python", "train.py", env={"STEPS": "50"})
    return done, json.loads(out.read_text()), plain


def test_losses_are_bitwise_those_of_the_plain_program(observed):
    _, record, plain = observed
    losses = LINES.findall(plain.out)
    assert len(losses) == 50
    count = min(50, len(record["losses"]))
    assert count >= 8
    assert [float.fromhex(v) for v in record["losses"][:count]] == [float.fromhex(v) for v in losses[:count]]
    assert record["loss_steps"][:count] == list(range(count))


def test_the_programs_output_passes_through(observed):
    done, record, plain = observed
    shown = LINES.findall(done.out)
    assert shown == LINES.findall(plain.out)[: len(shown)]
    assert "done" not in done.out  # it was stopped before its end
    assert done.code == 0
    assert len(done.said) == 1
    assert f"{record['steps']} steps measured after {record['warmup_steps']} warm-up steps" in done.said[0]


def test_the_record_is_whole(observed):
    _, record, _ = observed
    assert record["status"] == "finished"
    assert record["exit_code"] == 0
    assert record["steps"] == len(record["step_ms_list"]) == 8
    assert record["unit"] == "step"
    assert 0 < min(record["step_ms_list"]) <= record["step_ms"] <= max(record["step_ms_list"])
    assert record["warmup_ms"] > 0
    assert set(record["phases"]) == {"data", "copy", "forward", "backward", "optimizer", "other"}
    assert all(record["phases"][name]["median_ms"] > 0 for name in ("forward", "backward", "optimizer"))
    assert sum(phase["share"] for phase in record["phases"].values()) == pytest.approx(1.0, abs=0.05)
    assert set(record["weights_digests"]) >= {"1", "2", "4", "8"}
    assert len(record["batch_hashes"]) == len(set(record["batch_hashes"])) > 0
    assert record["peak_memory_bytes"] > 2**20
    assert record["device"] == "cpu"
    assert record["seed"] == 0
    assert record["plan"]["choices"] == []
    assert record["context"]["optimizers"] == ["AdamW"]
    assert record["context"]["boundaries"] == "optimizer"
    assert set(record["versions"]) == {"python", "torch"}


def test_under_a_plan(measure, script, by_hand, tmp_path):
    (tmp_path / "plan.toml").write_text(
        '[levers]\nmalloc = "glibc"\ngc_pause = true\nno_such_lever = true\ntf32 = true\n'
    )
    script("import os\nprint('threshold', os.environ.get('MALLOC_MMAP_THRESHOLD_'), flush=True)\n" + by_hand)
    done, record = measure("python", "train.py", options=["--plan", str(tmp_path / "plan.toml")])
    assert done.code == 0
    assert "threshold 4294967295" in done.out
    assert [entry["name"] for entry in record["applied"]] == ["malloc", "gc_pause"]
    skipped = {entry["name"]: entry["reason"] for entry in record["skipped"]}
    assert set(skipped) == {"no_such_lever", "tf32"}
    assert "no such lever" in skipped["no_such_lever"]
    assert "on a CUDA device" in skipped["tf32"]


# -- how programs end


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ending", "code", "status", "says"),
    [
        ("steps(3)", 3, "ended", "finished by itself"),
        ("", 3, "ended", "without a training step"),
        ("steps(3); raise KeyError('mine')", 1, "failed", "KeyError: 'mine'"),
        ("raise KeyError('mine')", 1, "failed", "KeyError: 'mine'"),
        ("steps(3); os._exit(5)", 5, "failed", "without a message"),
        ("steps(3); os.kill(os.getpid(), signal.SIGSEGV)", 139, "failed", "signal 11"),
    ],
    ids=["three steps", "no step", "raises after", "raises before", "os._exit", "crash"],
)
def test_a_program_that_ends_by_itself(measure, script, ending, code, status, says):
    script(STEPS_BY_HAND + ending + "\n")
    done, record = measure("python", "train.py", steps=1000)
    assert done.code == code
    assert record["status"] == status
    assert says in record["reason"]
    if "raise" in ending:
        assert done.err.count("KeyError: 'mine'") == 1
        assert 'File "' in done.err
        assert "train.py" in done.err
        assert "flatout/" not in done.err.replace("flatout: ", "")  # the traceback is the program's own


def test_stopping_cannot_be_swallowed(measure, script):
    """A script that catches errors does not stop it, and one that catches everything does so only once;
    cleanup code at the end still runs.
    """
    script(
        STEPS_BY_HAND
        + """
while True:
    try:
        try:
            try:
                steps(1)
            except Exception:
                print("an error", flush=True)
        finally:
            print("finally", flush=True)
    except BaseException as ending:
        print(type(ending).__name__, flush=True)
"""
    )
    done, record = measure("python", "train.py")
    assert done.code == 0
    assert record["status"] == "finished"
    assert record["steps"] == 3
    assert "an error" not in done.out
    assert done.out.splitlines().count("StopTrial") == 1
    assert done.out.count("finally") >= 3


def test_a_program_that_hangs_while_ending_is_stopped_too(measure, script):
    script(STEPS_BY_HAND + "try:\n    steps(10**9)\nfinally:\n    time.sleep(1000)\n")
    done, record = measure("python", "train.py")
    assert record["status"] == "finished"
    assert done.code in (0, 137)


@pytest.mark.parametrize(
    "words",
    [("python", "-c", "print('hello')"), ("sh", "-c", "echo hello")],
    ids=["python", "sh"],
)
def test_nothing_attached(measure, script, words):
    script("print('hello')\n")
    done, record = measure(*words)
    assert done.code == 3
    assert done.out == "hello\n"
    assert record["status"] == "unattached"
    assert len(done.said) == 1
    assert "nothing was measured" in done.said[0]


def test_interrupting_the_trial(flatout, script, by_hand):
    script(by_hand)
    process = flatout.start("trial", "--steps", "100000000", "python", "train.py")
    assert process.stdout is not None
    while "loss 9 " not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = flatout.finish(process)
    assert done.code == 130
    assert done.left == []
    assert "Traceback" not in done.err


# -- programs of every kind


@pytest.mark.parametrize("kind", ["spawn", "fork"])
def test_a_child_does_the_work(measure, script, kind):
    """The parent only waits; the measurement covers the one child that trains."""
    script(
        STEPS_BY_HAND
        + f'''
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("{kind}").Process(target=steps, args=(10**9,))
    child.start()
    child.join()
'''
    )
    _, record = measure("python", "train.py")
    assert record["status"] == "finished"
    assert record["steps"] == 3


def test_a_shell_script_that_runs_python(measure, flatout, script):
    script(STEPS_BY_HAND + "print(sys.argv)\nsteps(10**9)\n")
    (flatout.folder / "go.sh").write_text('#!/bin/sh\npython -c "print(1)"\nexec python train.py "$@"\n')
    (flatout.folder / "go.sh").chmod(0o755)
    done, record = measure("./go.sh", "--lr", "0.1 0.2")
    assert "['train.py', '--lr', '0.1 0.2']" in done.out
    assert record["status"] == "finished"
    assert done.code == 0


def test_passes_inside_a_closure_are_the_ticks_where_a_step_is_long(measure, script):
    script("""
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10**6, max_eval=10**9, tolerance_grad=0, tolerance_change=0)
x = torch.randn(8, 4)
def closure():
    time.sleep(0.05)
    optimizer.zero_grad()
    loss = model(x + torch.randn(8, 4)).exp().mean()
    loss.backward()
    return loss
optimizer.step(closure)
""")
    _, record = measure("python", "train.py")
    assert (record["status"], record["unit"], record["steps"]) == ("finished", "backward", 3)
    assert record["context"]["closure_steps"] is True


@pytest.mark.timeout(200)
def test_two_ranks_under_torchrun(measure, script):
    """One rank is measured, both are stopped, and neither is left running."""
    script("""
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("rank", dist.get_rank(), flush=True)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
""")
    _, record = measure("torchrun", "--standalone", "--nproc-per-node", "2", "train.py", timeout=180)
    assert record["status"] == "finished"
    assert record["steps"] == 3
    assert record["context"]["roots"] == ["DistributedDataParallel"]


def test_without_out_a_line_says_where_the_record_is(flatout, script, by_hand, tmp_path):
    script(by_hand)
    (tmp_path / "tmp").mkdir()
    done = flatout("trial", "--steps", "2", "python", "train.py", env={"TMPDIR": str(tmp_path / "tmp")})
    path = re.search(r"record in (\S+)", done.said[-1])
    assert path is not None
    assert json.loads(open(path.group(1)).read())["status"] == "finished"  # noqa: SIM115
    assert os.listdir(flatout.folder) == ["train.py"]


ODD = """
import torch
class Odd(torch.Tensor):
    def detach(self):
        raise ValueError("this tensor is odd")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.ones(400, 2), batch_size=2, collate_fn=lambda items: torch.stack(items).as_subclass(Odd))
for batch in loader:
    loss = model(batch.as_subclass(torch.Tensor)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
"""


def test_a_mistake_of_flatout_is_not_blamed_on_the_program(flatout, measure, script):
    script(ODD, "odd.py")
    done, record = measure("python", "odd.py")
    assert done.code == 4
    assert "internal error while measuring this program" in done.err
    assert "this tensor is odd" in done.err
    assert record["status"] == "broken"


def test_a_timeout_keeps_the_steps_there_were(measure, script, by_hand):
    script(by_hand.replace("loss.backward()", "loss.backward(); __import__('time').sleep(0.05)"), "slow.py")
    done, record = measure(
        "python",
        "slow.py",
        steps=100000,
        options=("--timeout", f"{hang_s(12):.0f}s"),
        env={"STEPS": "1000000"},
    )
    assert done.code == 0, done.err
    assert record["status"] == "finished"
    assert 5 < record["steps"] < 100000
    assert len(record["losses"]) >= record["steps"]
    assert f"measured only {record['steps']} of 100000 steps within --timeout" in done.err
