"""`flatout kernel` on bad days: a kernel that crashes, one that hangs, names that are nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

FAULTY = '''\
import ctypes, os, time
import torch
from flatout.kernels.kernel import Case


def doubled(x):
    return x * 2


def doubled_cases():
    return [Case("9", lambda draw: {"x": torch.randn(9, generator=draw)})]


def fails(x):
    """Its second call ever touches what is not its own; its fourth does not end."""
    with open("calls", "a") as calls:
        calls.write("x")
        call = calls.tell()
    if call == 2:
        ctypes.string_at(8)
    if call == 4:
        time.sleep(1000)
    return x * 2


def too_far(x):
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * 4 + 4)
    return y.mul_(2)


reference, cases = doubled, doubled_cases
'''


def test_a_crash_fails_one_check_and_one_that_hangs_ends_them(flatout, script):
    script(FAULTY, "faulty.py")
    done = flatout("kernel", "check", "faulty.py:fails", "--limit", "20s")
    assert done.code == 1
    assert not done.left
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert "ok       fails: values" in done.out
    assert "FAILED   fails: the same twice   it touched memory that is not its own (SIGSEGV)" in done.out
    assert "FAILED   fails: memory" in done.out
    assert "`--limit` gives it longer" in done.out
    assert lines[-1] == ["1", "ok, 2 failed, 1 not run"]


def test_what_one_element_too_far_does(flatout, script):
    """Values are right, and stay right on most days; the forbidden page sees it."""
    script(FAULTY, "faulty.py")
    done = flatout("kernel", "check", "faulty.py:too_far", "--quiet")
    assert done.code == 1
    assert "FAILED   too_far: memory" in done.out
    assert "SIGSEGV" in done.out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("check", "nothing.py:f"), 2, "there is no kernel or file 'nothing.py'"),
        (("bench", "nothing"), 2, "Our own are layer_norm"),
        (("new", "My-Kernel"), 2, "cannot be a kernel's name"),
        (("new", "there"), 4, "exists already"),
    ],
)
def test_what_cannot_be_done_is_said(flatout, words, code, says):
    (flatout.folder / "there").mkdir()
    done = flatout("kernel", *words)
    assert done.code == code
    assert says in done.err
    assert "Traceback" not in done.err


def test_new_in_one_language(flatout):
    """Without a trace of the other one, and it can be imported and called."""
    for name, way, without in (("one", "--triton", {"kernel.cu", "in_cuda.py"}), ("two", "--cuda", {"in_triton.py"})):
        assert flatout("kernel", "new", name, way).code == 0
        names = {path.name for path in (flatout.folder / name).iterdir()}
        assert not without & names
        assert f"test_{name}.py" in names
    flatout.folder.joinpath("try.py").write_text("import torch, one, two\nfor made in (one, two):\n    print([i.name for i in made.KERNEL.implementations])\n"
                                                 "print(one.op.one(torch.ones(3), torch.ones(3)))\n")
    done = flatout.plain("python", "try.py")
    assert done.out.splitlines()[:2] == ["['plain', 'triton']", "['plain', 'cuda']"], done.err
    assert "0.7311" in done.out
