"""Failures of `flatout tune`: each ends with one clear sentence and a sensible exit code, loses nothing and
leaves no process.
"""

import json
import signal
import time

import pytest
from limits import hang_s
from programs import STEPS_BY_HAND

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]

NEEDS_TORCH = pytest.mark.skipif(not pytest.importorskip("torch"), reason="not run: torch is not installed")


@pytest.fixture
def tune(flatout):
    """Run ``done = tune("python", "train.py")`` with a budget of 20 s and check what every failure has in
    common.
    """

    def run(*words, budget="20s", options=(), speaks=True, **more):
        done = flatout("tune", "--budget", budget, *options, *words, timeout=150, **more)
        assert done.left == []
        assert "Traceback" not in "".join(done.said)
        assert "flatout/cli/" not in done.err  # a traceback from flatout itself
        if speaks:
            assert len([line for line in done.said if len(line.split()) > 4]) >= 1, done.err
        return done

    return run


def sessions(folder):
    return [json.loads(path.read_text()) for path in folder.glob(".flatout/*/session.json")]


# -- programs that cannot be tuned


@pytest.mark.sampled(2)
@NEEDS_TORCH
@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("steps(3); raise KeyError('during')", 1, "KeyError: 'during'"),
        ("sys.exit(9)", 9, "exit code 9"),
        ("", 3, "ended without a training step"),
        ("steps(3); os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by signal 9"),
    ],
    ids=["raises during", "exits", "never steps", "is killed"],
)
def test_programs_that_cannot_be_tuned(tune, flatout, script, ending, code, says):
    script(STEPS_BY_HAND + ending + "\n")
    done = tune("python", "train.py")
    assert done.code == code
    assert says in done.err
    (session,) = sessions(flatout.folder)
    assert session["status"] == "failed"
    assert session["message"] in done.err
    assert next(flatout.folder.glob(".flatout/*/report.html")).read_text().startswith("<!doctype html>")
    assert not (flatout.folder / "flatout.toml").exists()


@NEEDS_TORCH
@pytest.mark.parametrize("budget", ["8s", "40s"])
def test_a_program_that_fails_after_it_trained_ends_tune_so_whatever_the_budget(
    tune, flatout, script, budget
):
    script(STEPS_BY_HAND + "steps(40); print('seen', file=sys.stderr); sys.exit(7)\n")
    done = tune("python", "train.py", budget=budget)
    (session,) = sessions(flatout.folder)
    assert (done.code, session["status"]) == (7, "failed")
    assert "the program fails by itself after about " in session["message"]
    assert "seen" in done.err
    assert not [lever for lever in session["levers"] if "fail" in lever["reason"]]
    assert not list(flatout.folder.rglob("flatout.toml"))


@NEEDS_TORCH
def test_a_program_whose_own_loss_becomes_nan_is_told_so_once(tune, flatout, script):
    """Its losses and weights are equal from then on, whatever a lever does."""
    nan = "square().mean().mul(float('nan') if step >= 20 else 1.0).backward()"
    looped = STEPS_BY_HAND.replace("for _ in range", "for step in range").replace(
        "square().mean().backward()", nan
    )
    script(looped + "steps(10**9)\n")
    done = tune("python", "train.py", budget="12s", options=["--levers", "gc_pause,malloc"], speaks=False)
    assert done.code == 0, done.err
    (session,) = sessions(flatout.folder)
    assert session["message"].endswith(
        "; the program's own loss is NaN from step 20, so nothing after that step was compared"
    )
    assert " ".join(done.out.split()).count("the program's own loss is NaN") == 1
    assert "nan" not in "".join(lever["reason"] for lever in session["levers"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["python", "-c", "print(1)"], "no Python process of it imported torch"),
        (["sh", "-c", "true"], "no Python process of this command loaded flatout"),
        (["python", "-I", "train.py"], "`python -I` disables flatout"),
    ],
)
def test_no_candidates(tune, flatout, script, words, says):
    script("print(1)")
    done = tune(*words)
    assert done.code == 3
    assert says in done.err


@NEEDS_TORCH
@pytest.mark.slow
def test_a_program_that_hangs_is_stopped(tune, flatout, script):
    script(STEPS_BY_HAND + "steps(2)\ntime.sleep(10_000)\n")
    done = tune("python", "train.py", budget="6s")
    assert done.code == 3
    assert "did not train" in done.err
    assert "--budget" in done.err


@NEEDS_TORCH
def test_a_program_that_reads_its_input(tune, flatout, script):
    script("name = input('name? ')\n" + STEPS_BY_HAND)
    done = tune("python", "train.py")
    assert done.code == 1
    assert "EOFError" in done.err


# -- signals


@pytest.mark.sampled(1)
@NEEDS_TORCH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_no_process(flatout, script, number):
    """Nothing survives, even if flatout gets SIGKILL while programs are paused: they die with it."""
    script(
        "import multiprocessing\n"
        + STEPS_BY_HAND
        + """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, at): return torch.zeros(4)
for x in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1):
    steps(1)
"""
    )
    process = flatout.start(
        "tune", "--budget", "100s", "--levers", "gc_pause,fused_optimizer", "python", "train.py"
    )
    until = time.monotonic() + hang_s(100)
    while not any(session["baseline"]["step_ms"] for session in sessions(flatout.folder)):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(number)
    done = flatout.finish(process)
    assert done.left == []
    assert done.code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert "Traceback" not in done.err
    (session,) = sessions(flatout.folder)
    assert session["status"] == "running"


# -- disks and folders


@NEEDS_TORCH
def test_a_full_disk(tune, flatout, script):
    """No file may grow beyond 2 kB, so the session cannot be written."""
    script(STEPS_BY_HAND + "steps(10**9)\n")
    done = flatout(
        "tune", "--budget", "20s", "python", "train.py", prefix=["prlimit", "--fsize=2048"], timeout=150
    )
    assert done.left == []
    assert done.code == 4, done.err
    assert "cannot write" in done.err
    assert "Traceback" not in done.err


def test_a_folder_that_was_named_and_cannot_be_written(tune, flatout, script):
    script("print(1)")
    (flatout.folder / "file").write_text("mine")
    done = tune("python", "train.py", options=["--job", "file/job"])
    assert done.code == 4
    assert "cannot create the folder file/job" in done.err
    assert (flatout.folder / "file").read_text() == "mine"


@NEEDS_TORCH
def test_a_folder_where_nothing_can_be_written(tune, flatout, script, tmp_path):
    """Nobody chose this folder for the records, so flatout writes them to another one and reports it; the
    plan stays.
    """
    script(STEPS_BY_HAND)
    (flatout.folder / ".flatout").write_text("in the way")
    for _ in range(2):  # the same folder each time
        done = tune("python", "train.py", env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
        assert done.code == 3
        assert "; the records go to" in done.err
    assert len(list((tmp_path / "cache").glob("flatout/jobs/*/train-*/session.json"))) == 1
    assert (flatout.folder / ".flatout").read_text() == "in the way"


@NEEDS_TORCH
@pytest.mark.slow
def test_a_plan_that_cannot_be_written_beside_the_script_is_in_the_job(tune, flatout, script):
    """What the program would do after the measured steps does not matter: the trials stop it earlier."""
    script(STEPS_BY_HAND + "steps(10**9)\nraise KeyError('after')\n")
    (flatout.folder / "flatout.toml").mkdir()
    done = tune("python", "train.py", budget="12s", options=["--levers", "gc_pause"])
    assert done.code == 0, done.err
    assert "flatout.toml" in done.said[-1]
    assert "KeyError" not in done.err
    assert list(flatout.folder.glob(".flatout/*/flatout.toml"))


# -- leftovers of earlier sessions
