"""`flatout doctor` as a command: on this machine, under real limits, and with torch absent, hidden or really
broken.
"""

import json
import os
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from environments import Packages, link

import flatout as package
from flatout.cli import doctor, main
from flatout.diagnose.doctor import ceilings
from flatout.schema.errors import UsageError
from flatout.schema.machine_snapshot import Ceiling, CeilingsRecord, MachineSnapshot

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.processes


def verdicts(done):
    return {check["code"]: check for check in json.loads(done.out)["checks"]}


def problems(found):
    return {code for code, check in found.items() if check["verdict"] == "problem"}


@pytest.fixture(scope="module")
def here(flatout_in, tmp_path_factory):
    """One diagnosis of this machine as JSON, shared by several tests."""
    cli = flatout_in(tmp_path_factory.mktemp("doctor") / "work")
    return cli, cli("doctor", "--json")


def test_this_machine(here):
    _, done = here
    found = verdicts(done)
    seen = json.loads(done.out)["snapshot"]
    assert done.code == (1 if problems(found) else 0)
    assert found["FD010"]["verdict"] == "ok", found["FD010"]
    assert seen["torch"]["build"]["version"] == torch.__version__
    assert found["FD018"]["verdict"] in ("ok", "note")  # a machine may have two OpenMP runtimes
    assert str(len(os.sched_getaffinity(0))) in found["FD060"]["observed"]
    assert not [check for check in found.values() if "mistake" in check["observed"]]
    assert done.left == []


def test_what_torch_itself_reports_is_quoted(here):
    cli, done = here
    shown = cli("doctor", "--all")
    assert shown.code == done.code
    assert "Collecting environment information" in shown.out
    assert f"PyTorch version: {torch.__version__}" in shown.out
    assert "nvidia-smi -q" in shown.out


def snapshot_is(monkeypatch, snapshot):
    taker = nullcontext(SimpleNamespace(take=lambda: snapshot))
    monkeypatch.setattr(doctor, "SnapshotTaker", lambda: taker)


def test_a_problem_is_shown_with_its_command(here, monkeypatch):
    """Problems come first, the command stays in one piece however narrow the terminal, and the exit code is
    1.
    """
    data = json.loads(here[1].out)["snapshot"]
    data["files"]["/proc/self/mountinfo"] += "999 1 0:99 / /dev/shm rw - tmpfs shm rw,size=65536k\n"
    data["environment"]["CUDA_LAUNCH_BLOCKING"] = "1"
    data["python"]["libc"] = ["glibc", "2.17"]
    snapshot_is(monkeypatch, MachineSnapshot.from_json(data))
    monkeypatch.setenv("COLUMNS", "60")
    shown = CliRunner().invoke(main.flatout, ["doctor"], standalone_mode=False)
    assert shown.return_value == 1
    lines = shown.output.splitlines()
    assert lines[0].startswith("2 problems and ")
    assert (
        shown.output.index("FD050")
        < shown.output.index("FD071")
        < shown.output.index("FD100")
        < shown.output.index("\nok\n")
    )
    assert '      docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch bash' in lines
    assert "      docker run --shm-size=8g ..." in lines


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`flatout doctor --bench` with an instant diagnosis and an instant measurement; everything after them is
    the command's own code.
    """
    record = CeilingsRecord(
        "0123456789ab",
        threads=2,
        busy_cores=1.5,
        ceilings=[
            Ceiling("matmul_float32_flops", "cpu", 30.6e9, 22.7e9, 26.1e9, 7, "1024 x 1024"),
            Ceiling("memory_bytes_per_s", "cpu", 1.46e9, 0.7e9, 1.3e9, 3, "[red]x"),
            Ceiling("matmul_tf32_flops", "cpu", note="not run: Tensor Cores are needed"),
        ],
    )

    def measure(facts, tell):
        tell("[red]things")
        return record

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    snapshot_is(monkeypatch, MachineSnapshot())
    monkeypatch.setattr(ceilings, "measure", measure)

    def asked(*words):
        return CliRunner().invoke(main.flatout, ["doctor", *words], standalone_mode=False)

    return record, tmp_path / "flatout" / "ceilings-0123456789ab.json", asked


def test_ceilings_are_shown_and_kept(bench):
    record, path, run = bench
    done = run("--bench")
    assert done.return_value == 0
    rows = [line.split() for line in done.output.splitlines()]
    assert ["matmul", "float32", "cpu", "30.6", "GFLOP/s", "22.7", "to", "26.1", "7"] in [
        row[:9] for row in rows
    ]
    assert ["memory", "cpu", "1.46", "GB/s"] in [row[:4] for row in rows]
    assert ["matmul", "tf32", "cpu", "not", "run", "-", "-"] in [row[:7] for row in rows]
    assert "measuring: [red]things" in done.output
    assert "other processes used 1.50 cores just before" in done.output
    assert CeilingsRecord.from_json(json.loads(path.read_text())) == record


def test_ceilings_as_json(bench):
    record, path, run = bench
    assert json.loads(run("--bench", "--json").output)["ceilings"] == record.to_json()
    assert path.is_file()


def test_quoted_texts_are_no_json(bench):
    assert isinstance(bench[2]("--all", "--json").exception, UsageError)


def test_under_real_limits_with_torch_hidden(flatout):
    """The limits are real: few open files, no core dumps, one core, and a torch.py next to the script."""
    (flatout.folder / "torch.py").write_text("raise RuntimeError('this is not torch')\n", encoding="utf-8")
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    # With -P the command, like the installed script, does not search the working folder for modules.
    done = flatout(
        "-c",
        limited,
        "-P",
        "-m",
        "flatout",
        "doctor",
        "--json",
        python=[sys.executable],
        env={
            "OMP_NUM_THREADS": "64",
            "CUDA_LAUNCH_BLOCKING": "1",
            "SECRET_TOKEN": "do not tell",
            "NCCL_API_KEY": "do not tell",
        },
    )
    found = verdicts(done)
    assert done.code == 1
    assert {"FD003", "FD010", "FD080"} <= problems(found)
    assert "torch.py" in found["FD003"]["fix"]
    assert "this is not torch" in found["FD010"]["observed"]
    assert "128 files" in found["FD080"]["observed"]
    assert "1 core(s)" in found["FD064"]["observed"]
    assert found["FD064"]["fix"] == "export OMP_NUM_THREADS=1"
    assert found["FD100"]["fix"] == "unset CUDA_LAUNCH_BLOCKING"
    assert "do not tell" not in done.out


def linked(folder, *more, without="-"):
    """A folder of links to flatout and what it requires, and to `more`, without packages of that prefix."""
    folder.mkdir()
    (folder / "flatout").symlink_to(Path(package.__file__).parent)
    for found in Packages.of(sys.executable).closure([*(metadata.requires("flatout") or ()), *more]):
        if not found.metadata["Name"].startswith(without):
            link(found, folder)
    return folder


def bare(*words):
    """This Python without its own packages: only PYTHONPATH provides modules."""
    return [sys.executable, "-S", "-m", "flatout", *words]


def test_torch_is_not_installed(flatout, tmp_path):
    packages = linked(tmp_path / "packages")
    done = flatout(python=bare("doctor", "--json"), env={"PYTHONPATH": str(packages)})
    found = verdicts(done)
    assert found["FD010"]["observed"] == "torch is not installed for this Python"
    assert found["FD010"]["fix"] == "pip install torch"
    assert {found[code]["verdict"] for code in ("FD011", "FD012", "FD018", "FD024")} == {"not checked"}
    assert done.code == 1


def test_a_cuda_library_is_missing(flatout, tmp_path):
    """The real torch with one NVIDIA library removed from the folder where it expects it."""
    if torch.version.cuda is None:
        pytest.skip("not run: this torch was built for the CPU and needs no CUDA library")
    packages = linked(tmp_path / "packages", "torch", without="nvidia")
    ours, whole = packages / "torch", Path(torch.__file__).parent
    ours.unlink()
    (ours / "lib").mkdir(parents=True)
    for entry in whole.iterdir():
        if entry.name != "lib":
            (ours / entry.name).symlink_to(entry)
    for entry in (whole / "lib").iterdir():
        (ours / "lib" / entry.name).symlink_to(entry)
    done = flatout(python=bare("doctor", "--json"), env={"PYTHONPATH": str(packages)})
    found = verdicts(done)["FD010"]
    assert found["verdict"] == "problem"
    assert ".so" in found["observed"]
    assert "was not found" in found["observed"]
    assert found["fix"].startswith("pip install --force-reinstall torch")
    assert any("ImportError" in line or "OSError" in line for line in found["evidence"])
