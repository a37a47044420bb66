"""Foreign files for every reader in flatout. The public command opens each in a child with 512 MiB and 5 s to
spare.

An `Opener` is one kind of file: a sound one, and the command that opens it. `hostile` names files that are
bad on purpose; `mutated` damages a sound one by seed. `opened` returns the outcome: how it ended, its output,
whether code of the file ran (a canary), and its cost.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from limits import hang_s

TESTS = Path(__file__).resolve().parent.parent
MOST_BYTES, MOST_S, TIMEOUT_S = 512 << 20, hang_s(5.0), hang_s(60)
RAW = "\x00\x07\x1b\x9b\u202e\u2066\u200f"  # never on a terminal unescaped
CODES = {0, 1, 2, 3, 4, 7}  # of schema/errors.py
EVIL = (
    "<script>touch</script>",
    "\x1b[2J\x1b]0;x\x07",
    "\u202egnp.exe",
    "../../../../etc/passwd",
    "{0.__class__.__init__.__globals__}",
    "{{ 7*7 }}",
    "'\"><img src=x>",
    "\x00",
    "\ud800",
    "a" * 100_000,
    "%s%s%n",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "http://user:pw@host/",
    "é\u0301" * 50,
)
ODD = (None, True, -1, 0, 10**400, 1e308, -1e308, float("nan"), float("inf"), [], {}, [[]], {"": {}}, *EVIL)


@dataclass(frozen=True)
class Opener:
    """``name`` is the file's.

    ``sound`` is its content; ``words`` is the command line that opens it, or ``call`` opens it without one.
    """

    kind: str
    name: str
    sound: bytes
    words: tuple[str, ...] = ()
    call: Callable[[Path], object] | None = None
    json: bool = True

    def open(self, path):
        if self.call is not None:
            self.call(path)
            return
        from flatout.cli.main import main

        sys.argv = [
            "flatout",
            *(word.replace("FILE", str(path)).replace("FOLDER", str(path.parent)) for word in self.words),
        ]
        main()


@dataclass
class Outcome:
    code: int
    said: str
    canary: bool
    seconds: float
    grew_bytes: int

    def wrong(self):
        """The violation, or "" where there was none."""
        if self.canary:
            return "code of the file ran"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback (most recent" in self.said or "\n  File " in self.said:
            return "a traceback of ours: " + self.said.strip().splitlines()[-1][:300]
        if self.code not in CODES:
            return f"exit code {self.code}: {self.said[-300:]}"
        if any(sign in self.said for sign in RAW):
            return "control codes on the terminal"
        if (
            self.code in (2, 4, 7)
            and not 1
            <= len([line for line in self.said.splitlines() if line.startswith(("flatout: ", "Error: "))])
            <= 2
        ):
            return f"no sentence: {self.said[-300:]!r}"
        if self.seconds > MOST_S:
            return f"took {self.seconds:.1f} s"
        if self.grew_bytes > MOST_BYTES:
            return f"took {self.grew_bytes >> 20} MiB"
        return ""


def openers():
    sys.path.insert(0, str(TESTS))
    from profiles import healthy

    from flatout.schema.plan import Choice, Plan

    plan = Plan(
        (
            Choice("channels_last", True, evidence="1.31x"),
            Choice("threads", 1),
            Choice("loader", {"workers": 2}),
        ),
        {"command": "python train.py"},
    )
    session = (TESTS / "render" / "session.json").read_bytes()
    profile = json.dumps(healthy().to_json()).encode()
    log = (
        b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    model(x)\n'
        b"RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)\n"
    )
    script = b"import torch\nmodel = torch.nn.Linear(4, 4)\nfor x in range(9):\n    loss = model(torch.ones(4)).sum()\n    loss.backward()\n"
    ranks = {"key": None, "rehearsed": {"procs": 2, "division": {"batches": "same"}, "losses": [1.0]}}
    ceilings = {
        "schema": 1,
        "key": "KEY",
        "ceilings": [{"name": "memory_bytes_per_s", "device": "cpu", "value": 1e10}],
    }
    return {
        each.kind: each
        for each in (
            Opener("plan", "flatout.toml", plan.to_toml().encode(), ("plan", "--plan", "FILE"), json=False),
            Opener("session", "session.json", session, ("levers", "--why", "--job", "FOLDER")),
            Opener(
                "profile to scale",
                "profile.json",
                profile,
                ("scale", "--network", "ib-ndr", "--from", "FILE", "--gpus", "8"),
            ),
            Opener("log", "train.log", log, ("explain", "FILE"), json=False),
            Opener("script", "train.py", script, ("check", "FILE"), json=False),
            Opener("ranks", "ranks.json", json.dumps(ranks).encode(), call=_ranks),
            Opener("ceilings", "ceilings.json", json.dumps(ceilings).encode(), call=_ceilings),
            Opener("manifest", "manifest.json", b"", call=_save),
            Opener(
                "state",
                "state.json",
                json.dumps(
                    {
                        "dict": [
                            ["w", {"tensor": "w", "dtype": "float32", "shape": [4]}],
                            ["n", {"float": "nan"}],
                            ["l", {"ints": ["list", "AAAAAAAAAAA="]}],
                            ["a", {"array": ["<f8", [1], "AAAAAAAAAAA="]}],
                        ]
                    }
                ).encode(),
                call=_save,
            ),
            Opener("tensors", "tensors.safetensors", tensors(), call=_save, json=False),
        )
    }


def tensors():
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return with_header(head)


def _ranks(path):
    from flatout.cli.options.rank_plans import load_rehearsal

    load_rehearsal(path, None)


def _ceilings(path):
    from flatout.measure.ceilings import load, machine_key
    from flatout.schema.facts import Facts

    facts = Facts()
    with contextlib.suppress(OSError):
        path.rename(path.with_name(f"ceilings-{machine_key(facts)}.json"))
    load(facts, folder=path.parent)


def _digest(path):
    """For an enormous file only the length is right: its digest would take longer than the test."""
    from flatout.checkpoint.disk import FileDigest, digest_of_file

    size = path.stat().st_size
    return digest_of_file(path, FileDigest(size, "")) if size < 1 << 28 else FileDigest(size, "0" * 64)


def _save(path):
    """A checkpoint whose author has made the digests right. flatout's messages are those of the
    command line.
    """
    import torch

    from flatout.checkpoint.checkpoints import CheckpointFolder
    from flatout.checkpoint.manifest import Manifest
    from flatout.job.sanitize import sanitize
    from flatout.schema.errors import FlatoutError

    folder = path.parent / "saves" / "step-00000007"
    folder.mkdir(parents=True)
    path.rename(folder / path.name)
    if path.name != "state.json":
        (folder / "state.json").write_text('{"tensor": "w", "dtype": "float32", "shape": [4]}')
    if path.name != "tensors.safetensors":
        (folder / "tensors.safetensors").write_bytes(tensors())
    try:
        if path.name != "manifest.json":
            about = {each.name: _digest(each) for each in sorted(folder.iterdir()) if each.is_file()}
            (folder / "manifest.json").write_text(Manifest("test", 7, about).to_text())
        newest, _ = CheckpointFolder(folder.parent).newest()
        assert newest is not None
        newest.read(torch)
    except FlatoutError as error:
        sys.stderr.write(f"flatout: {sanitize(str(error))}\n")
        sys.exit(error.exit_code)
    except OSError:
        sys.exit(0)  # this harness could not digest it: a device


# -- files


class Bomb:
    def __reduce__(self):
        return os.system, ("touch canary",)


def zipped(**files):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name.replace("__", "/"), data)
    return held.getvalue()


def sparse(size):
    def make(path):
        with open(path, "wb") as file:
            file.truncate(size)

    return make


def written(data):
    return lambda path: path.write_bytes(data() if callable(data) else data) and None


def linked(target):
    return lambda path: path.symlink_to(target)


def hostile(opener):
    """Each kind of damage, with the function that puts the file in place. ``bench/fuzz.py`` has more."""
    deep, sound = 10**6, opener.sound or b"{}"
    yaml = b'!!python/object/apply:os.system ["touch canary"]\n'
    files = {
        "a pickle that runs code": pickle.dumps(Bomb()),
        "a zip of zeros": lambda: zipped(a=bytes(1 << 26)),
        "a yaml tag": yaml,
        "deep lists": b"[" * deep,
        "deep tables": lambda: b'{"a":' * deep,
        "no UTF-8": b"\xff\xfe\xfa" * 99 + sound,
        "a number of a million digits": b"9" * deep,
        "a list": b"[]",
        "a long line": lambda: b'"' + b"x" * (1 << 24) + b'"',
        "many lists": lambda: b"[" + b"[]," * (1 << 23) + b"[]]",
        "half of itself": sound[: len(sound) // 2],
        "one key many times": lambda: b"{" + b'"a":1,' * 100_000 + b'"a":2}',
        "control codes": "".join(EVIL[1:3]).encode("utf-8", "replace") * 9,
        "TOML without end": b"a" + b".a" * 30_000 + b" = 1",
        "TOML: a library": b'[levers]\nmalloc = "/tmp/evil.so"\n',
        "TOML: code": b"[levers]\ncompile = \"__import__('os').system('touch canary')\"\nimport = \"os\"\n",
        "TOML: evil names": b'[levers."\\u001b[2J<script>"]\nvalue = "\\u202e"\n',
        "Python: deep": b"x = " + b"(" * 5000,
        "Python: minus": b"x = " + b"-" * 100_000 + b"1",
        "Python: coding": b"# -*- coding: rot13 -*-\nimport torch\n",
        "Python: power": b"import torch\nx = 9**9**9**9\ny = 'a' * 10**12\nz = [0] * 10**12\nfor i in range(10**12): pass\n",
        "a traceback that never ends": lambda: (
            b"Traceback (most recent call last):\n"
            + b'  File "a.py", line 1, in f\n' * 200_000
            + b"RecursionError: \x1b[31m\n"
        ),
        "a line for slow expressions": b"RuntimeError: "
        + b"x" * 50_000
        + b"mat1 and mat2 shapes"
        + b"(" * 10_000,
    }
    made = {title: written(data) for title, data in files.items()}
    made |= {
        "a terabyte of zeros": sparse(1 << 40),
        "a device without end": linked("/dev/zero"),
        "a link out of the folder": linked("/etc/passwd"),
    }
    if opener.kind in ("state", "tensors"):
        del made[
            "a terabyte of zeros"
        ]  # its digest takes as long as reading it; so does that of a real checkpoint
    if opener.kind != "log":  # `flatout explain <(command)` is a pipe, and reading waits for it
        made["a pipe that nobody writes to"] = lambda path: os.mkfifo(path)
    if opener.json and opener.sound:
        made |= {
            f"odd values {seed}": written(odd(opener, random.Random(seed), share=0.3)) for seed in range(2)
        }
        fields = json.loads(opener.sound)
        if "command" in fields:  # a single value is wrong, and that early
            made["a command that is a number"] = written(json.dumps({**fields, "command": 5}).encode())
    if opener.kind == "tensors":
        heads = {
            "a header of a gigabyte": (1 << 30, b""),
            "a header without end": (2**63 - 1, b"{}"),
            "a shape without end": (None, b'{"w":{"dtype":"F32","shape":[' + b"1," * deep + b"4]}}"),
            "a NaN size": (None, b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'),
            "two in one place": (
                None,
                json.dumps(
                    {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"}
                ).encode(),
            ),
            "negative": (None, b'{"w":{"dtype":"F32","shape":[-4],"data_offsets":[0,-16]}}'),
            "wraps": (None, b'{"w":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}'),
        }
        made |= {title: written(with_header(head, size)) for title, (size, head) in heads.items()}
    return made


def with_header(head, size=None):
    """A file of tensors with this header, which says that it has ``size`` bytes."""
    return (len(head) if size is None else size).to_bytes(8, "little") + head + bytes(16)


def mutated(opener, seed):
    """A sound file after some damage to its bytes, or to its values where it is JSON."""
    chance = random.Random(f"{opener.kind} {seed}")
    if opener.json and opener.sound and chance.random() < 0.7:
        return odd(opener, chance, share=chance.choice((0.002, 0.02, 0.1, 0.5)))
    data = bytearray(opener.sound or b"{}")
    for _ in range(chance.choice((1, 2, 5, 30))):
        at = chance.randrange(len(data) + 1)
        what = chance.randrange(6)
        if what == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            data[at:at] = chance.randbytes(chance.randint(1, 9))
        elif what == 2:
            del data[at : at + chance.randint(1, 60)]
        elif what == 3:
            data[at:at] = data[at : at + chance.randint(1, 300)] * chance.randint(1, 5)
        elif what == 4:
            data[at:at] = chance.choice(EVIL[:-2]).encode("utf-8", "surrogatepass")
        else:
            data[at:at] = chance.choice(
                (
                    b"[",
                    b"{",
                    b'"',
                    b"\\u0000",
                    b"1e999",
                    b"-",
                    b"null",
                    b"9" * 400,
                    b"\n",
                    b"[[",
                    b"=",
                    b"'''",
                    b"#",
                )
            )
        data = data or bytearray(b" ")
    return bytes(data)


def odd(opener, chance, share):
    """The sound JSON with this share of its values replaced by odd ones or by other values of the file."""
    whole = json.loads(opener.sound)
    values = []

    def walk(thing):
        values.append(thing)
        if chance.random() < share and thing is not whole:
            return chance.choice(ODD) if chance.random() < 0.8 else copy.deepcopy(chance.choice(values))
        if isinstance(thing, dict):
            return {
                (chance.choice(EVIL[:9]) if chance.random() < share / 5 else key): walk(value)
                for key, value in thing.items()
                if chance.random() > share / 10
            }
        return [walk(each) for each in thing] if isinstance(thing, list) else thing

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 3000))
    try:
        return json.dumps(walk(whole)).encode()
    except (ValueError, RecursionError):
        return opener.sound


# -- opening


def warm():
    """The imports of the commands, so that a child costs only a fork."""
    import importlib

    import torch

    torch.zeros(1)
    for name in (
        "cli.plan",
        "cli.scale",
        "cli.doctor",
        "cli.explain",
        "cli.check",
        "cli.options.rank_plans",
        "diagnose.doctor.checks",
        "diagnose.check",
        "render.doctor",
        "render.scale_page",
        "checkpoint.checkpoints",
        "render.terminal",
        "measure.ceilings",
    ):
        importlib.import_module(f"flatout.{name}")
    import numpy  # noqa: F401
    import safetensors.torch  # noqa: F401


def opened(opener, make, folder):
    """Run it in a child of this process, in its own folder, where a file called canary would appear."""
    place = folder / "place"
    place.mkdir()
    path = place / opener.name
    make(path)
    said = folder / "said"
    child = os.fork()
    if child == 0:
        os._exit(_child(opener, path, said))
    began, status, used = time.monotonic(), None, None
    while status is None and time.monotonic() - began < TIMEOUT_S:
        done, ended, usage = os.wait4(child, os.WNOHANG)
        status, used = (ended, usage) if done else (None, None)
        if not done:
            time.sleep(0.003)
            if _worked_s(child) > 2 * MOST_S:
                break
    if status is None:
        os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    seconds = (
        used.ru_utime + used.ru_stime if time.monotonic() - began < TIMEOUT_S else TIMEOUT_S
    )  # its own time: the machine has other work
    output = said.read_bytes() if said.exists() else b""
    text, _, grew = output.rpartition(b"\ngrew ")
    canary = (place / "canary").exists() or (folder / "canary").exists() or (TESTS.parent / "canary").exists()
    return Outcome(
        os.waitstatus_to_exitcode(status),
        (text or output).decode(errors="replace"),
        canary,
        seconds,
        int(grew) if grew.strip().isdigit() else 0,
    )


def _worked_s(child):
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(opener, path, said):
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    os.chdir(path.parent)
    os.environ["HOME"] = str(path.parent)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 0
    try:
        opener.open(path)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    os.write(2, f"\ngrew {max(grew, 0)}".encode())
    return code
