"""The conclusions of supervision, on invented clocks: hangs, stacks, exits, and whether a restart makes sense."""

import re
import subprocess
import sys

import psutil
import pytest
from processes import until

from flatout.job import heartbeat
from flatout.launch.hang import (
    MIN_START_LIMIT_S,
    POLL_S,
    STACK_TIMEOUT_S,
    Frame,
    ProgramProcesses,
    Stack,
    stack_in,
)
from flatout.launch.restart_policy import Attempt, AttemptOutcome, RestartHistory, outcome_of


@pytest.mark.processes
def test_a_hang_is_a_time_without_a_sign_of_life_of_any_process(tmp_path):
    """The pages are real; the clock is invented."""
    processes, now = ProgramProcesses(str(tmp_path), 0.0, 3.0), 0.0

    def polled(kind, seconds):
        """Poll until an event; return it and the time that it took."""
        nonlocal now
        begun = now
        while now - begun < seconds:
            now += POLL_S
            event = processes.poll(now)
            if event is not None:
                assert event.kind == kind
                return event, now - begun
        return None, seconds

    assert polled("hung", 30.0)[0] is None  # no process yet
    slots = heartbeat.begin(str(tmp_path)).slots
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from flatout.job import heartbeat; import sys, time\n"
            "slots = heartbeat.begin(sys.argv[1]).slots; slots[heartbeat.Slot.STEPS] = 1; print(flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        child.stdout.readline()
        processes.poll(now)
        for _ in range(20):  # one process that works clears the other
            slots[heartbeat.Slot.BATCHES] += 1
            assert polled("hung", 2.0)[0] is None
        slots[heartbeat.Slot.STEPS] = 2
        event, silent_s = polled("hung", 30.0)
        assert event.message.startswith(f"process {child.pid} has finished no step")  # the one behind
        assert re.search("; 1 other waits for it. It (waits|runs): its Python line is unknown", event.message)
        assert 3.0 + STACK_TIMEOUT_S <= silent_s <= 3.0 + STACK_TIMEOUT_S + 3 * POLL_S
        slots[heartbeat.Slot.STEPS] += 1
        process = psutil.Process(child.pid)
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        event, _ = polled("stopped", 30.0)
        assert event.message.startswith(
            f"process {child.pid} was stopped (SIGSTOP) for 3 s; it was continued"
        )
        until(lambda: process.status() != psutil.STATUS_STOPPED)
        slots[heartbeat.Slot.STEPS] += 1
        assert polled("hung", 2.0)[0] is None
        now += 100.0  # the machine slept
        assert polled("hung", 2.0)[0] is None
    finally:
        child.kill()
        child.communicate()
    for name in tmp_path.glob("heartbeat.*"):
        name.write_bytes(bytes(heartbeat.PAGE_BYTES))  # no step yet
    processes, now = ProgramProcesses(str(tmp_path), 0.0, 3.0), 0.0
    assert polled("hung", 60.0)[0] is None
    assert MIN_START_LIMIT_S > 60.0


STACK = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/_dynamo/eval_frame.py", line 7 in compile
  File "/home/me/train \"1\".py", line 40 in step
  File "/home/me/train \"1\".py", line 90 in <module>
Fatal nonsense
"""


def test_a_stack_is_read_and_its_own_line_found():
    main = stack_in(STACK)
    assert main.user_frame == Frame('/home/me/train "1".py', 40, "step")
    assert (
        main.text
        == '/home/me/train "1".py, line 40, in step (from there in compile of torch/_dynamo/eval_frame.py)'
    )
    assert stack_in(STACK.partition("Current")[0]).user_frame is None
    assert stack_in("") == stack_in("no stack\n  File broken") == Stack()
    assert Stack().text == "its Python line is unknown, because it does not respond"


def test_how_a_program_has_ended():
    def of(code, *failures, kernel=False):
        return outcome_of(code, "`train`", failures, kernel, 7)

    lost = {
        "kinds": ["RuntimeError"],
        "message": "Connection closed by peer",
        "places": [["/home/me/train.py", 3]],
    }
    root = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)"
    report = {"kinds": ["ChildFailedError"], "message": root, "places": []}
    assert (of(-9).kind, of(-9).code) == ("signal", 137)
    assert "may have run out of memory" in of(-9, kernel=None).message
    assert of(-9, kernel=True).kind == of(1, kernel=True).kind == "memory"
    assert (
        of(1, {"kinds": ["OutOfMemoryError", "RuntimeError"], "message": "CUDA out of memory. Tried"}).kind
        == "memory"
    )
    assert (
        of(
            1,
            {
                "kinds": ["RuntimeError"],
                "message": "[enforce fail] DefaultCPUAllocator: can't allocate memory",
            },
        ).kind
        == "memory"
    )
    assert of(1, {"kinds": ["BrokenPipeError"], "message": "x"}).kind == "output closed"
    assert (
        of(1, lost, report).message == "`train` failed after step 7: rank 1 was the first to fail, by SIGKILL"
    )
    named = of(
        1,
        {
            "kinds": ["ValueError"],
            "message": "a bad sample\nmore",
            "places": [["/home/me/train.py", 3], ["/x/site-packages/torch/a.py", 9]],
        },
        report,
    )
    assert (named.message, named.place) == (
        "`train` failed after step 7 with ValueError: a bad sample",
        "/home/me/train.py, line 3",
    )


def course_of(*attempts, kind="exit"):
    """The message after the last of these starts: (steps, base, saves, kept) each."""
    course, why = RestartHistory(), ""
    for number, (steps, base, saves, kept) in enumerate(attempts, 1):
        attempt = Attempt(
            number, steps=steps, resumed_step=base, checkpoint_count=saves, checkpoint_step=kept
        )
        course.attempts.append(attempt)
        course.record_attempt(attempt)
        why = course.why_not_restarted(AttemptOutcome(kind, 1, "it failed", advice="Take less"), attempt, 20)
    return why


def test_whether_a_restart_makes_sense():
    assert course_of((57, 0, 5, 50)) == ""
    assert course_of((57, 0, 5, 50), (7, 50, 0, 0), (7, 50, 0, 0)) == ""
    assert course_of((57, 0, 5, 50), (7, 50, 0, 0), (7, 50, 0, 0), (7, 50, 0, 0)).startswith(
        "3 restarts in a row made no progress beyond step 5"
    )
    assert course_of((57, 0, 5, 50), (7, 50, 0, 0), (7, 50, 0, 0), (17, 50, 1, 60), (3, 60, 0, 0)) == ""
    assert (
        course_of((10, 0, 0, 0), (20, 0, 0, 0), (30, 0, 0, 0), (40, 0, 0, 0), (50, 0, 0, 0)) == ""
    )  # no checkpoint is reported, but it gets further
    assert course_of((10, 0, 0, 0), (9, 0, 0, 0), (8, 0, 0, 0), (10, 0, 0, 0)) != ""
    assert course_of((0, 0, 0, 0)) == "it failed before its first step and would fail again"
    assert course_of((0, 0, 0, 0), kind="signal") == ""
    assert (
        course_of((57, 0, 0, 0), kind="memory")
        == "the next start would run out of memory at the same place. Take less"
    )
    assert course_of((57, 0, 5, 50), kind="memory") == ""
    assert course_of(*[(10 * at, 0, 1, 10 * at) for at in range(1, 22)]).startswith(
        "that was restart 20 of 20"
    )
