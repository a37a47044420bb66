"""Texts: recorded failures that cannot be provoked here, logs of many ranks, mangled texts, and texts that
must stay unknown.
"""

import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.diagnose.explain import explain_text, format_lines
from flatout.diagnose.failures import TABLE
from flatout.diagnose.logs import condense
from flatout.diagnose.tracebacks import read_failures

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(Path(__file__).parent))
from recorded import FRAMES, RECORDED  # noqa: E402


@pytest.mark.parametrize("one", RECORDED, ids=[f"{at}-{one.code}" for at, one in enumerate(RECORDED)])
def test_recorded_failures(one):
    info = explain_text(one.text)
    assert [each.finding.rule for each in info] == [one.code]
    for word in one.says:
        assert word in format_lines(info[0].finding, info[0].ranks)[0] + info[0].finding.fix
    assert info[0].finding.fix
    if "/home/me/train.py" in one.text:
        place = info[0].finding.place
        assert place is not None
        assert (place.file, place.line, place.text) == (
            "/home/me/train.py",
            24,
            "loss = criterion(model(images), labels)",
        )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CUDA out of memory", "FE040"),
        ("HIP out of memory", "FE040"),
        ("MPS backend out of memory", "FE040"),
        ("Expected all tensors to be on the same device", "FE001"),
        ("CUDA error: device-side assert triggered", "FE035"),
        ("DataLoader worker (pid 123) is killed by signal", "FE071"),
        ("DataLoader worker (pid 123) is killed by signal: Bus error", "FE043"),
        ("mat1 and mat2 shapes cannot be multiplied", "FE020"),
        ("Killed", "FE042"),
        ("NCCL timeout", "FE086"),
        ("Watchdog caught collective operation timeout", "FE086"),
    ],
)
def test_the_fixed_beginning_of_a_message_is_enough(text, code):
    (info,) = explain_text(text)
    assert info.finding.rule == code
    assert "  " not in info.finding.message
    assert "()" not in info.finding.message
    assert "cpu and on cpu" not in info.finding.message


WATCHDOG = (
    "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType={}, NumelIn=1024, NumelOut=1024, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("waits", "says"),
    [
        (
            [(0, 12, "ALLREDUCE"), (1, 12, "_ALLGATHER_BASE")],
            "as number 12, rank 0 in ALLREDUCE of 1,024 elements and rank 1 in _ALLGATHER_BASE of 1,024 elements",
        ),
        ([(1, 7, "BROADCAST")], "rank 1 waited 600 s in BROADCAST number 7, and rank 0 never called it"),
    ],
)
def test_a_timeout_names_the_operations_of_the_ranks(waits, says):
    (info,) = explain_text("".join(WATCHDOG.format(*wait) for wait in waits))
    assert info.finding.rule == "FE086"
    assert says in info.finding.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ValueError: num_samples should be a positive integer value, but got num_samples=0", "FE077"),
        (
            "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()",
            "FE008",
        ),
        (
            "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f66ac1e6fc0>: attribute lookup <lambda> on __main__ failed",
            "FE074",
        ),
    ],
)
def test_failures_of_data_sets_and_modules(text, code):
    (info,) = explain_text(text)
    assert info.finding.rule == code


# -- pages


def test_codes_and_names_are_given_once():
    assert len({kind.code for kind in TABLE}) == len({kind.name for kind in TABLE}) == len(TABLE)
    assert [kind.code for kind in TABLE] == sorted(
        (kind.code for kind in TABLE), key=lambda code: int(code[2:])
    ), "the table is in the order of the codes"


def test_every_kind_has_its_page():
    for kind in TABLE:
        assert 0 < len(kind.title) < 100, kind
        assert kind.section("Why it happens"), kind
        assert bool(kind.section("Fix")) != bool(kind.section("How to fix it")), kind
        assert not re.search(r"\{\w+(\|[^}]*)?\}", kind.section("Fix")), kind  # every template is filled
        sources = kind.section("Sources").splitlines()
        assert sources, kind
        assert all(line.startswith("https://") for line in sources), kind


# -- unknown texts

OWN = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    {line}
{error}
"""
ORDINARY = [
    ("import models.resnet", "ModuleNotFoundError: No module named 'models.resnet'"),
    ("raise ValueError(text)", "ValueError: not enough memory in the replay buffer for 3 sizes"),
    (
        "raise ValueError('Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 1]))')",
        "ValueError: Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 1]))",
    ),
    (
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ),
    ("check(x)", "ValueError: size mismatch in the configuration"),
    ("check(x)", "RuntimeError: the device is not on the same planet"),
    ("open('data.csv')", "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'"),
    ("socket.bind(('', 80))", "OSError: [Errno 98] Address already in use"),
    ("pickle.load(file)", "EOFError: Ran out of input"),
    ("pickle.load(file)", "_pickle.UnpicklingError: invalid load key, '<'."),
    ("shutil.copy(a, b)", "OSError: [Errno 28] No space left on device"),
    ("time.sleep(9)", "KeyboardInterrupt"),
    ("import triton", "ModuleNotFoundError: No module named 'triton'"),
    ("table['RANK']", "KeyError: 'RANK'"),
    (
        "pickle.dumps(f)",
        "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f0>: attribute lookup <lambda> on __main__ failed",
    ),
    ("copy.deepcopy(db)", "TypeError: cannot pickle 'sqlite3.Connection' object"),
    ("db.connect()", "RuntimeError: failed to connect to db.internal:5432"),
    ("call()", "myproject.errors.UserError: the budget is gone"),
    ("call()", "myproject.errors.Unsupported: this codec"),
    ("a + b", "ValueError: operands could not be broadcast together with shapes (3,) (4,)"),
    ("loop()", "RuntimeError: dictionary changed size during iteration"),
    ("loop()", "RuntimeError: Event loop is closed"),
    ("image.load()", "OSError: image file is truncated (3 bytes not processed)"),
    ("sock.recv(1)", "RuntimeError: Socket Timeout"),
]


@pytest.mark.parametrize(("line", "error"), ORDINARY, ids=[f"{at}" for at in range(len(ORDINARY))])
def test_ordinary_errors_stay_unknown(line, error):
    assert explain_text(OWN.format(line=line, error=error)) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the kernel was killed by a new design",
        "Killed it! 97 % accuracy\nbest epoch 12",
        "Traceback (most recent call last):",
        "[rank0]: hello\n[rank1]: there",
        "WARNING: out of memory is possible",
        "sending SIGKILL to stragglers in 10 s",
        "HTTP status code 137 items",
        "RuntimeError",
        "RuntimeError: ",
    ],
)
def test_ordinary_words_are_no_failure(text):
    assert explain_text(text) == []


@given(
    st.text(st.characters(exclude_categories=("Cs", "Ll")), max_size=400)
)  # every message of a failure has a small letter
@example("\x00\x1b[31mTraceback (most recent call last):\n")
@example("Traceback (most recent call last):\n" * 3)
@example("[rank99999999999999999999]: x")
@example("Error(s) in loading state_dict for X:\n\tsize mismatch for")
def test_any_text_is_read(text):
    assert explain_text(text) == []
    for failure in read_failures(text):
        assert isinstance(failure.to_json(), dict)


@given(st.sampled_from(RECORDED), st.integers(0, 4000), st.integers(0, 4000), st.text(max_size=30))
def test_mangled_texts_never_raise_and_never_name_another_kind(one, begin, end, noise):
    """A piece is cut out and replaced.

    The result is the right kind, a related kind of the same crash, or none.
    """
    begin, end = sorted((begin % (len(one.text) + 1), end % (len(one.text) + 1)))
    info = explain_text(one.text[:begin] + noise + one.text[end:])
    assert {each.finding.rule for each in info} <= {one.code, *NEAR.get(one.code, ())}
    for each in info:
        assert "\x1b" not in "".join(format_lines(each.finding))


# A truncated text may say less: a launcher's summary without its tail, a bus error without its worker, a full
# memory reported by cuBLAS.
NEAR = {"FE043": ("FE071",), "FE089": ("FE042",), "FE040": ("FE051",)}


@given(st.sampled_from(RECORDED), st.integers(0, 100))
def test_truncated_texts_never_name_another_kind(one, cut):
    info = explain_text(one.text[: len(one.text) * cut // 100])
    assert {each.finding.rule for each in info} <= {one.code, *NEAR.get(one.code, ())}


# -- logs

OOM = next(one for one in RECORDED if one.code == "FE040").text


def test_ranks_with_interleaved_output():
    by_rank = [[f"[rank{rank}]: {line}" for line in OOM.splitlines()] for rank in (0, 3)]
    mixed = "\n".join(line for pair in zip(*by_rank, strict=True) for line in pair)
    info = explain_text("step 1\n" + mixed + "\nstep 2")
    assert [(one.finding.rule, one.ranks) for one in info] == [("FE040", [0, 3])]
    assert format_lines(info[0].finding, info[0].ranks)[0].startswith("rank 0, 3: ")


@pytest.mark.parametrize("label", ["[default{rank}]:", "[1,{rank}]<stderr>:", "[rank{rank}]:"])
def test_labels_of_launchers(label):
    text = "\n".join(label.format(rank=2) + line for line in OOM.splitlines())
    info = explain_text(text)
    assert [(one.finding.rule, one.ranks) for one in info] == [("FE040", [2])]


def test_lines_with_a_timestamp():
    text = "\n".join(f"2026-11-21T22:10:{at:02d}.118Z {line}" for at, line in enumerate(OOM.splitlines()))
    info = explain_text(text)
    assert [one.finding.rule for one in info] == ["FE040"]
    assert info[0].finding.place is not None
    assert info[0].finding.place.line == 24


def test_the_root_of_a_chain_and_its_consequences():
    """A program error raised while handling torch's does not hide it; a rank's own output takes precedence
    over torchrun's summary.
    """
    own = OWN.format(line="raise SystemError(1)", error="SystemError: 1")
    chained = OOM + "\nDuring handling of the above exception, another exception occurred:\n\n" + own
    assert [one.finding.rule for one in explain_text(chained)] == ["FE040"]
    launcher = next(one for one in RECORDED if one.code == "FE089").text
    assert [one.finding.rule for one in explain_text(OOM + "\n" + launcher)] == ["FE040"]


def test_a_worker_has_its_own_traceback():
    text = (
        FRAMES
        + """KeyError: Caught KeyError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 12, in __getitem__
    return self.labels[name]
KeyError: 'img7'
"""
    )
    (info,) = explain_text(text)
    assert info.finding.rule == "FE070"
    assert (
        "KeyError in DataLoader worker process 1 at /home/me/data.py:12 in __getitem__: 'img7'"
        in info.finding.message
    )
    inner = text.replace("KeyError: Caught KeyError", "RuntimeError: Caught RuntimeError")
    inner = inner.replace(
        "KeyError: 'img7'", "RuntimeError: grad can be implicitly created only for scalar outputs"
    )
    assert [one.finding.rule for one in explain_text(inner)] == ["FE064"]


def test_a_worker_that_ends_while_it_hands_over_a_batch():
    text = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    for batch in loader:
  File "/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py", line 1300, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
  File "/usr/lib/python3/dist-packages/torch/multiprocessing/reductions.py", line 541, in rebuild_storage_fd
    fd = df.detach()
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
    chunk = read(handle, remaining)
ConnectionResetError: [Errno 104] Connection reset by peer
"""
    assert [one.finding.rule for one in explain_text(text)] == ["FE071"]
    assert explain_text(text.replace("rebuild_storage_fd", "ask").replace("_try_get_data", "ask")) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("train.sh: line 3: 812 Killed   python train.py", "FE042"),
        ("Command exited with code 137", "FE042"),
        ("epoch 1\nSegmentation fault (core dumped)", "FE045"),
        ("epoch 1\nBus error (core dumped)", "FE043"),
        ("epoch 1\nIllegal instruction (core dumped)", "FE045"),
        ("process exit code: -9", "FE042"),
    ],
)
def test_a_log_that_ends_without_an_error(text, code):
    assert [one.finding.rule for one in explain_text(text)] == [code]


def test_an_endless_log_keeps_its_tracebacks():
    """A failure in the middle of 200,000 lines is found, and the kept text is bounded."""

    def log():
        yield from (f"step {at} loss 0.{at}" for at in range(100_000))
        yield from OOM.splitlines()
        yield from (f"[rank1]: waiting {at}" for at in range(100_000))

    text = condense(io.StringIO("\n".join(log())))
    assert len(text.splitlines()) < 10_000
    assert [one.finding.rule for one in explain_text(text)] == ["FE040"]
    assert max(map(len, condense(io.StringIO("x" * 300_000)).splitlines())) <= 1 << 14


def test_terminal_control_sequences_are_removed():
    text = OWN.format(
        line="model(x\x1b[2J)",
        error="RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\x1b]0;owned\x07",
    )
    (info,) = explain_text(text)
    assert "\x1b" not in "\n".join(format_lines(info.finding))
    assert info.finding.rule == "FE020"
