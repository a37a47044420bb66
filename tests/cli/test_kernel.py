"""`flatout kernel` on failures: a kernel that crashes, a kernel that hangs, and unknown names."""

import ast
import re
import sys

import pytest

from flatout.cli.main import main

pytestmark = pytest.mark.processes

pytest.importorskip("torch")

FAULTY = '''\
import ctypes
import torch
from flatout.kernels.kernel import Case


def doubled(x):
    return x * 2


def doubled_cases():
    return [Case("9", lambda draw: {"x": torch.randn(9, generator=draw)})]


def fails(x):
    """Its second call ever ends the process; from then on it copies one element too many, which the values do not show."""
    with open("calls", "a") as calls:
        calls.write("x")
        call = calls.tell()
    if call == 2:
        ctypes.string_at(8)
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * 4 + 4 * (call > 2))
    return y.mul_(2)


fails_wrong = {"off": lambda x: x * 2.001}
fails_reference, fails_cases = doubled, doubled_cases
'''


def test_a_crash_fails_only_its_own_check(flatout, script):
    """A crash and an out-of-bounds write by one element are each one failed check; the other checks continue."""
    script(FAULTY, "faulty.py")
    done = flatout("kernel", "check", "faulty.py:fails")
    assert done.code == 1
    assert not done.left
    found = dict(re.findall(r"^  (?:ok     |FAILED |not run)  (.+?)  +(\S.*)$", done.out, re.MULTILINE))
    assert "it accessed invalid memory (SIGSEGV)" in found["fails: determinism"]
    assert "SIGSEGV" in found["fails: memory"]
    assert "output 0 at (" in found["rejects off"]
    assert "  2 ok, 2 failed, 0 not run" in done.out


def test_a_hanging_kernel_is_stopped(flatout, script):
    script("import time\ntime.sleep(1000)\n", "sleeper.py")
    done = flatout("kernel", "check", "sleeper.py:f", "--limit", "4s")
    assert done.code == 2
    assert "it did not finish within 4 s and was stopped; increase `--limit`" in done.err
    assert not done.left


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("check", "nothing.py:f"), 2, "there is no kernel or file 'nothing.py'"),
        (("bench", "nothing"), 2, "The built-in kernels are layer_norm"),
        (("new", "My-Kernel"), 2, "cannot be a kernel's name"),
        (("new", "there"), 4, "already exists"),
    ],
)
def test_unsupported_requests_are_explained(tmp_path, monkeypatch, capsys, words, code, says):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flatout", "kernel", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    assert says in capsys.readouterr().err


def test_new_renames_the_template(flatout):
    assert flatout("kernel", "new", "one").code == 0
    files = list((flatout.folder / "one").iterdir())
    assert {"test_one.py", "kernel.cu", "in_triton.py", "in_cuda.py", "wrong.py"} <= {
        path.name for path in files
    }
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert "silu_mul" not in text
        if path.suffix == ".py":
            ast.parse(text)
