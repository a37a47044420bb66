"""The conclusions of supervision, without a process: limits, stacks, exits, and whether a restart makes
sense.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.job.heartbeat import EVALUATING, TRAINING
from flatout.launch.process_stacks import COMPILES, Frame, Stack, stacks_in
from flatout.launch.restart_policy import Attempt, Ending, RestartHistory, ending_of
from flatout.launch.stall_limits import FLOORS_S, LOOK_S, StallTimer

# A few long steps among many short ones, in any order.
LENGTHS = st.tuples(
    st.lists(st.floats(0.6, 30.0), min_size=1, max_size=6),
    st.integers(0, 400),
    st.randoms(use_true_random=False),
)


@given(LENGTHS)
def test_the_limit_is_five_times_the_99th_percentile_and_never_below_the_floor(drawn):
    """Steps of any length, sampled every half second: the limit is that of the exact lengths, up to the
    resolution of sampling.
    """
    long, short, draw = drawn
    lengths = [*long, *[0.05] * short]
    draw.shuffle(lengths)
    silence, now, next_look = StallTimer(0.0), 0.0, LOOK_S
    silence.observe(0.0, 1, 0, TRAINING)
    moments = []
    for length in lengths:
        now += length
        moments.append(now)
    heartbeats = 0
    while heartbeats < len(moments):
        heartbeats = sum(moment <= next_look for moment in moments)
        silence.observe(next_look, heartbeats + 1, heartbeats, TRAINING)
        next_look += LOOK_S
    ordered = sorted(lengths, reverse=True)
    percentile = ordered[int(len(lengths) * 0.01)]
    exact = max(FLOORS_S[TRAINING], 5 * percentile)
    assert silence.limit_s >= FLOORS_S[TRAINING]
    assert abs(silence.limit_s - exact) <= 5 * 2 * LOOK_S
    assert silence.limit_s <= max(FLOORS_S[TRAINING], 5 * (ordered[0] + LOOK_S))


def test_the_current_activity_decides_the_limit():
    silence = StallTimer(0.0, floor_s=3.0)
    silence.observe(1.0, 1, 1, TRAINING)
    assert silence.limit_s == 3.0
    silence.observe(2.0, 2, 1, EVALUATING)
    assert silence.limit_s == 300.0  # a shorter minimum stall is for steps
    assert silence.lasts_s(12.0) == 10.0
    silence.pass_over(8.0)
    assert silence.lasts_s(12.0) == 2.0


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
    main, other = stacks_in(STACK)
    assert main.own_line == Frame('/home/me/train "1".py', 40, "step")
    assert main.passes(COMPILES)
    assert (
        main.words
        == '/home/me/train "1".py, line 40, in step (from there in compile of torch/_dynamo/eval_frame.py)'
    )
    assert not other.passes(COMPILES)
    assert other.own_line is None
    assert stacks_in("") == stacks_in("no stack\n  File broken") == []
    assert Stack(()).words == "no Python code"


def test_how_a_program_has_ended():
    def of(code, *failures, kernel=False):
        return ending_of(code, "`train`", failures, kernel, 7)

    lost = {
        "kinds": ["RuntimeError"],
        "said": "Connection closed by peer",
        "places": [["/home/me/train.py", 3]],
    }
    root = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)"
    report = {"kinds": ["ChildFailedError"], "said": root, "places": []}
    assert (of(-9).kind, of(-9).code) == ("signal", 137)
    assert "may have run out of memory" in of(-9, kernel=None).what
    assert of(-9, kernel=True).kind == of(1, kernel=True).kind == "memory"
    assert (
        of(1, {"kinds": ["OutOfMemoryError", "RuntimeError"], "said": "CUDA out of memory. Tried"}).kind
        == "memory"
    )
    assert (
        of(
            1,
            {"kinds": ["RuntimeError"], "said": "[enforce fail] DefaultCPUAllocator: can't allocate memory"},
        ).kind
        == "memory"
    )
    assert of(1, {"kinds": ["BrokenPipeError"], "said": "x"}).kind == "unheard"
    assert of(1, lost, report).what == "`train` failed after step 7: rank 1 was the first to fail, by SIGKILL"
    named = of(
        1,
        {
            "kinds": ["ValueError"],
            "said": "a bad sample\nmore",
            "places": [["/home/me/train.py", 3], ["/x/site-packages/torch/a.py", 9]],
        },
        report,
    )
    assert (named.what, named.place) == (
        "`train` failed after step 7 with ValueError: a bad sample",
        "/home/me/train.py, line 3",
    )


def course_of(*attempts, kind="exit"):
    """The message after the last of these starts: (steps, base, saves, kept) each."""
    course, why = RestartHistory(), ""
    for number, (steps, base, saves, kept) in enumerate(attempts, 1):
        attempt = Attempt(number, 0.0, steps=steps, base=base, saves=saves, kept=kept)
        course.attempts.append(attempt)
        course.note(attempt)
        why = course.why_not_again(Ending(kind, 1, "it failed", advice="Take less"), attempt, 20)
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
