"""`flatout run --supervise`: real programs that die, hang or get SIGTERM, under the real command line."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from processes import alive, until

pytestmark = pytest.mark.processes

# The program saves and resumes by itself. FAULTS gives one fault per start, "kind@step"; a file counts the
# starts.
TRAINS = """
import ctypes, hashlib, os, signal, sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
speed = [torch.zeros_like(p) for p in model.parameters()]
begin = 0
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    model.load_state_dict(kept["model"])
    speed, begin = kept["speed"], kept["step"]
    torch.set_rng_state(kept["random"])
start = int(open("starts").read()) if os.path.exists("starts") else 0
open("starts", "w").write(str(start + 1))
faults = os.environ.get("FAULTS", "").split()
kind, _, at = faults[start].partition("@") if start < len(faults) else ("", "", "-1")

def strike():
    if kind == "locks":  # a C call that holds the interpreter and no signal ends
        lock = ctypes.create_string_buffer(64)
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
    os.kill(os.getpid(), getattr(signal, kind))

for step in range(begin, 60):
    if step == int(at):
        strike()
    x = torch.randn(8, 4)
    model.zero_grad()
    (model(x) - x[:, :2]).square().mean().backward()
    with torch.no_grad():
        for p, v in zip(model.parameters(), speed):
            v.mul_(0.9).add_(p.grad)
            p -= 0.05 * v
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "speed": speed, "step": step + 1, "random": torch.get_rng_state()}, "last.new")
        os.replace("last.new", "last.pt")
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def incidents(flatout):
    found = list(flatout.folder.glob(".flatout/*/incidents.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


def supervise(flatout, *words, options=(), **more):
    done = flatout("run", "--supervise", *options, *words, **more)
    assert done.left == []
    return done


def test_a_run_that_dies_and_hangs_ends_with_the_bits_of_the_undisturbed_run(flatout, script):
    script(TRAINS)
    plain = flatout.plain("python", "train.py")
    for name in ("last.pt", "starts"):
        (flatout.folder / name).unlink()
    done = supervise(
        flatout,
        "python",
        "train.py",
        options=["--hang-after", "3s"],
        env={"FAULTS": "SIGKILL@13 locks@27 SIGSTOP@42"},
    )
    assert (done.code, done.out) == (0, plain.out), done.err
    said = "\n".join(done.said)
    assert "`python train.py` was killed by SIGKILL after step 13." in said
    assert re.search(
        r"process \d+ has finished no step for \d s \(after step 17\)\. "
        r"It waits: train.py, line 22, in strike",
        said,
    ), said
    assert re.search(r"process \d+ was stopped \(SIGSTOP\) for \d s; it was continued", said), said
    assert "restarted (2 of at most 20): its newest checkpoint is of step 20." in said
    assert re.search(
        r"flatout: 60 steps, 2 restarts; the incidents are in /",
        said,
    ), said
    lines = incidents(flatout)
    assert [(line["kind"], line["attempt"], line["exit_code"]) for line in lines] == [
        ("signal", 1, 137),
        ("hung", 2, 8),
        ("stopped", 3, None),
    ]
    *killed, stopped = [line["checkpoint_step"] for line in lines]
    assert killed == [10, 20]
    assert stopped in (40, 50, 60)  # training continues while that is written
    assert oct(next(flatout.folder.glob(".flatout/*/incidents.jsonl")).stat().st_mode)[-3:] == "600"


WORKERS = """
import os, sys, time
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if index == 58 and not os.path.exists("struck"):  # a batch of worker 1
            open("struck", "w").close()
            os.kill(os.getpid(), 19)
        if index == 155:
            while True:
                pass
        return torch.ones(4)
w = torch.zeros(4, requires_grad=True)
for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2):
    (batch @ w - 1).square().mean().backward()
"""


def test_a_stalled_loader_worker_is_named(flatout, script):
    script(WORKERS)
    done = supervise(flatout, "python", "train.py", options=["--hang-after", "3s", "--restarts", "0"])
    said = "\n".join(done.said)
    assert done.code == 8, done.err
    assert re.search(
        r"loader worker \(process \d+\) of process \d+ was stopped \(SIGSTOP\) for \d s; it was continued",
        said,
    ), said
    assert re.search(
        r"loader worker \(process \d+\) of process \d+ has returned no batch for \d s \(after step 3\d\)\. "
        r"The worker runs: train.py, line 1[23], in __getitem__",
        said,
    ), said
    assert "not restarted: no restarts are allowed (--restarts 0)." in said


# Two processes that wait for each other as ranks do, with one import of torch.
TWO = """
import os, socket
import torch
ours, theirs = socket.socketpair()
os.environ["RANK"] = "1"
if os.fork():
    os.environ["RANK"] = "0"
    line, rank = ours, 0
else:
    line, rank = theirs, 1
w = torch.zeros(4, requires_grad=True)
for step in range(1000):
    if rank == 1 and step == 20:
        while True:
            pass
    (w - 1).square().sum().backward()
    line.send(b"x")
    assert line.recv(1)
"""


def test_the_process_that_blocks_the_waiting_ranks_is_named(flatout, script):
    script(TWO)
    done = supervise(flatout, "python", "train.py", options=["--hang-after", "3s", "--restarts", "0"])
    said = "\n".join(done.said)
    assert done.code == 8, done.err
    assert re.search(
        r"\(rank 1\) has finished no step for \d s \(after step \d+\); 1 other waits for it\. "
        r"It runs: train.py, line 1[45], in <module>",
        said,
    ), said


def test_a_nan_loss_ends_the_program_on_request(flatout, script):
    script(
        "import torch\nw = torch.ones(4, requires_grad=True)\nfor step in range(50):\n    loss = (w.sum() - 20 * step).log()\n    loss.backward()\n"
        "    print(step, flush=True)\n"
    )
    done = supervise(flatout, "python", "train.py", options=["--on-nan", "stop"])
    assert (done.code, done.out) == (9, "0\n"), done.err
    assert "the loss of step 2 was NaN or infinite, so --on-nan stop ended the program." in done.err
    assert incidents(flatout)[0]["kind"] == "nan"


# -- programs without torch


def test_repeated_identical_crashes_end_it_with_the_reason(flatout, script, tmp_path):
    script("import os\nopen('starts', 'a').write('x')\nos.kill(os.getpid(), 9)\n")
    (flatout.folder / ".flatout").write_text("in the way of the job's folder")
    done = supervise(flatout, "python", "train.py", env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert (done.code, (flatout.folder / "starts").read_text()) == (137, "xxxx")
    assert "not restarted: 3 restarts in a row made no progress beyond step 0. `flatout explain`" in done.err
    assert len(list(tmp_path.glob("cache/flatout/jobs/*/*/incidents.jsonl"))) == 1  # in its stand-in


@pytest.mark.parametrize(
    ("source", "code", "why"),
    [
        ("import sys\nsys.exit(3)", 3, "it failed before its first step and would fail again"),
        (
            "raise MemoryError('cannot allocate memory')",
            1,
            "before its first step and would fail again|would run out of memory at the same place",
        ),
    ],
)
def test_a_failure_that_would_repeat_is_not_restarted(flatout, script, source, code, why):
    script(f"open('starts', 'a').write('x')\n{source}\n")
    done = supervise(flatout, "python", "train.py")
    assert (done.code, (flatout.folder / "starts").read_text()) == (code, "x")
    assert re.search(f"not restarted: .*({why})", done.err), done.err


def test_input_output_and_exit_code_are_the_programs_own(flatout, script):
    script(
        "import sys\nsys.stdout.write('x' * 20_000_000)\nsys.stdout.write(sys.stdin.read())\nsys.stderr.write('its own words\\n')\n"
    )
    done = supervise(flatout, "python", "train.py", stdin="typed")
    assert (done.code, len(done.out), done.out[-6:]) == (0, 20_000_005, "xtyped")
    assert "its own words" in done.err
    assert [line for line in done.said if "no plan fits" not in line] == []
    assert not (flatout.folder / ".flatout").exists()


HANDLES = """
import os, signal, sys, time
how, heard = sys.argv[1], []
def hear(number, frame):
    heard.append(number)
    open("observed", "a").write(signal.Signals(number).name + " ")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    if how != "plain":
        signal.signal(number, hear)
open("ready.new", "w").write(str(os.getpid()))
os.rename("ready.new", "ready")
while True:
    time.sleep(0.05)
    if heard and how == "saves":
        time.sleep(0.3)  # a second signal of the same press comes meanwhile
        sys.exit(128 + heard[0])
"""


@pytest.mark.parametrize(
    ("how", "sent", "code", "observed", "said"),
    [
        ("saves", ["SIGTERM", "SIGTERM"], 143, "SIGTERM ", None),
        ("saves", ["SIGUSR1"], 138, "SIGUSR1 ", None),
        ("plain", ["SIGHUP"], -1, None, None),
        (
            "ignores",
            ["SIGTERM"],
            -15,
            "SIGTERM ",
            "did not exit within 1 s of SIGTERM and was killed. Increase --grace",
        ),
    ],
)
def test_signals_reach_the_program_once_and_it_gets_time_to_end(
    flatout, script, how, sent, code, observed, said
):
    script(HANDLES)
    process = flatout.start("run", "--supervise", "--grace", "1s", "python", "train.py", how)
    until((flatout.folder / "ready").exists)
    for name in sent:
        process.send_signal(getattr(signal, name))
        time.sleep(0.1)  # two pending signals of the same kind merge into one
    done = flatout.finish(process)
    assert done.left == []
    assert done.code == code, done.err
    assert observed is None or (flatout.folder / "observed").read_text() == observed
    assert said is None or said in done.err
    assert "restarted" not in done.err


def test_nothing_outlives_a_supervisor_that_is_killed(flatout, script):
    script(
        "import os, subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open('pids.new', 'w').write(f'{os.getpid()} {child.pid}')\nos.rename('pids.new', 'pids')\ntime.sleep(600)\n"
    )
    process = flatout.start("run", "--supervise", "python", "train.py")
    pids = [
        int(word)
        for word in until(
            lambda: (flatout.folder / "pids").exists() and (flatout.folder / "pids").read_text()
        ).split()
    ]
    folder = next(
        word.partition("=")[2]
        for word in Path(f"/proc/{pids[0]}/environ").read_bytes().decode().split("\0")
        if word.startswith("FLATOUT_HEARTBEAT=")
    )
    process.kill()
    until(lambda: not any(map(alive, pids)) and not os.path.exists(folder), 3.0)
    process.communicate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grace", "5s"], "--grace works only with a supervised program. Add --supervise."),
        (["--restarts", "2"], "--restarts works only with a supervised program. Add --supervise."),
        (["--supervise", "--ray", "auto"], "but Ray starts the ranks. Remove --supervise."),
        (["--supervise", "--restarts", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_invalid_options(flatout, script, words, said):
    script("pass")
    done = flatout.here("run", *words, "python", "train.py")
    assert done.code == 2
    assert said in done.err
