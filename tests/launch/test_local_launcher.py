"""The local launcher: the environment of ranks, whose failure counts, which signals reach them, and that no
process remains.
"""

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from limits import hang_s
from processes import alive, state, until

from flatout.job.rank_environment import RANK_VARIABLES
from flatout.launch.failure import (
    EXITED,
    EXITING,
    FAILING,
    LOST_ANOTHER,
    RankEvent,
    end_of_output,
    first_failed,
)
from flatout.launch.rank import check_devices, cuda_devices, share_of_cores
from flatout.schema.errors import UsageError

pytestmark = pytest.mark.processes

LOCAL_LAUNCHER = [sys.executable, "-m", "flatout.launch.local_launcher"]
NOTES = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, here = os.environ["FLATOUT_RANK"], Path.cwd()
def note(name, text="x"):
    beside = here / f".{name}.{rank}"
    beside.write_text(str(text))
    beside.rename(here / f"{name}.{rank}")
"""
# Ranks that wait for each other as in a training: when one is gone the others notice it on their connection,
# and fail.
BOUND = (
    NOTES
    + '''
import atexit, ctypes, socket
victim, how = sys.argv[1], sys.argv[2]
if rank == "0":
    door = socket.socket(socket.AF_UNIX)
    door.bind("door")
    door.listen()
    lines = [door.accept()[0] for _ in range(int(os.environ["FLATOUT_WORLD_SIZE"]) - 1)]
    for line in lines:
        line.sendall(b"all there")
else:
    line = socket.socket(socket.AF_UNIX)
    while line.connect_ex("door"):
        time.sleep(0.01)
    assert line.recv(9)
    lines = [line]
def step():
    """Everyone waits for everyone, through rank 0."""
    import select
    select.select(lines, [], [])
    raise RuntimeError("Connection closed by peer")
def fail():
    raise ValueError(f"the bad sample of rank {rank}")
if rank == victim:
    time.sleep(0.1)
    if how == "raise":
        fail()
    if how == "hangs":
        atexit.register(time.sleep, 600)
        fail()
    if how == "os_exit":
        os._exit(7)
    if how == "hook":
        sys.excepthook = lambda *what: sys.stderr.write("it went wrong\\n")
        fail()
    if how == "late":  # as where a driver takes its time: the connections are gone, the process is not
        [line.close() for line in lines]
        time.sleep(0.1)
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, how))
step()
'''
)


PATIENT = "rank_monitor.KILL_S = 15.0"  # the test is about the order, on a machine that may be busy


def changed(code):
    """The launcher, with a change in it or in this kernel."""
    return [
        sys.executable,
        "-c",
        f"import os, sys\nfrom flatout.launch import local_launcher, rank_monitor\n{code}\nsys.exit(local_launcher.main(sys.argv[1:]))",
    ]


@pytest.fixture
def launches(tmp_path):
    """The folder for launches."""
    (tmp_path / "launches").mkdir()
    return tmp_path / "launches"


@pytest.fixture
def local_launcher(flatout, launches):
    """``local_launcher(source, *words, procs=3)`` runs a program as ranks and returns how the launch ended;
    no process of it may remain.
    """

    def run(source, *words, procs=3, command=None, env=None, launcher=LOCAL_LAUNCHER, **options):
        (flatout.folder / "train.py").write_text(source)
        words = ["--procs", str(procs), "--", *(command or ["python", "train.py"]), *words]
        done = flatout(
            *words, python=launcher, timeout=60, env={**(env or {}), "TMPDIR": str(launches)}, **options
        )
        assert done.left == []
        assert done.code or not list(launches.iterdir())
        return done

    return run


@pytest.fixture
def begin(flatout, launches):
    """``begin(source)`` starts a launch in its own session and returns its process once every rank has
    written its note `ready`.
    """
    begun = []

    def start(source, procs=2, ready=True, prefix=(), launcher=LOCAL_LAUNCHER, **options):
        (flatout.folder / "train.py").write_text(NOTES + source)
        words = [*prefix, *launcher, "--procs", str(procs), "--", "python", "train.py"]
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
            **options,
        }
        begun.append(
            subprocess.Popen(
                words, cwd=flatout.folder, env=flatout.environment({"TMPDIR": str(launches)}), **options
            )
        )
        if ready:
            until(lambda: len(list(flatout.folder.glob("ready.*"))) == procs)
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        flatout.close()  # any remaining process keeps its output open
        process.communicate()


def noted(folder, name):
    return [path.read_text() for path in sorted(folder.glob(f"{name}.*"))]


# -- the environment of a rank


def test_the_environment_of_a_rank(local_launcher, flatout):
    source = NOTES + (
        "import json, stat\nfolder = os.environ['FLATOUT_LAUNCH']\n"
        "note('environment', json.dumps([dict(os.environ), oct(stat.S_IMODE(os.stat(folder).st_mode)), sys.stdin.read()]))\nprint('out of', rank)\n"
    )
    inherited = {
        "RANK": "5",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURM_PROCID": "1",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMP_NUM_THREADS": "",
        "MINE": "kept",
    }
    done = local_launcher(source, procs=3, stdin="for rank 0", env=inherited)
    assert (done.code, done.out, done.err) == (0, "out of 0\n", "")
    info = [json.loads(text) for text in noted(flatout.folder, "environment")]
    cores = len(os.sched_getaffinity(0))
    for rank, (environment, mode, read) in enumerate(info):
        assert [
            environment[f"FLATOUT_{name}"]
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        ] == [str(rank), str(rank), "3", "3"]
        assert environment["FLATOUT_RENDEZVOUS"] == f"file://{environment['FLATOUT_LAUNCH']}/rendezvous"
        assert not RANK_VARIABLES & set(environment)
        assert not {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"} & set(environment)
        assert (environment["OMP_NUM_THREADS"], environment["MINE"], mode) == (
            str(max(cores // 3, 1)),
            "kept",
            "0o700",
        )
        assert read == ("for rank 0" if rank == 0 else "")
    assert len({environment["FLATOUT_LAUNCH"] for environment, *_ in info}) == 1
    assert not Path(info[0][0]["FLATOUT_LAUNCH"]).exists()


def test_the_users_number_of_threads_is_kept():
    assert share_of_cores({}, 4, 10) == {"OMP_NUM_THREADS": "2"}
    assert share_of_cores({}, 4, 3) == {"OMP_NUM_THREADS": "1"}
    assert share_of_cores({"OMP_NUM_THREADS": "7"}, 4, 10) == {}


@pytest.mark.parametrize(
    ("listed", "procs", "devices"),
    [
        ("0,1", 2, ["0", "1"]),
        ("3, 1,2", 2, ["3", "1"]),
        ("GPU-8f6d,GPU-11aa", 2, ["GPU-8f6d", "GPU-11aa"]),
        ("MIG-1/2/0,GPU-3", 1, ["MIG-1/2/0"]),
        ("0,1,-1,2", 3, None),
        ("", 1, None),
        ("0,0", 2, None),
        ("NoDevFiles", 1, None),
        ("0", 2, None),
    ],
)
def test_the_users_list_of_devices_is_respected(listed, procs, devices, monkeypatch):
    monkeypatch.setattr("flatout.launch.rank._gpus", lambda: 0)
    if devices is None:
        with pytest.raises(
            UsageError, match=r"CUDA_VISIBLE_DEVICES=.* and \d ranks need one each\. `--(gpus|procs)"
        ):
            cuda_devices({"CUDA_VISIBLE_DEVICES": listed}, procs)
    else:
        assert cuda_devices({"CUDA_VISIBLE_DEVICES": listed}, procs) == devices


def test_missing_devices(monkeypatch):
    monkeypatch.setattr("flatout.launch.rank._gpus", lambda: 2)
    assert cuda_devices({}, 2) == ["0", "1"]
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "1,0,5"}, 2) == ["1", "0"]
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "1,0,5"}):
        with pytest.raises(
            UsageError, match=r"there are 2 CUDA devices .* and 3 ranks need one each\. `--gpus 2`"
        ):
            cuda_devices(environment, 3)
    with pytest.raises(UsageError, match="2 ranks need one device each, but 1 given"):
        check_devices(["0"], 2)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--procs", "0", "--", "python", "-c", "pass"], 2, "at least one rank"),
        (["--procs", "2", "--"], 2, "no program was given"),
        (["--procs", "2", "--", "no-such-program"], 127, "there is no program"),
        (["--procs", "2", "--", "./not-a-program"], 127, "cannot be started: Exec format error"),
        (["--gpus", "99", "--", "python", "-c", "pass"], 2, "ranks need one each"),
    ],
)
def test_programs_that_cannot_be_started(flatout, launches, words, code, said):
    (flatout.folder / "not-a-program").write_bytes(b"\x00\x01")
    (flatout.folder / "not-a-program").chmod(0o755)
    done = flatout(*words, python=LOCAL_LAUNCHER, env={"TMPDIR": str(launches)})
    assert (done.code, done.out, done.left) == (code, "", [])
    assert done.err.startswith("flatout: ")
    assert said in done.err
    assert not list(launches.iterdir())


def test_the_launcher_needs_no_torch():
    code = "import sys, flatout.launch.local_launcher; assert not {'torch', 'numpy', 'click', 'rich'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=hang_s(30))


# -- whose failure counts


@pytest.mark.parametrize(
    ("how", "code", "ending"),
    [
        ("raise", 1, "with exit code 1"),
        ("hangs", 1, "with exit code 1"),
        ("os_exit", 7, "with exit code 7"),
        ("hook", 1, "with exit code 1"),
        ("SIGKILL", 137, r"by SIGKILL \(exit code 137\)"),
    ],
)
def test_the_first_failure_is_named(local_launcher, how, code, ending):
    """All ranks fail, and all but one because they have lost another.

    Those often exit before the first one.
    """
    done = local_launcher(BOUND, "1", how, launcher=LOCAL_LAUNCHER if how == "hangs" else changed(PATIENT))
    assert done.code == code
    named = re.search(
        rf"^flatout: rank 1 \(\S+, process \d+\) failed first, {ending}.*$", done.err, re.MULTILINE
    )
    assert named, done.err
    after = done.err[named.end() :]
    has_words = how in ("raise", "hangs", "hook")
    assert after.count("ValueError: the bad sample of rank 1") == has_words
    assert after.count("in fail\n") == has_words
    assert "Connection closed" not in after
    folder = Path(re.search(r"(/\S+)/rank\*\.log$", after)[1])
    assert {path.name for path in folder.glob("rank*.log")} == {"rank1.log", "rank2.log"}


def test_a_cause_that_is_observed_after_its_effect(local_launcher):
    """Rank 0 reports that it has lost another one. The other one reports nothing, and ends a moment later."""
    done = local_launcher(
        BOUND, "1", "late", procs=2, launcher=changed(f"{PATIENT}\nrank_monitor.CAUSE_WAIT_S = 5.0")
    )
    assert "rank 1 (" in done.err
    assert done.code == 7


def test_the_failure_of_rank_0_is_not_printed_twice(local_launcher):
    done = local_launcher(BOUND, "0", "raise")
    assert done.err.count("ValueError: the bad sample of rank 0") == 1
    assert "flatout: rank 0 (" in done.err
    assert done.code == 1


def test_without_a_crash_report_the_end_of_the_log_is_shown(local_launcher):
    """`python -I` disables flatout, and other programs never load it. Their output is all there is."""
    source = "import os, sys, time\nif os.environ['FLATOUT_RANK'] == '1':\n    print('last', 'line')\n    sys.exit('gone')\ntime.sleep(60)"
    for command in (
        ["python", "-I", "train.py"],
        ["sh", "-c", "[ $FLATOUT_RANK = 1 ] || exec sleep 60; echo last line; echo gone >&2; exit 1"],
    ):
        done = local_launcher(source, procs=2, command=command)
        assert done.code == 1
        assert re.search(
            r"rank 1 \(.*\) failed first, with exit code 1:\n(last line\ngone|gone\nlast line)\n", done.err
        ), done.err


def test_a_program_inside_a_script(local_launcher):
    """The rank is the shell. Its Python reports the error when it happens, and the shell ends much later."""
    source = NOTES + (
        "if rank == '1':\n    raise ValueError('inside')\n"
        "while not Path(os.environ['FLATOUT_LAUNCH'], 'rank1.failed').exists():\n    time.sleep(0.01)\nsys.exit(5)\n"
    )
    command = ["sh", "-c", "python train.py; code=$?; [ $FLATOUT_RANK = 0 ] || sleep 0.6; exit $code"]
    done = local_launcher(source, procs=2, command=command, launcher=changed(PATIENT))
    assert "rank 1 (" in done.err
    assert "ValueError: inside" in done.err
    assert done.code == 1


def test_a_helper_that_fails_is_no_failure_of_its_rank(local_launcher):
    source = (
        NOTES + "subprocess.run([sys.executable, '-c', '1 / 0'], stderr=subprocess.DEVNULL)\nprint('fine')\n"
    )
    done = local_launcher(source, procs=2)
    assert (done.code, done.out, done.err) == (0, "fine\n", "")


def test_only_the_first_is_explained(local_launcher, flatout):
    """All ranks fail.

    The explanation appears below the traceback of the first one, also where it takes longer to find.
    """
    (flatout.folder / "entry_of_test.py").write_text(
        "import os, time\ndef explain(error):\n    time.sleep(0.2 * (os.environ['FLATOUT_RANK'] == '1'))\n"
        "    return ['because of ' + str(error)]\n"
    )
    source = NOTES + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwords = Path(os.environ['FLATOUT_LAUNCH'], 'rank1.failed')\nnote('ready')\n"
        "while len(list(here.glob('ready.*'))) < 3 or rank != '1' and not words.exists():\n    time.sleep(0.01)\n"
        "raise ValueError(f'rank {rank}')\n"
    )
    done = local_launcher(
        source,
        env={"FLATOUT_EXPLAIN": "entry_of_test:explain", "PYTHONPATH": str(flatout.folder)},
        launcher=changed(PATIENT),
    )
    assert re.search(
        r"^flatout: rank 1 \(.*\nTraceback[^$]*^ValueError: rank 1\nflatout: because of rank 1\n",
        done.err,
        re.MULTILINE,
    ), done.err
    assert done.err.count("because of") == 1
    folder = Path(re.search(r"(/\S+)/rank\*\.log$", done.err, re.MULTILINE)[1])
    assert "because of" not in (folder / "rank2.log").read_text()


def test_an_explanation_delays_no_traceback(local_launcher, flatout):
    """Once a process group exists, torch prints a traceback with the rank before each line, but only after
    every earlier hook has run.
    """
    (flatout.folder / "entry_of_test.py").write_text(
        "import time\ndef explain(error):\n    time.sleep(600)\n"
    )
    source = NOTES + (
        "import io\nbefore = sys.excepthook\ndef prefixing(*what):\n    really, sys.stderr = sys.stderr, io.StringIO()\n    before(*what)\n"
        "    said, sys.stderr = sys.stderr.getvalue(), really\n"
        "    sys.stderr.write(''.join(f'[rank{rank}]: {line}' for line in said.splitlines(True)))\n"
        "sys.excepthook = prefixing\nif rank == '0':\n    raise ValueError('seen')\ntime.sleep(600)\n"
    )
    done = local_launcher(
        source, procs=2, env={"FLATOUT_EXPLAIN": "entry_of_test:explain", "PYTHONPATH": str(flatout.folder)}
    )
    assert "[rank0]: ValueError: seen\n" in done.err
    assert "rank 0 (" in done.err
    assert done.code == 1


def test_the_first_exception_may_be_reported_later(local_launcher):
    """The explained rank is chosen when its exception reaches the top level; that rank is named, too."""
    source = NOTES + (
        "folder = Path(os.environ['FLATOUT_LAUNCH'])\n"
        "if rank == '0':\n    (folder / 'event_fifo').write_text(f'failing 0 {os.getpid()} \\n')\n    note('rung')\n"
        "    time.sleep(0.5)\n    sys.exit(4)\nwhile not (here / 'rung.0').exists():\n    time.sleep(0.01)\nraise ValueError\n"
    )
    done = local_launcher(source, procs=2, launcher=changed(PATIENT))
    assert "rank 1 (" in done.err
    assert done.code == 1


@pytest.mark.parametrize(
    ("one", "other", "ending"),
    [
        ("raise ValueError", "os._exit(7)", "with exit code 1"),
        ("os._exit(7)", "raise ValueError", "with exit code 7"),
        ("os._exit(7)", "os._exit(8)", "with exit code 7"),
    ],
)
def test_the_order_is_kept_where_the_launcher_sleeps(begin, flatout, one, other, ending):
    """On a busy machine it receives several ends at once: output and process ends keep one order."""
    wait = "while not (here / f'go{rank}').exists():\n    time.sleep(0.01)\n"
    launcher = begin(f"note('ready', os.getpid())\n{wait}if rank == '1':\n    {one}\n{other}\n")
    zero, one_pid = (int(number) for number in noted(flatout.folder, "ready"))
    os.kill(launcher.pid, signal.SIGSTOP)
    for rank, number in ((1, one_pid), (0, zero)):
        (flatout.folder / f"go{rank}").touch()
        until(lambda number=number: not alive(number))
    os.kill(launcher.pid, signal.SIGCONT)
    _, err = launcher.communicate(timeout=hang_s(30))
    assert re.search(rf"rank 1 \(.*\) failed first, {ending}".encode(), err), err


def test_an_older_kernel(local_launcher):
    """Without pidfd_open (Linux 5.3) it learns only that some child has ended, and checks each."""
    without = changed(
        "def pidfd_open(pid):\n    raise OSError(38, 'Function not implemented')\nos.pidfd_open = pidfd_open"
    )
    done = local_launcher(BOUND, "1", "SIGKILL", launcher=without)
    assert done.code == 137
    assert "rank 1 (" in done.err


def test_ranks_that_continue_alone_are_named_once(begin, flatout):
    source = "while rank == '1' and not (here / 'go').exists():\n    time.sleep(0.01)"
    launcher = begin(source, ready=False, launcher=changed("rank_monitor.EXIT_NOTICE_S = 0.2"))
    said = launcher.stderr.readline().decode()
    assert re.fullmatch(
        r"flatout: rank 0 exited 0 s ago; still running: rank 1 \(process \d+\)\. Waiting for them; Ctrl-C ends them\.\n",
        said,
    )
    (flatout.folder / "go").touch()
    _, err = launcher.communicate(timeout=hang_s(30))
    assert (launcher.returncode, err) == (0, b"")


def test_a_rank_that_ends_early_is_waited_for(local_launcher, flatout):
    done = local_launcher(NOTES + "if rank == '1':\n    time.sleep(0.5)\n    note('late')\n", procs=2)
    assert (done.code, done.err, noted(flatout.folder, "late")) == (0, "", ["x"])


# -- no process remains

FAMILY = """
def child(number, **options):
    code = f"import os, time; open('{{}}.{rank}' .format('child{number}'), 'w').write(str(os.getpid())); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], **options)
worker = os.fork()
if not worker:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
child(1)
child(2, start_new_session=True)
while len(list(here.glob(f"child?.{rank}"))) < 2 or not all(path.read_text() for path in here.glob(f"child?.{rank}")):
    time.sleep(0.01)
note("family", " ".join([str(os.getpid()), str(worker), *(path.read_text() for path in here.glob(f"child?.{rank}"))]))
note("ready")
"""


def family(folder):
    return [int(word) for text in noted(folder, "family") for word in text.split()]


def test_a_failure_ends_everything(begin, flatout):
    """Ranks that save, ranks that ignore signals, their workers, and processes in other sessions: all are
    gone when the launcher is.
    """
    source = FAMILY + (
        """
def save(*what):
    note("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save if rank == "1" else signal.SIG_IGN)
while len(list(here.glob("ready.*"))) < 3:
    time.sleep(0.01)
if rank == "2":
    raise ValueError
time.sleep(600)
"""
    )
    launcher = begin(source, procs=3)
    _, err = launcher.communicate(timeout=hang_s(30))
    assert launcher.returncode == 1
    assert b"rank 2 (" in err
    assert [path.name for path in flatout.folder.glob("saved.*")] == ["saved.1"]
    assert len(family(flatout.folder)) == 12
    assert not any(alive(number) for number in family(flatout.folder))


@pytest.mark.parametrize("held", [False, True], ids=["running", "held"])
def test_killing_the_launcher_kills_everything(begin, flatout, launches, held):
    launcher = begin(FAMILY + "time.sleep(600)")
    if held:
        for number in family(flatout.folder):
            os.kill(number, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    until(lambda: not any(alive(number) for number in family(flatout.folder)), 3.0)
    until(lambda: not list(launches.iterdir()), 3.0)


def test_a_background_server_stays(local_launcher, flatout):
    """After a successful end nothing is killed: a program may leave a server behind."""
    source = NOTES + (
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "note('child', child.pid)"
    )
    process = flatout.start("--procs", "1", "--", "python", "-c", source, python=LOCAL_LAUNCHER)
    assert process.wait(30) == 0
    number = int(noted(flatout.folder, "child")[0])
    assert alive(number)
    os.kill(number, signal.SIGKILL)
    process.communicate()


# -- signals

COUNTING = """
seen = []
def hear(number, frame):
    seen.append(number)
    note("seen", " ".join(signal.Signals(number).name for number in seen))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hear)
note("ready")
until = time.monotonic() + 60
while not (here / "go").exists() and time.monotonic() < until:
    time.sleep(0.01)
"""
ALL = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM")


@pytest.mark.parametrize("to", ["process", "group"])
def test_signals_reach_every_rank_once(begin, flatout, to):
    launcher = begin(COUNTING)
    for at, name in enumerate(ALL):
        (os.kill if to == "process" else os.killpg)(launcher.pid, getattr(signal, name))
        until(lambda at=at: noted(flatout.folder, "seen") == [" ".join(ALL[: at + 1])] * 2)
    (flatout.folder / "go").touch()
    _, err = launcher.communicate(timeout=hang_s(30))
    assert (launcher.returncode, err) == (0, b"")  # the program handles them, saves, and ends well


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_an_unhandled_signal_ends_all(begin, number):
    launcher = begin("note('ready')\ntime.sleep(600)")
    os.kill(launcher.pid, number)
    _, err = launcher.communicate(timeout=hang_s(30))
    assert launcher.returncode == -number  # a shell says 128 + number, and its loop ends
    assert b"failed first" not in err


def test_the_second_one_does_not_wait(begin, flatout):
    """A rank that takes its time does not block for ever, but two signals of one `timeout` are one."""
    launcher = begin(COUNTING, launcher=changed("rank_monitor.REPEATED_SIGNAL_S = 2.0"))
    for times in (1, 2):
        os.kill(launcher.pid, signal.SIGTERM)
        until(
            lambda times=times: (
                [text.count("SIGTERM") for text in noted(flatout.folder, "seen")] == [times] * 2
            )
        )
    time.sleep(2.2)
    assert launcher.poll() is None
    os.kill(launcher.pid, signal.SIGTERM)
    _, err = launcher.communicate(timeout=hang_s(30))
    assert launcher.returncode == 137
    assert b"failed first" not in err


def test_nohup_holds(begin, flatout):
    """A hangup that no rank handles neither ends the launch nor makes a later failure a requested end."""
    source = "note('ready')\nwhile not (here / 'go').exists():\n    time.sleep(0.01)\nassert rank == '0', 'long after'"
    launcher = begin(source, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.kill(launcher.pid, signal.SIGHUP)
    time.sleep(0.1)
    (flatout.folder / "go").touch()
    _, err = launcher.communicate(timeout=hang_s(30))
    assert launcher.returncode == 1
    assert b"rank 1 (" in err
    assert b"AssertionError: long after" in err


SHELL = """
import os, signal, subprocess, sys, time
def in_front():
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
os.login_tty(0)
job = subprocess.Popen(sys.argv[1:], process_group=0, preexec_fn=in_front)
while os.WIFSTOPPED((status := os.waitpid(job.pid, os.WUNTRACED)[1])):
    open("stopped.shell", "w").write("x")
    while not os.path.exists("fg"):
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGCONT)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_terminal(begin, flatout):
    """Rank 0 reads the terminal; the others have one of equal size, at end of file.

    Ctrl-C reaches each rank once, Ctrl-Z stops all of them, and `fg` continues them.
    """
    typed, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 111, 0, 0))
    source = (
        "note('pid', os.getpid())\nnote('size', os.popen('stty size').read())\nnote('read', sys.stdin.readline().strip())\n"
        + COUNTING
    )
    shell = begin(
        source,
        ready=False,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=False,
        prefix=[sys.executable, "-c", SHELL],
    )
    os.close(terminal)
    os.write(typed, b"hello rank 0\n")
    until(lambda: len(noted(flatout.folder, "ready")) == 2)
    assert noted(flatout.folder, "read") == ["hello rank 0", ""]
    assert noted(flatout.folder, "size") == ["33 111\n"] * 2
    os.write(typed, b"\x03")
    until(lambda: noted(flatout.folder, "seen") == ["SIGINT"] * 2)
    os.write(typed, b"\x1a")
    until(lambda: noted(flatout.folder, "stopped"))
    until(lambda: [state(int(number)) for number in noted(flatout.folder, "pid")] == ["T", "T"])
    (flatout.folder / "fg").touch()
    until(lambda: "T" not in [state(int(number)) for number in noted(flatout.folder, "pid")])
    (flatout.folder / "go").touch()
    assert shell.wait(30) == 0
    assert noted(flatout.folder, "seen") == ["SIGINT"] * 2
    os.close(typed)


def test_a_stop_from_another_process_stops_the_ranks(begin, flatout):
    """Without a terminal, as a queue does it.

    Only this test could continue its launcher, so the launcher stays awake, as the kernel's rules require.
    """
    launcher = begin("note('pid', os.getpid())\n" + COUNTING)
    pids = [int(number) for number in noted(flatout.folder, "pid")]
    os.kill(launcher.pid, signal.SIGTSTP)
    until(lambda: all(state(number) in "SR" for number in pids))
    (flatout.folder / "go").touch()
    assert launcher.wait(30) == 0


# -- the rule itself


def first(*signs, lost=()):
    return first_failed(signs, lambda rank: rank in lost)


def test_the_rule():
    failing, leaving = (
        [RankEvent(rank, FAILING) for rank in range(4)],
        [RankEvent(rank, EXITING) for rank in range(4)],
    )

    def ended(rank, code, **more):
        return RankEvent(rank, EXITED, code, **more)

    assert first(failing[2], failing[1], ended(1, 1), ended(2, 1)) == 2
    assert first(leaving[0], ended(0, 0), ended(1, 0)) is None
    assert first(leaving[1], failing[0], ended(0, 1), ended(1, 3)) == 1
    assert first(leaving[1], failing[0], ended(0, 1), ended(1, 0)) == 0
    assert first(failing[0], ended(2, -9), ended(0, 1), lost={0}) == 2
    assert first(failing[0], ended(2, -15, asked_to_exit=True), ended(0, 1), lost={0}) == 0
    assert first(failing[3], failing[0], lost={0, 3}) == 3
    assert first(RankEvent(1, FAILING, from_rank=False), ended(0, 1), ended(1, 0)) == 0
    assert first(RankEvent(1, FAILING, from_rank=False), ended(0, 1), ended(1, 1)) == 1
    assert first(leaving[1], ended(1, -9, asked_to_exit=True, killed=True)) is None


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3389",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_messages_of_a_rank_that_has_lost_another(words):
    assert LOST_ANOTHER.search(words)
    assert not LOST_ANOTHER.search("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB")


def test_the_shown_output():
    words = "Traceback (most recent call last):\n  x\nValueError: a\n"
    assert end_of_output(words, "loss 1\n" + words + "flatout: because\n") == words + "flatout: because"
    assert (
        end_of_output(
            words, "[rank1]: " + words.strip().replace("\n", "\n[rank1]: ") + "\nflatout: because\n"
        )
        == words + "flatout: because"
    )
    assert end_of_output(words, "") == words.rstrip()
    assert end_of_output("", "\n".join(map(str, range(100)))).splitlines() == [
        str(line) for line in range(70, 100)
    ]
