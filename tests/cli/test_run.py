"""`flatout run`: the program takes over the process; a plan adds one line and never breaks the program."""

import json
import os
import re
import signal

import pytest
from processes import working_in

from flatout.launch.command import parse_command
from flatout.probe.machine import look
from flatout.tune.plan_files import job_folder, plan_key

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]


def keys(flatout, *words):
    """The keys that a plan for this command must have, and where it is looked for."""
    with working_in(flatout.folder):
        command = parse_command(words)
        return plan_key(command, look()), flatout.folder / job_folder(command).plan


def write_plan(path, levers, made_for=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = "".join(f"{name} = {json.dumps(value)}\n" for name, value in dict(made_for).items())
    path.write_text(f"schema = 1\n[made_for]\n{table}[levers]\n{levers}\n")
    return path


# -- without a plan


def test_it_becomes_the_program(flatout, script):
    """The process number and the parent stay the same. Without a summary there is no job, and nothing observes
    what the program imports or does.
    """
    script(
        "import os, sys\nentered = 'FLATOUT_JOB' in os.environ or 'flatout.agent.bootstrap' in sys.modules\n"
        "print(os.getpid(), os.getppid(), entered, sys.argv)"
    )
    process = flatout.start(
        "run", "--no-summary", "python", "train.py", "--name", "a b", "--help", really=True
    )
    done = flatout.finish(process)
    assert done.out.split(maxsplit=2) == [
        str(process.pid),
        str(os.getpid()),
        "False ['train.py', '--name', 'a b', '--help']\n",
    ]
    assert done.said == [line for line in done.err.splitlines() if line]
    assert done.said == [
        "flatout: no plan fits this command yet; running it as it is. To tune: flatout tune python train.py --name 'a b' --help"
    ]


DYING = """
import os
def rank():
    return int(os.environ["LOCAL_RANK"])
rank()
"""


def test_a_failure_is_explained_under_its_traceback(flatout, script, tmp_path):
    """The traceback comes first and unchanged, the exit code stays, and nothing is left in the temporary
    folder.
    """
    script(DYING)
    (tmp_path / "tmp").mkdir()
    plain = flatout.plain("python", "train.py")
    done = flatout("run", "python", "train.py", env={"TMPDIR": str(tmp_path / "tmp")})
    assert (done.code, done.out) == (plain.code, plain.out) == (1, "")
    remark, _, rest = done.err.partition("\n")
    assert remark.startswith("flatout: no plan fits")
    assert rest.startswith(plain.err)
    assert rest.removeprefix(plain.err).splitlines() == done.said[1:]
    assert done.said[1] == "flatout: LOCAL_RANK is not set: start the script with torchrun."
    assert 'train.py:4 in rank: return int(os.environ["LOCAL_RANK"])' in done.said[2]
    assert done.said[-1] == "flatout:   more   flatout explain FE083"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("method", "guard"),
    [
        ("spawn", False),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("spawn", True), ("forkserver", False))),
    ],
)
def test_a_missing_main_guard_is_named_where_a_loader_worker_ends_of_it(flatout, script, method, guard):
    """The worker's own traceback is that of a process that imports the script again."""
    pytest.importorskip("torch")
    loop = (
        "loader = DataLoader(list(range(8)), num_workers=2)\nfor batch in loader:\n    print(batch)\n"
        if not guard
        else "class Ends(list):\n    def __getitem__(self, at): os._exit(1)\n"
        "if __name__ == '__main__':\n    for batch in DataLoader(Ends(range(8)), num_workers=2):\n        print(batch)\n"
    )
    script(
        "import multiprocessing, os\nfrom torch.utils.data import DataLoader\n"
        f"multiprocessing.set_start_method('{method}', force=True)\n{loop}"
    )
    done = flatout("run", "python", "train.py")
    assert done.code == 1
    named = [line for line in done.said if line.startswith("flatout:   more ")]
    assert named == [f"flatout:   more   flatout explain {'FE071' if guard else 'FE075'}"]
    if not guard:
        (found,) = json.loads(flatout.here("explain", "--json", stdin=done.err).out)["explanations"]
        assert found["rule"] == "FE075"


def test_an_unknown_failure_of_a_script_alone_has_nothing_under_it(flatout, script):
    script("import sys; {}[sys.argv[1]]")
    plain = flatout.plain("python", "train.py", "-x")
    done = flatout("run", "train.py", "-x")
    assert done.err.partition("\n")[2] == plain.err


def test_signals_reach_the_program(flatout, script):
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    script(
        f"import os, signal, sys, time\nseen = []\nfor number in {[int(number) for number in numbers]}:\n"
        "    signal.signal(number, lambda number, frame: seen.append(os.write(1, b'%d\\n' % number)))\n"
        "print('ready', flush=True)\nwhile len(seen) < 4: time.sleep(0.05)\nsys.exit(40)"
    )
    process = flatout.start("run", "python", "train.py")
    assert process.stdout.readline() == "ready\n"
    for number in numbers:
        process.send_signal(number)
        assert process.stdout.readline() == f"{int(number)}\n"
    assert flatout.finish(process).code == 40


# -- plans that are found

# A plan of one lever, and a program that shows whether it is used.
MALLOC, SHOWS = 'malloc = "glibc"', "import os; print(os.environ.get('MALLOC_MMAP_THRESHOLD_'))"
USED, UNUSED = "4294967295\n", "None\n"


def test_a_plan_for_this_command_is_found_and_one_for_another_is_not(flatout, script):
    script(SHOWS)
    words = ("python", "train.py")
    key, path = keys(flatout, *words)
    write_plan(path, MALLOC, key)
    assert flatout("run", *words).out == USED
    assert flatout("run", *words, "--other").out == UNUSED
    assert flatout("run", "--plan", "none", *words).out == UNUSED


def test_the_plan_beside_the_script_is_found(flatout, script):
    script(SHOWS, name="sub/train.py")
    key, _ = keys(flatout, "python", "sub/train.py")
    write_plan(flatout.folder / "sub" / "flatout.toml", MALLOC, key)
    assert flatout("run", "python", "sub/train.py").out == USED
    # A hand-written plan without a command applies too.
    write_plan(flatout.folder / "sub" / "flatout.toml", MALLOC)
    assert flatout("run", "python", "sub/train.py", "--any").out == USED


def test_a_plan_for_another_command_of_the_script_is_mentioned(flatout, script):
    script("pass")
    script("pass", name="other.py")
    key, _ = keys(flatout, "python", "train.py")
    write_plan(flatout.folder / "flatout.toml", MALLOC, key)
    assert flatout("run", "python", "train.py", "--epochs", "1").said == [
        "flatout: no plan fits this command yet (a plan for `python train.py` exists: --plan flatout.toml uses it); "
        "running it as it is. To tune: flatout tune python train.py --epochs 1"
    ]
    assert "exists" not in flatout("run", "python", "other.py").err


def test_of_two_plans_the_newer_one_counts(flatout, script):
    """You edit flatout.toml; the tuner's own record must not hide that. A later tuning counts again."""
    script(SHOWS)
    key, record = keys(flatout, "python", "train.py")
    beside = flatout.folder / "flatout.toml"
    write_plan(record, MALLOC, key)
    write_plan(beside, "", key)
    os.utime(record, (1, 1))
    assert flatout("run", "python", "train.py").out == UNUSED
    assert "malloc" not in flatout("plan", "python", "train.py").out
    os.utime(beside, (0, 0))
    assert flatout("run", "python", "train.py").out == USED
    assert "malloc" in flatout("plan", "python", "train.py").out


def test_a_plan_for_another_machine_is_not_used_and_says_why(flatout, script):
    script(SHOWS)
    key, path = keys(flatout, "python", "train.py")
    for what, other, says in (
        ("machine", "Z80, 1 cores", "another machine ('Z80, 1 cores')"),
        ("versions", "torch 0.1", "other versions ('torch 0.1')"),
        ("python", "2.7", "another Python ('2.7')"),
        ("script", "0123", "the script has changed"),
    ):
        write_plan(path, MALLOC, {**key, what: other})
        done = flatout("run", "python", "train.py")
        assert done.out == UNUSED
        assert len(done.said) == 1
        assert says in done.said[0]
        assert "is not used" in done.said[0]
    asked = flatout("run", "--plan", str(path), "python", "train.py")
    assert asked.out == USED
    assert says in asked.said[0]
    assert "each lever is checked again here" in asked.said[0]


@pytest.mark.parametrize("content", ["[levers", "x" * 300_000])  # schema/test_plan.py has more
def test_a_broken_plan_never_stops_the_program(flatout, script, content):
    script("print('ran')")
    (flatout.folder / "flatout.toml").write_text(content)
    done = flatout("run", "python", "train.py")
    assert (done.code, done.out) == (0, "ran\n")
    assert len(done.said) == 1
    assert "flatout.toml" in done.said[0]
    named = flatout.here("run", "--plan", "flatout.toml", "python", "train.py")
    assert named.code == 2
    assert named.out == ""
    assert "Traceback" not in named.err


@pytest.mark.parametrize("path", ["/dev/zero", "folder", "pipe"])
def test_a_plan_that_is_no_file(flatout, script, path):
    script("print('ran')")
    (flatout.folder / "folder").mkdir()
    os.mkfifo(flatout.folder / "pipe")
    done = flatout.here("run", "--plan", path, "python", "train.py")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.out == ""


# -- under a plan

QUIET_TRAINING = """
import os, sys
import torch
print(os.getpid(), flush=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
print(losses)
print([group["fused"] for group in optimizer.param_groups])
sys.exit(7)
"""


@pytest.fixture
def train(flatout, script, tmp_path):
    """``done = train(levers)`` runs the small program under these levers."""
    pytest.importorskip("torch")

    def run(levers, source=QUIET_TRAINING, **options):
        script(source)
        path = write_plan(tmp_path / "plan.toml", levers)
        process = flatout.start("run", "--no-summary", "--plan", str(path), "python", "train.py", **options)
        done = flatout.finish(process)
        done.pid = process.pid
        return done

    return run


def test_levers_act_and_others_are_named(train):
    done = train('fused_optimizer = "fused"\nno_such_lever = true\nchannels_last = true\ntf32 = true')
    assert done.code == 7
    assert "[True]" in done.out
    assert len(done.err.splitlines()) == 1
    line = done.err.splitlines()[0]
    applied, _, left = line.partition("; not applied: ")
    assert applied == "flatout: applied fused_optimizer=fused"
    for part in (
        "no_such_lever (this version of flatout has no such lever; see `flatout levers`)",
        "channels_last (no module of the model is an nn.Conv2d or nn.ConvTranspose2d)",
        "tf32 (no parameter of the program is on a CUDA device)",
    ):
        assert part in left


def test_a_plan_with_a_wrong_value_starts_nothing(train):
    bad = train('threads = "many"\nautocast = "int3"')
    assert (bad.code, bad.out) == (2, "")
    assert len(bad.err.splitlines()) == 1
    assert "plan.toml: the value of threads must be a whole number from 1 to " in bad.err


@pytest.mark.parametrize(
    ("source", "says"),
    [("", "never imported torch"), ("import torch\n", "never finished a training step")],
)
def test_a_program_that_cannot_be_changed_gets_a_message(train, source, says):
    done = train("gc_pause = true", source=f"{source}print('looked')")
    assert (done.code, done.out) == (0, "looked\n")
    assert done.err == f"flatout: nothing was applied: this program {says}\n"


def test_a_python_option_that_disables_flatout(flatout, script, tmp_path):
    script("print('ran')")
    path = write_plan(tmp_path / "plan.toml", "gc_pause = true")
    done = flatout("run", "--plan", str(path), "python", "-I", "train.py")
    assert done.out == "ran\n"
    assert done.said == ["flatout: nothing was applied: `python -I` disables flatout; remove -I"]


def test_children_that_train_are_reached_and_only_one_reports(train):
    done = train(
        'fused_optimizer = "fused"',
        source=r"""
import os
import torch
import torch.multiprocessing as mp
def work(rank):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    os.write(1, f"child {rank} {optimizer.param_groups[0]['fused']}\n".encode())
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
""",
    )
    assert sorted(done.out.splitlines()) == ["child 0 True", "child 1 True"]
    assert done.err.splitlines() == ["flatout: applied fused_optimizer=fused"]


def test_checkpoints_of_the_program_are_the_plain_ones(train, flatout, tmp_path):
    """A model pickled whole under a plan loads where flatout is not installed."""
    source = QUIET_TRAINING.replace(
        "sys.exit(7)", "torch.save(model, 'whole.pt'); torch.save(optimizer.state_dict(), 'optimizer.pt')"
    )
    done = train("gc_pause = true\nthreads = 1\n", source=source)
    assert done.code == 0
    assert re.match("flatout: applied ", done.err)
    for name in ("whole.pt", "optimizer.pt"):
        assert b"flatout" not in (flatout.folder / name).read_bytes()
    read = flatout.plain(
        "python",
        "-c",
        "import torch, sys; print(torch.load('whole.pt', weights_only=False)); assert 'flatout' not in sys.modules",
    )
    assert read.code == 0, read.err
    assert "Linear" in read.out
