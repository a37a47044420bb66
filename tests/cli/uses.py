"""Ways in which people start programs: what they type, where, with which streams, how it ends, and rows that cover all pairs."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from functools import cache

PYTHON = sys.executable

# It shows all of its process that flatout could have changed, writes files, and ends as END says.
PROGRAM = r"""
import atexit, os, resource, signal, stat, subprocess, sys, tempfile, threading, time

def kind(number):
    try:
        return "{:o}".format(stat.S_IFMT(os.fstat(number).st_mode)), os.isatty(number)
    except OSError:
        return "closed"

def show(*values):
    try:
        print(*values, flush=True)
    except (OSError, ValueError) as error:
        seen.append(str(error))

seen = []
end = os.environ["END"]
try:
    here = os.getcwd()
except OSError as error:
    here = str(error)
show(sys.argv, sys.orig_argv, sys.path[0], __name__, globals().get("__file__"), here)
show(sys.flags, sys.warnoptions, sys._xoptions, sys.dont_write_bytecode)
show([kind(number) for number in range(3)], [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None])
show("open", [number for number in range(3, 64) if kind(number) != "closed"])
show("umask %o" % os.umask(os.umask(0)), "nice", os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE))
show([str(signal.getsignal(number)) for number in range(1, 32)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
show("children", open("/proc/thread-self/children").read().split(), threading.active_count())
show(sorted(name for name in os.environ if not name.startswith(("FLATOUT_", "MALLOC_")) and name != "PYTHONPATH"))
show(*map(os.environ.get, ("HOME", "PATH", "PWD", "TMPDIR")))
try:
    show("temporary", tempfile.gettempdir())
    with tempfile.TemporaryDirectory() as folder:
        show("files in a new one:", len(os.listdir(folder)))
except OSError as error:
    show("no temporary folder", error)
try:
    show("input", sys.stdin.read() if sys.stdin is not None and not sys.stdin.isatty() else None)
except (OSError, ValueError) as error:
    show("no input:", error)
try:
    os.makedirs("out/deep", exist_ok=True)
    with open("out/log.txt", "a") as file:
        print("one line", end, seen, file=file)
    os.chmod("out/log.txt", 0o640)
    os.symlink("log.txt", "out/link%d" % len(os.listdir("out")))
    os.rename("old.txt", "new.txt")
except OSError as error:
    show("cannot write:", error)
if "TRAIN" in os.environ:
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    for _ in range(4):
        loss = model(torch.randn(8, 4)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weights in model.parameters():
                weights -= 0.1 * weights.grad
        show(loss.item().hex())
    torch.save(model.state_dict(), os.environ["TRAIN"])
try:
    print("to standard error", file=sys.stderr, flush=True)
except (OSError, ValueError, AttributeError):
    pass
if "GONE" in os.environ:
    import shutil
    shutil.rmtree(here, ignore_errors=True)
if end == "exception":
    raise ValueError("the end")
elif end == "sys.exit":
    sys.exit(3)
elif end == "os._exit":
    os._exit(4)
elif end.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, end))
elif end == "Ctrl-C":
    with open(os.environ["READY"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
elif end == "broken pipe":
    for number in range(200000):
        print(number)
elif end == "atexit":
    atexit.register(lambda: 1 / 0)
elif end == "thread":
    threading.Thread(target=lambda: (time.sleep(0.2), show("thread"))).start()
elif end == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.4); open('child.txt', 'w').close()"])
"""

FILES = {
    "train.py": PROGRAM,
    "pkg/__init__.py": "",
    "pkg/__main__.py": PROGRAM,
    "run me": f"#!/usr/bin/env python\n{PROGRAM}",
    "tr ain é.py": PROGRAM,
    "train.sh": "python train.py one\necho ended $?\n",
    "Makefile": "train:\n\t@python train.py one\n",
    "test_it.py": "import runpy\ndef test_it():\n    runpy.run_path('train.py', run_name='__main__')\n",
    "words.txt": "one\n'two words'\n",
    "launcher.py": "import subprocess, sys\n"
    "sys.exit(subprocess.run([sys.executable, 'train.py', 'one']).returncode)\n",
    "several.py": "import multiprocessing, runpy, sys\n"
    "def work():\n    runpy.run_path('train.py', run_name='__main__')\n"
    "if __name__ == '__main__':\n"
    "    process = multiprocessing.get_context(sys.argv[1]).Process(target=work)\n"
    "    process.start()\n    process.join()\n    sys.exit(process.exitcode % 256)\n",
    "old.txt": "old\n",
}

WAYS = {
    "script": ["python", "train.py", "--lr", "a b", ""],
    "script alone": ["./run me", "one"],
    "-u": ["python", "-u", "train.py"],
    "-m": ["python", "-m", "pkg", "-m", "x"],
    "-c": ["python", "-c", PROGRAM, "-c"],
    "-": ["python", "-", "--x"],
    "-O": ["python", "-OO", "train.py"],
    "-X dev": ["python", "-X", "dev", "-W", "error::SyntaxWarning", "train.py"],
    "-B -s": ["python", "-B", "-s", "-q", "train.py"],
    "whole path": [PYTHON, "train.py"],
    "odd name": ["python", "tr ain é.py", "é"],
    "folder": ["python", "pkg"],
    "bash file": ["bash", "train.sh"],
    "bash -c": ["bash", "-c", "python train.py; echo ended $?"],
    "exec": ["sh", "-c", "exec python train.py"],
    "loop": ["sh", "-c", "for each in 1 2; do python train.py $each; done"],
    "pipeline": ["bash", "-o", "pipefail", "-c", "python train.py | cat"],
    "background": ["sh", "-c", "python train.py & wait $!"],
    "make": ["make", "train"],
    "env": ["env", "-u", "LANG", "LR=1", "python", "train.py"],
    "nohup": ["nohup", "python", "train.py"],
    "setsid": ["setsid", "-w", "python", "train.py"],
    "timeout": ["timeout", "600", "python", "train.py"],
    "nice": ["nice", "-n", "3", "python", "train.py"],
    "xargs": ["xargs", "-a", "words.txt", "python", "train.py"],
    "subprocess": ["python", "launcher.py"],
    "spawn": ["python", "several.py", "spawn"],
    "fork": ["python", "several.py", "fork"],
    "runpy": ["python", "-c", "import runpy; runpy.run_path('train.py', run_name='__main__')"],
}
RARE = {
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py"],
    "pytest": ["python", "-m", "pytest", "-s", "-W", "error", "-p", "no:cacheprovider", "test_it.py"],
    "conda": [
        "bash",
        "-c",
        'f=$(mktemp); echo "$0 $1" > $f; bash $f; r=$?; rm $f; exit $r',
        "python",
        "train.py",
    ],
}
SHELLS = {"background", "bash -c", "bash file", "conda", "loop", "make", "pipeline"}
# Several processes write at once, so only the lines count, not their order.
TOGETHER = SHELLS | {"fork", "spawn", "subprocess", "torchrun"}
# flatout's process becomes something else than the Python that removes its folder: the next command removes it.
NO_PYTHON = SHELLS | {"setsid", "timeout", "xargs"}

FOLDERS = (
    "ordinary",
    "space",
    "quotes",
    "non-ASCII",
    "read-only",
    "in TMPDIR",
    "link",
    "no HOME",
    "TMPDIR missing",
    "TMPDIR read-only",
    "umask 077",
    "removed",
)
STREAMS = (
    "pipes",
    "one pipe",
    "files",
    "terminal",
    "nothing",
    "no input",
    "no output",
    "no error",
    "none",
    "full disk",
    "input",
)
ENDS = (
    "normal",
    "exception",
    "sys.exit",
    "os._exit",
    "SIGTERM",
    "SIGKILL",
    "Ctrl-C",
    "broken pipe",
    "atexit",
    "thread",
    "child",
)
KILLED = {"os._exit", "SIGTERM", "SIGKILL", "Ctrl-C"}  # no Python is left to clean up, or it may be
OPTIONS = ("", "--no-summary", "--with gc_pause", "--with malloc=glibc", "--watch")


@dataclass(frozen=True)
class Use:
    way: str = "script"
    folder: str = "ordinary"
    streams: str = "pipes"
    end: str = "normal"
    options: str = ""
    train: bool = False

    def __str__(self):
        parts = (self.way, self.folder, self.streams, self.end, self.options, "trains" if self.train else "")
        return ", ".join(filter(None, parts))


# Known to be hard, or too slow for more than one row.
SINGLE = (
    Use(train=True),
    Use("-m", "non-ASCII", "terminal", "atexit", "--with gc_pause", train=True),
    Use("bash file", "read-only", "files", "SIGKILL", "--with gc_pause", train=True),
    Use("script alone", "TMPDIR missing", "pipes", "broken pipe", "--with gc_pause", train=True),
    Use("-", "removed", "pipes", "exception", "", train=True),
    Use("torchrun", "ordinary", "pipes", "normal", "--with gc_pause", train=True),
    Use("torchrun", "quotes", "files", "exception"),
    Use("pytest", "space", "pipes", "exception"),
    Use("pytest", "link", "terminal", "normal", "--no-summary"),
    Use("conda", "space", "one pipe", "os._exit", "--with gc_pause"),
    Use("-c", "gone", "pipes", "exception"),
    Use("-", "gone", "terminal", "child", "--with gc_pause"),
)


def impossible(a, b):
    """Whether two values exclude each other: the program itself comes from standard input, there is no reader
    that could go, a shell keeps Ctrl-C from its background, `timeout` sends it a second time, or which process of a pipeline fails first is chance.
    """
    pair = {a, b}
    return (
        ("-" in pair and bool(pair & {"no input", "none", "input"}))
        or ("broken pipe" in pair and bool(pair & ({*STREAMS} - {"pipes", "no input", "input", "no error"})))
        or pair in ({"background", "Ctrl-C"}, {"timeout", "Ctrl-C"})
        or ("pipeline" in pair and bool(pair & {"broken pipe", "full disk", "no output", "none"}))
    )


@cache
def uses():
    return [*SINGLE, *(Use(*row) for row in covering([[*WAYS], FOLDERS, STREAMS, ENDS, OPTIONS]))]


def covering(factors):
    """Rows in which each two values of different factors that can be together are together, as few as a greedy choice needs."""
    left = {
        (i, a, j, b): None
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a, b in itertools.product(factors[i], factors[j])
        if not impossible(a, b)
    }
    while left:
        i, a, j, b = next(iter(left))
        row = {i: a, j: b}
        for at in sorted({*range(len(factors))} - {i, j}, key=lambda at: -len(factors[at])):
            fits = [value for value in factors[at] if not any(impossible(value, v) for v in row.values())]

            def gain(value, at=at, row=row):
                return sum(_pair(at, value, other, v) in left for other, v in row.items())

            row[at] = max(fits, key=gain)
        for i, j in itertools.combinations(range(len(factors)), 2):
            left.pop((i, row[i], j, row[j]), None)
        yield tuple(row[at] for at in range(len(factors)))


def _pair(i, a, j, b):
    return (i, a, j, b) if i < j else (j, b, i, a)


def write(folder):
    """The user's folder, the same each time: the cache of bytecode contains the times of its sources."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
        os.utime(path, (1, 1))
