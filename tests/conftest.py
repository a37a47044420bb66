"""Real programs under the real command line.

Each run is marked in its environment, so that a remaining process is found.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from limits import hang_s, slowness
from processes import working_in
from pytest_timeout import Settings as Timeout
from pytest_timeout import pytest_timeout_set_timer as set_timer
from warm import early_variables, start_program

import flatout as flatout_package

# Set before torch is imported: on few, shared cores small operations spend their time waking threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
EARLY_BEFORE = {*early_variables(os.environ)}
# A shell ignores Ctrl-C in what it starts in the background; the programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "FLATOUT_TEST_RUN"
NOT_RUN = pytest.StashKey[int]()
TEMPORARY, LEFT = pytest.StashKey[Path](), pytest.StashKey[list[str]]()
MANY_OBJECTS = 100_000
OF_ONE_PROCESS = {
    "checkpoint",
    "data",
    "guard",
    "kernels",
    "levers",
    "measure",
    "probe",
    "render",
    "schema",
}
GRACE_S = hang_s(8.0)  # the time that a program may take to end after a request

# Speed is not tested: a slow machine must not fail a rule.
settings.register_profile(
    "full",
    deadline=None,
    max_examples=80,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("test", settings.get_profile("full"), max_examples=30)
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)
settings.load_profile(
    "quick" if "FLATOUT_QUICK" in os.environ else "full" if "FLATOUT_FULL" in os.environ else "test"
)

TINY = '''\
"""Regression on invented data: one linear network, one optimizer, a loss line now and then. Ends after STEPS steps."""
import os
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(int(os.environ.get("STEPS", "1000000"))):
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    if step < 50:
        print("loss", step, loss.item().hex(), flush=True)
print("done", flush=True)
'''

# The same without torch's own optimizer, the first of which imports torch's compiler: two seconds in every
# process.
BY_HAND = (
    TINY.replace("optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n", "")
    .replace("optimizer.zero_grad()", "model.zero_grad()")
    .replace(
        "    optimizer.step()\n",
        "    with torch.no_grad():\n        for p in model.parameters():\n            p -= 0.01 * p.grad\n",
    )
    .replace("one optimizer", "no optimizer")
)


@dataclass
class Done:
    """How a run ended.

    ``left`` are the command lines of processes that it left running (and that were then ended).
    """

    code: int
    out: str
    err: str
    left: list[str] = field(default_factory=list)

    @property
    def said(self) -> list[str]:
        """flatout's own output on standard error."""
        return [line for line in self.err.splitlines() if line.startswith("flatout: ")]


def marked(mark: str) -> dict[int, str]:
    """Living processes of a run: number and command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue
    return found


class Flatout:
    """The command line, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun: list[str] = []

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        # Where the source tree is tested, PYTHONPATH may be what leads to it.
        dropped = ("LD_PRELOAD",) if "FLATOUT_SOURCE" in os.environ else ("LD_PRELOAD", "PYTHONPATH")
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("FLATOUT_", "PYTEST_", "MALLOC_", "KMP_")) and k not in dropped
        }
        mark = uuid.uuid4().hex
        self._begun.append(mark)
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            MARK: mark,
            **more,
        }

    def start(
        self,
        *words: str,
        env: Mapping[str, str] = {},
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
        stdin: int | None = None,
        python: Sequence[str] | None = None,
        really: bool = False,
    ) -> subprocess.Popen[str]:
        """``really``: a start of Python, where one is under test. Otherwise a fork of a warm process where that can be."""
        command = [*prefix, *(python if python is not None else [sys.executable, "-m", "flatout"]), *words]
        return start_program(
            command,
            self.environment(env),
            really,
            cwd=cwd or self.folder,
            stdin=stdin if stdin is not None else subprocess.DEVNULL,
        )

    def __call__(self, *words: str, stdin: str | None = None, timeout: float = 120, **options) -> Done:
        process = self.start(*words, stdin=subprocess.PIPE if stdin is not None else None, **options)
        return self.finish(process, stdin, timeout)

    def here(self, *words: str, stdin: str = "", env: Mapping[str, str] = {}) -> Done:
        """The same command line inside this process, for commands that only read, show or reject: a separate
        interpreter costs half a second.
        """
        from flatout.cli.main import main

        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with (
            mock.patch.dict(os.environ, self.environment(env), clear=True),
            mock.patch.object(sys, "argv", ["flatout", *words]),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
            working_in(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as left,
        ):
            main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        said = []
        for stream in (out, err):
            stream.flush()
            said.append(stream.buffer.getvalue().decode())
        return Done(left.value.code, *said)

    def plain(self, *words: str, **options) -> Done:
        """The same program without flatout."""
        return self(*words, python=[], **options)

    def finish(self, process: subprocess.Popen[str], stdin: str | None = None, timeout: float = 120) -> Done:
        mark = self._begun[-1]
        try:
            out, err = process.communicate(stdin, hang_s(timeout))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            self.ended(mark)
            pytest.fail(
                f"{process.args} did not end within {hang_s(timeout):.0f} s\n{out[-2000:]}\n{err[-4000:]}"
            )
        return Done(process.returncode, out, err, self.ended(mark))

    def ended(self, mark: str) -> list[str]:
        """The command lines of the processes that a run has left, which are then ended."""
        until = time.monotonic() + GRACE_S
        while (left := marked(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        for number in left:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return sorted(left.values())

    def close(self) -> None:
        for mark in self._begun:
            for number in marked(mark):
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    pass


@pytest.fixture
def flatout(tmp_path: Path) -> Iterator[Flatout]:
    """``flatout("run", "python", "train.py")`` in ``flatout.folder``, an empty folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    cli = Flatout(folder)
    yield cli
    cli.close()


@pytest.fixture(scope="session")
def flatout_in() -> Iterator[Callable[[Path], Flatout]]:
    """The command line in a folder that outlives one test."""
    made: list[Flatout] = []

    def make(folder: Path) -> Flatout:
        folder.mkdir(parents=True, exist_ok=True)
        made.append(Flatout(folder))
        return made[-1]

    yield make
    for cli in made:
        cli.close()


@pytest.fixture(scope="session")
def tiny() -> str:
    """The source of a small training script."""
    return TINY


@pytest.fixture(scope="session")
def by_hand() -> str:
    """The same without an optimizer, for what does not depend on one."""
    return BY_HAND


@pytest.fixture
def script(flatout: Flatout) -> Callable[..., Path]:
    """``script(source)`` writes train.py into the run's folder."""

    def write(source: str, name: str = "train.py") -> Path:
        path = flatout.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    return write


def pytest_configure(config: pytest.Config) -> None:
    """The tests are those of an installed flatout: what is missing in a wheel must fail them.

    The whole suite has one folder for temporary files, pytest's own included. torch's warm cache stays outside.
    """
    slowness()  # workers of xdist get it through the environment
    found, source = Path(flatout_package.__file__), Path(__file__).parents[1] / "src"
    if found.is_relative_to(source) and not {"FLATOUT_QUICK", "FLATOUT_SOURCE"} & os.environ.keys():
        raise pytest.UsageError(
            f"flatout is imported from the source tree ({source}), and a wheel may lack a file that is there. "
            "`make test` installs the wheel first; FLATOUT_SOURCE=1 tests the source tree."
        )
    if hasattr(config, "workerinput"):
        return
    usual = tempfile.gettempdir()
    config.stash[TEMPORARY] = place = Path(tempfile.mkdtemp(prefix="tests-"))
    os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = str(place)
    for cache in Path(usual).glob("torchinductor_*"):
        (place / cache.name).symlink_to(cache)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After one more sweep, nothing of flatout's is left but the folders of living processes."""
    if (place := session.config.stash.get(TEMPORARY, None)) is None:
        return
    from flatout.job import temporary

    temporary.sweep.cache_clear()
    temporary.sweep()
    alive = [temporary.owner(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    left = [p.name for p in place.glob("*flatout*") if not any(mark and mark in p.name for mark in alive)]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[LEFT] = sorted(left)
    if session.exitstatus == pytest.ExitCode.OK:  # otherwise pytest's folders are of use
        shutil.rmtree(place, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Timeout) -> bool:
    """A test's limit, which is one against hanging, is stretched on a slow machine."""
    return set_timer(item, settings._replace(timeout=settings.timeout and hang_s(settings.timeout)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files whose tests start programs come first, so that no worker is left alone with a long one.

    Tests that need a GPU are deselected by name where there is none; the summary says so.
    """
    if "FLATOUT_FULL" not in os.environ:
        items[:] = _sampled(items)
    items.sort(key=lambda item: item.path.parent.name in OF_ONE_PROCESS)
    if changed := {*early_variables(os.environ)} - EARLY_BEFORE:
        raise pytest.UsageError(
            f"importing the tests sets {', '.join(changed)}, so every program would be a slow, real start"
        )
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if wanted and not _has_gpu():
        config.stash[NOT_RUN] = len(wanted)
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="not run: there is no CUDA device here"))


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """Parameter -> its values in those tests of the module that run, so that a program runs nothing else."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    runs = [item for item in items if hasattr(item, "callspec") and not _skipped(item)]
    return lambda name: [item.callspec.params[name] for item in runs if name in item.callspec.params]


def _skipped(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("skip")) or any(mark.args[0] for mark in item.iter_markers("skipif"))


def _sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of many alike cases of a test marked `sampled(n)`, n are kept: always the same ones."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for name, alike in cases.items():
        (most,) = alike[0].get_closest_marker("sampled").args
        dropped |= {*alike} - {*random.Random(name).sample(alike, min(most, len(alike)))}
    return [item for item in items if item not in dropped]


STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system"}
STARTED: list[str] = []


def _note_start(event: str, args: tuple) -> None:
    if event in STARTS:
        STARTED.append(event)


sys.addaudithook(_note_start)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    STARTED.clear()


@pytest.fixture(autouse=True)
def processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """`make quick` runs the tests that start no process, and fails those that do and lack the marker."""
    yield
    if left := {*early_variables(os.environ)} - EARLY_BEFORE:
        pytest.fail(f"it leaves {', '.join(left)} set: the programs of later tests get it", pytrace=False)
    if STARTED and "FLATOUT_QUICK" in os.environ and not request.node.get_closest_marker("processes"):
        pytest.fail(f"it starts a process ({STARTED[0]}): mark it `processes`", pytrace=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The garbage collector skips objects that modules hold for ever: with torch they take 0.4 s each time,
    in most of the tests. And torch waits five seconds for each forked worker that does not end.
    """
    if (loaders := sys.modules.get("torch.utils.data._utils")) is not None:
        loaders.MP_STATUS_CHECK_INTERVAL = 0.5
    if len(gc.get_objects(generation=2)) > MANY_OBJECTS:  # frozen objects are not counted
        gc.collect()
        gc.freeze()


@pytest.fixture
def thawed() -> None:
    """For tests of all objects, or of the collector's own state: nothing is frozen (see above)."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a real Ray cluster: two nodes on this machine, of 2 and 1 CPUs."""
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    found.add_node(num_cpus=1)
    yield found.address
    ray.shutdown()
    found.shutdown()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for name in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"left in the temporary folder: {name}", red=True)
    if config.stash.get(NOT_RUN, 0):
        terminalreporter.write_line(
            f"{config.stash[NOT_RUN]} tests for a GPU: not run, there is no CUDA device here"
        )


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
