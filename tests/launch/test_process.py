"""Programs as process groups: their terminal, their output, pausing them, and ending all of them."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, state, until

from flatout.launch.process import HEAD_BYTES, TAIL_BYTES, ProgramRun
from flatout.schema.errors import ProgramNotFound

pytestmark = pytest.mark.processes


@pytest.fixture
def start(tmp_path):
    """``start(code)`` runs Python code as a Program with logs in tmp_path."""
    begun = []

    def begin(code, argv=None, **options):
        begun.append(
            ProgramRun(
                argv or [sys.executable, "-c", code],
                os.environ,
                tmp_path / "out",
                tmp_path / "err",
                **options,
            )
        )
        return begun[-1]

    yield begin
    for program in begun:
        program.end(0.0)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_output_and_exit_code(start, tmp_path, code):
    program = start(f"import sys; print('out'); print('err', file=sys.stderr); sys.exit({code})")
    assert program.end(20.0) == code
    assert (tmp_path / "out").read_bytes() == b"out\n"
    assert (tmp_path / "err").read_bytes() == b"err\n"


def test_a_program_killed_by_a_signal(start):
    assert start("import os; os.kill(os.getpid(), 11)").end(20.0) == -signal.SIGSEGV


def test_a_program_that_cannot_be_started(start):
    with pytest.raises(ProgramNotFound, match="cannot be started"):
        start("", argv=["/nonexistent/program"])


def test_its_input_is_a_terminal_at_its_end(start, tmp_path):
    """Some scripts call ``stty size`` at import; ``input()`` meets the end of file instead of waiting for
    ever.
    """
    program = start(
        "import sys, subprocess\nprint(sys.stdin.isatty())\nprint(len(subprocess.check_output(['stty', 'size']).split()))\n"
        "for _ in range(20):\n    try:\n        input()\n    except EOFError:\n        print('end')\nprint(repr(sys.stdin.read()))"
    )
    assert program.end(20.0) == 0
    assert (tmp_path / "out").read_text() == "True\n2\n" + 20 * "end\n" + "''\n"


@pytest.mark.timeout(120)
def test_a_hundred_megabytes_of_output(start, tmp_path):
    program = start(
        "import sys\nsys.stdout.write('first line\\n')\nfor _ in range(1000): sys.stdout.write('x' * 99_999 + '\\n')\n"
        "sys.stdout.write('last line\\n')"
    )
    assert program.end(100.0) == 0
    kept = (tmp_path / "out").read_bytes()
    assert kept.startswith(b"first line\n")
    assert kept.endswith(b"last line\n")
    assert b"bytes left out" in kept
    assert len(kept) <= HEAD_BYTES + 2 * TAIL_BYTES + 100
    assert program.out.total == 1000 * 100_000 + 21


def test_output_that_fits_is_whole(start, tmp_path):
    program = start("import sys\nfor at in range(20000): print(at)")
    assert program.end(20.0) == 0
    assert (tmp_path / "out").read_text().split() == [str(at) for at in range(20000)]


def test_pausing_stops_every_process_of_it(start, tmp_path):
    """Loader workers and their grandchildren stop too, also those in their own session; no step is counted
    meanwhile.
    """
    tick = "import os, sys, time\nwhile True:\n    open(sys.argv[1] + str(os.getpid()), 'a').write('x')\n    time.sleep(0.01)\n"
    code = (
        f"import subprocess, sys\ntick = {tick!r}\n"
        f"for session in (False, True): subprocess.Popen([sys.executable, '-c', tick, {str(tmp_path / 'tick-')!r}], start_new_session=session)\n"
        f"sys.argv = ['', {str(tmp_path / 'tick-')!r}]\nexec(tick)"
    )
    program = start(code)

    def files():
        return sorted(tmp_path.glob("tick-*"))

    until(lambda: len(files()) == 3 and all(f.stat().st_size for f in files()))
    numbers = [int(f.name.partition("-")[2]) for f in files()]
    program.stop()
    until(lambda: all(state(n) == "T" for n in numbers))
    sizes = [f.stat().st_size for f in files()]
    time.sleep(0.3)
    assert [f.stat().st_size for f in files()] == sizes
    program.resume()
    until(lambda: all(f.stat().st_size > size for f, size in zip(files(), sizes, strict=True)))
    program.stop()
    program.end(0.0)
    until(lambda: not any(alive(n) for n in numbers))


def test_ending_ends_the_whole_group_also_where_the_leader_is_gone(start, tmp_path):
    note = tmp_path / "child"
    program = start(
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))"
    )
    until(lambda: note.exists() and note.read_text())
    child = int(note.read_text())
    until(lambda: program.exit_code is not None)
    assert alive(child)
    assert program.end(1.0) == 0
    until(lambda: not alive(child))


def test_a_program_that_ignores_the_request_to_end(start):
    program = start(
        "import signal, time\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)"
    )
    time.sleep(0.3)
    program.end(0.2)
    assert not alive(program.process.pid)


@pytest.mark.parametrize("held", [False, True], ids=["running", "held"])
def test_it_dies_with_flatout(tmp_path, held):
    """Killing flatout outright leaves no program behind, not even a stopped one."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom flatout.launch.process import ProgramRun\nfolder = Path(sys.argv[1])\n"
        "program = ProgramRun([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ, folder / 'out', folder / 'err')\n"
        f"time.sleep(0.2)\n{'program.stop()' if held else ''}\nprint(program.process.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(child))


def test_ending_twice_does_nothing(start):
    program = start("pass")
    assert program.end(20.0) == 0
    program.end(0.0)
    assert not alive(program.process.pid)
