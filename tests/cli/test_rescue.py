"""`flatout run --rescue` and `flatout rescue`: the training state of a script without checkpoints is restored
bit for bit.
"""

import contextlib
import io
import json
import re
import shutil
import signal

import pytest
from jsonschema import Draft202012Validator
from processes import working_in
from schemas import json_schema

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

# As in most scripts everything lives in a function, so it is gone before the process ends. Each step uses a
# random number.
PROGRAM = """\
import hashlib, os, signal, sys
import torch

def digest(state):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()[:16]

def batch(step):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))

def parts():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, adam, torch.optim.lr_scheduler.StepLR(adam, 5, 0.5)

def one(net, adam, decay, step, middle=lambda: None):
    adam.zero_grad()
    loss = net(batch(step)).square().mean() * torch.rand(())
    middle()
    loss.backward()
    adam.step()
    decay.step()
    print(step, digest(net.state_dict()), flush=True)

def main(steps, at, number):
    net, adam, decay = parts()
    for step in range(1, steps + 1):
        one(net, adam, decay, step, (lambda: os.kill(os.getpid(), number)) if step == at else lambda: None)

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    print("done")
"""

BY_HAND = """\
import os, resource, sys
import torch
torch.manual_seed(0)

def main(how):
    model = torch.nn.Linear(4, 1)
    for step in range(1, 41):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        print(step, sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)
        if how == "leaves" and step == 30:
            sys.exit(3)
        if how == "full" and step == 1:  # nobody can write a file any more
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        if how == "full" and step == 40:
            os.kill(os.getpid(), 9)

main(sys.argv[1])
"""


def printed_losses(out):
    return [tuple(line.split()) for line in out.splitlines()]


@pytest.fixture(scope="module")
def undisturbed():
    """Functions of the program, and the lines that it prints without flatout."""
    space = {"__name__": "program"}
    exec(PROGRAM, space)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        space["main"](30, 0, 0)
    return space, out.getvalue()


@pytest.fixture(scope="module")
def terminated(flatout_in, tmp_path_factory):
    """A run that got SIGTERM in the middle of step 20: the command line in its folder, and the result."""
    cli = flatout_in(tmp_path_factory.mktemp("rescue") / "work")
    (cli.folder / "train.py").write_text(PROGRAM)
    return cli, cli("run", "--rescue", "python", "train.py", "30", "20", str(int(signal.SIGTERM)))


def written(cli, name, *words):
    done = cli.here("rescue", *words, "--to", name)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.processes
def test_a_signal_waits_for_the_step_and_the_printed_lines_restore_the_state(terminated, undisturbed):
    cli, done = terminated
    space, lines = undisturbed
    assert done.code == -signal.SIGTERM
    assert printed_losses(done.out) == printed_losses(lines)[:20], (
        "the current step completes, and no other starts"
    )
    assert done.said[-1].startswith("flatout: rescue: SIGTERM; step 20 is saved.")
    code = written(cli, "out")
    assert len(code.splitlines()) == 5
    net, adam, decay = space["parts"]()
    with working_in(cli.folder):
        exec(code, {"net": net, "adam": adam, "decay": decay})
    assert space["digest"](net.state_dict()) == printed_losses(lines)[19][1]
    assert torch.load(cli.folder / "out" / "net.pt")._metadata["1"] == {"version": 2}, (
        "so that later versions of torch know how to read it"
    )
    assert decay.last_epoch == 20
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step in range(21, 31):
            space["one"](net, adam, decay, step)
    assert printed_losses(out.getvalue()) == printed_losses(lines)[20:30], (
        "weights, optimizer and schedule are complete: training continues as if uninterrupted"
    )
    from safetensors.torch import load_file

    flat = load_file(cli.folder / "out" / "net.safetensors")
    assert {name: value.tolist() for name, value in flat.items()} == {
        name: value.tolist() for name, value in torch.load(cli.folder / "out" / "net.pt").items()
    }


@pytest.mark.processes
def test_the_list(terminated, tmp_path):
    cli, _ = terminated
    done = cli.here("rescue")
    assert re.search(r"^  step 20, .* into the run, .* verified \(at SIGTERM\)$", done.out, re.M)
    for line in ("net  module Sequential, 226 values", "adam  optimizer AdamW", "decay  scheduler StepLR"):
        assert line in done.out
    (job,) = (cli.folder / ".flatout").glob("*/")
    assert cli.here("rescue", str(job)).out.splitlines()[1:] == done.out.splitlines()[1:]
    seen = json.loads(cli.here("rescue", "--json").out)["checkpoints"]
    Draft202012Validator(json_schema("checkpoints")).validate({"schema": 1, "checkpoints": seen})
    assert all(f"step {each['step']}" in done.out for each in seen if each["valid"])
    assert seen
    assert (job / "rescue").stat().st_mode & 0o777 == 0o700
    older = cli.here("rescue", "--to", "of one", "--step", "1")
    assert older.code == 0
    assert "step 1 of" in older.err
    assert cli.here("rescue", "--to", "out").code == 2, "existing files are not overwritten"
    assert cli.here("rescue", "--to", "other", "--step", "7").code == 2
    assert cli.here("rescue", str(tmp_path)).code == 2


@pytest.mark.processes
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(terminated, tmp_path, flatout_in):
    cli, _ = terminated
    other = flatout_in(tmp_path / "work")
    shutil.copytree(cli.folder / ".flatout", other.folder / ".flatout")
    (tensors,) = other.folder.glob(".flatout/*/rescue/step-00000020/tensors.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-3] ^= 4
    tensors.write_bytes(data)
    listed = other.here("rescue").out
    assert "step-00000020  not valid: tensors.safetensors is not what was written" in listed
    done = other.here("rescue", "--to", "out")
    assert done.code == 0
    assert re.search(r"skipped .*step-00000020: .*\nstep 1 of", done.err)
    assert other.here("rescue", "--to", "other", "--step", "20").code == 7


@pytest.mark.processes
def test_a_run_that_ends_well_learns_the_same_and_its_end_is_kept(flatout, script, undisturbed):
    """Its model is gone before the process ends.

    Rescue changes no random number and no line of output, and prints nothing more.
    """
    space, lines = undisturbed
    script(PROGRAM)
    done = flatout("run", "--rescue", "python", "train.py", "30", "0", "0")
    assert (done.code, done.out) == (0, lines + "done\n")
    assert all("keeps net, adam, decay" in line or "no plan fits" in line for line in done.said)
    written(flatout, "out")
    assert space["digest"](torch.load(flatout.folder / "out" / "net.pt")) == printed_losses(lines)[29][1]


@pytest.mark.processes
def test_a_resumed_run_says_what_it_applies_and_an_interrupted_one_how_to_continue(flatout, script):
    script(
        PROGRAM.replace("import hashlib, os", "import hashlib, os, time").replace(
            "    decay.step()\n", "    decay.step()\n    time.sleep(0.05)\n"
        )
    )
    words = ("run", "--resume", "--with", "gc_pause", "python", "train.py", "60", "0", "0")
    process = flatout.start(*words)
    for line in process.stdout:
        if line.startswith("20 "):
            break
    process.send_signal(signal.SIGINT)
    done = flatout.finish(process)
    assert "flatout: applied gc_pause" in done.said
    assert re.fullmatch(
        r"flatout: SIGINT; step \d+ is saved; the same command continues from there", done.said[-1]
    )
    again = flatout(*words)
    assert (again.code, again.out.splitlines()[-1]) == (0, "done"), again.err
    (resumed,) = [at for at, line in enumerate(again.said) if "resumed exactly after step" in line]
    assert again.said.count("flatout: applied gc_pause") == 1
    assert again.said.index("flatout: applied gc_pause") > resumed


@pytest.mark.processes
def test_without_an_optimizer(flatout, script):
    """Steps without an optimizer hook, in a program that ends with an error.

    A second run has a full disk, and the checkpoints of the first run stay.
    """
    script(BY_HAND)
    done = flatout("run", "--rescue", "python", "train.py", "leaves")
    assert done.code == 3
    written(flatout, "out")
    total = sum(
        value.double().sum().item() for value in torch.load(flatout.folder / "out" / "model.pt").values()
    ).hex()
    assert ("30", total) in printed_losses(done.out)
    (kept,) = flatout.folder.glob(".flatout/*/rescue/step-00000030/manifest.json")
    shutil.move(kept.parents[2], kept.parents[3] / "other")
    full = flatout("run", "--rescue", "python", "train.py", "full")
    assert (full.code, len(printed_losses(full.out))) == (-9, 40), "the training continues"
    assert full.out.startswith(done.out)
    assert any("File too large" in line and "The training continues" in line for line in full.said), full.err


def test_checkpoints_of_an_earlier_run_stay(flatout, tmp_path):
    """The most recent earlier run and the one that got furthest stay; the checkpoints of a new run start with
    its first step.
    """
    from flatout.checkpoint.checkpoints import CheckpointFolder, begin_run, earlier_runs
    from flatout.checkpoint.values import pack

    def run(*steps):
        with CheckpointFolder(tmp_path / "rescue", keep=2) as saves:
            begin_run(saves)
            for step in steps:
                saves.write("rescue", step, {"": pack(torch, {"step": step})}, {"holds": []})

    for steps in ((1, 900), (1, 40), (1, 50), (2, 3)):
        run(*steps)
    assert [path.name for path in CheckpointFolder(tmp_path / "rescue").paths()] == [
        "step-00000003",
        "step-00000002",
    ]
    newest = [CheckpointFolder(folder).newest()[0].step for folder in earlier_runs(tmp_path / "rescue")]
    assert newest == [50, 900]
    listed = flatout.here("rescue", str(tmp_path))
    assert listed.out.count("from an earlier run") == 2


def test_no_checkpoints(flatout):
    done = flatout.here("rescue")
    assert done.code == 2
    assert "flatout run --rescue" in done.err


def test_control_characters_from_files_do_not_reach_the_terminal(flatout, tmp_path):
    from flatout.checkpoint.checkpoints import CheckpointFolder
    from flatout.checkpoint.values import pack

    with CheckpointFolder(tmp_path / "rescue") as saves:
        saves.write(
            "rescue",
            1,
            {"": pack(torch, {})},
            {
                "at": "\x1b[2J",
                "why": "\x1b]0;x\x07",
                "ran_s": "soon",
                "epoch": [],
                "inside": {},
                "holds": [7, {"name": "\x1b[31m", "values": "many"}],
            },
        )
    done = flatout.here("rescue", str(tmp_path))
    assert done.code == 0
    assert "\x1b" not in done.out
    assert (
        json.loads((tmp_path / "rescue" / "step-00000001" / "manifest.json").read_text())["metadata"]["at"]
        == "\x1b[2J"
    )
