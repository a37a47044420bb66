"""`--device`: programs that name CUDA in every way possible run unedited on the CPU, compared with copies
edited for it.
"""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.agent.device import DeviceArguments, would_end_at
from flatout.agent.ledger import Ledger
from flatout.diagnose.explain import explain
from flatout.launch.command import parse_command
from flatout.schema.facts import Facts
from flatout.schema.failure import ExceptionRecord, FailureRecord
from flatout.tune.plan_files import differences, plan_key

pytestmark = [pytest.mark.timeout(150), pytest.mark.processes]
SENTENCE = "flatout: the script asks for cuda; --device cpu runs it on the CPU"

# Each program, and the edits that make it run on the CPU.
SPELLINGS = """
import os, torch, warnings
from torch import nn
from torch.cuda import synchronize
warnings.simplefilter("ignore")
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
torch.manual_seed(0)
torch.cuda.manual_seed_all(1)
torch.cuda.set_device(0)
device = torch.device("cuda:0")
chance = torch.Generator(device="cuda").manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
start, end, side = torch.cuda.Event(enable_timing=True), torch.cuda.Event(True), torch.cuda.Stream(priority=-1)
with torch.device("cuda"):
    first = nn.Linear(8, 16)
torch.set_default_device("cuda")
middle = nn.Linear(16, 16)
torch.set_default_device(None)
model = nn.Sequential(first, nn.Dropout(0.1), middle, nn.ReLU(), nn.Linear(16, 4, device=device)).to("cuda").to(0)
criterion = nn.CrossEntropyLoss().cuda(device)
for x, y in loader:
    start.record()
    x, y = x.cuda(non_blocking=True), y.to(device, non_blocking=True)
    mask = (torch.rand(x.shape, device="cuda", generator=chance) < 0.9).type(torch.cuda.FloatTensor)
    with torch.cuda.stream(side), torch.cuda.device(0):
        x = x.pin_memory().cuda(0) * mask + x.new_ones(8, device=device) + torch.zeros_like(x, device="cuda:0")
        x = x + torch.cuda.FloatTensor(16, 8).fill_(0.5) + torch.as_tensor([1.0], device=x.get_device())
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(side)
    loss = criterion(model(x.type("torch.cuda.FloatTensor")), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    end.record()
    synchronize()
    print("loss", loss.item().hex(), x.device)
print(start.elapsed_time(end) > 0, torch.cuda.memory_allocated() + torch.cuda.max_memory_allocated(device), torch.cuda.device_count(), x.is_cuda)
state = torch.cuda.get_rng_state()
again = [torch.rand(2, device="cuda").tolist(), torch.cuda.set_rng_state(state), torch.rand(2, device="cuda").tolist()]
torch.set_default_tensor_type("torch.cuda.FloatTensor")
print(again[0] == again[2], torch.rand(1).device, isinstance(chance, torch.Generator), os.environ["CUDA_VISIBLE_DEVICES"])
"""
SPELLINGS_BY_HAND = {
    'os.environ["CUDA_VISIBLE_DEVICES"] = "0"': 'os.environ["CUDA_VISIBLE_DEVICES"] = ""',
    "from torch.cuda import synchronize": "synchronize = print",
    "torch.cuda.manual_seed_all(1)": "",
    "torch.cuda.set_device(0)": "",
    'device("cuda:0")': 'device("cpu")',
    'device="cuda"': 'device="cpu"',
    ", pin_memory=True": "",
    "torch.cuda.Event(enable_timing=True), torch.cuda.Event(True), torch.cuda.Stream(priority=-1)": "None, None, None",
    'device("cuda")': 'device("cpu")',
    '.to("cuda").to(0)': "",
    ".cuda(device)": "",
    "start.record()": "",
    ".cuda(non_blocking=True)": "",
    "torch.cuda.FloatTensor)": "torch.FloatTensor)",
    "with torch.cuda.stream(side), torch.cuda.device(0)": "if True",
    ".pin_memory().cuda(0)": "",
    'device="cuda:0"': 'device="cpu"',
    "torch.cuda.FloatTensor(16, 8)": "torch.FloatTensor(16, 8)",
    "device=x.get_device()": "device='cpu'",
    "torch.cuda.current_stream().wait_stream(side)": "",
    "x.record_stream(side)": "",
    '.type("torch.cuda.FloatTensor")': "",
    "end.record()": "",
    "synchronize()": "",
    "start.elapsed_time(end) > 0, torch.cuda.memory_allocated() + torch.cuda.max_memory_allocated(device)": "True, 0",
    "torch.cuda.device_count()": "1",
    "torch.cuda.get_rng_state": "torch.get_rng_state",
    "torch.cuda.set_rng_state": "torch.set_rng_state",
    'torch.set_default_tensor_type("torch.cuda.FloatTensor")': "",
}
AMP = """
import torch, warnings
from torch import nn
from torch.cuda.amp import GradScaler, autocast
warnings.simplefilter("ignore")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler, other = GradScaler(), torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(6):
    x, y = torch.randn(16, 8).cuda(), torch.randint(4, (16,), device="cuda")
    with [autocast(), torch.autocast("cuda"), torch.autocast(device_type="cuda", dtype=torch.float16)][step % 3]:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
    now = (scaler, other)[step % 2]
    optimizer.zero_grad()
    now.scale(loss).backward()
    now.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    now.step(optimizer)
    now.update()
    print("loss", loss.item().hex(), out.dtype, now.get_scale(), now.is_enabled())
torch.save({"scaler": scaler.state_dict()}, "scaler.pt")
scaler.load_state_dict(torch.load("scaler.pt", map_location="cuda")["scaler"])
"""
AMP_BY_HAND = {
    "from torch.cuda.amp import GradScaler, autocast": "GradScaler = lambda: torch.amp.GradScaler('cpu')\nautocast = lambda: torch.autocast('cpu')",
    ".cuda()": "",
    'device="cuda"': 'device="cpu"',
    'GradScaler("cuda"': 'GradScaler("cpu"',
    'autocast("cuda")': 'autocast("cpu")',
    'device_type="cuda"': 'device_type="cpu"',
    'map_location="cuda"': 'map_location="cpu"',
}
PARALLEL = """
import io, torch, zipfile
from torch import nn
torch.manual_seed(0)
model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), device_ids=[0, 1]).cuda()

def train(model):
    for step in range(3):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 8).cuda()), torch.randint(4, (16,)).cuda(non_blocking=True))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        print("loss", loss.item().hex())

train(model)
torch.save(model.state_dict(), "kept.pt")
ways = ["cuda", "cuda:0", torch.device("cuda:1"), {"cpu": "cuda:0"}, lambda storage, place: storage.cuda(0), None]
kept = [torch.load("kept.pt", map_location=way) for way in ways]
print([sorted({str(value.device) for value in state.values()}) for state in kept], list(kept[0])[0])
# As it would have been written on a card: each storage says where it was.
with zipfile.ZipFile("kept.pt") as old, zipfile.ZipFile("card.pt", "w") as new:
    for name in old.namelist():
        new.writestr(name, old.read(name).replace(b"X\\x03\\x00\\x00\\x00cpu", b"X\\x06\\x00\\x00\\x00cuda:0"))
fresh = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda())
fresh.load_state_dict(torch.load("card.pt"))
train(fresh)
print("both", nn.parallel.data_parallel(fresh.module, torch.ones(4, 8).cuda(), [0, 1]).sum().item().hex())
"""
PARALLEL_BY_HAND = {
    "nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), device_ids=[0, 1])": "nn.Module()\nmodel.module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))\nmodel.forward = model.module.forward",
    "nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda())": "nn.Module()\nfresh.module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))\nfresh.forward = fresh.module.forward",
    ".cuda()": "",
    ".cuda(non_blocking=True)": "",
    '"cuda", "cuda:0", torch.device("cuda:1"), {"cpu": "cuda:0"}, lambda storage, place: storage.cuda(0), None': '"cpu"] * 6 + [',
    'load("card.pt")': 'load("kept.pt")',
    "nn.parallel.data_parallel(fresh.module, torch.ones(4, 8), [0, 1])": "fresh.module(torch.ones(4, 8))",
}
PROGRAMS = {
    "spellings": (SPELLINGS, SPELLINGS_BY_HAND),
    "amp": (AMP, AMP_BY_HAND),
    "parallel": (PARALLEL, PARALLEL_BY_HAND),
}


def by_hand(source, edits):
    """The edited copy, which no longer mentions CUDA."""
    for before, after in edits.items():
        assert before in source, before
        source = source.replace(before, after)
    return source


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_learns_the_same_as_its_edited_copy(flatout, script, name, tmp_path):
    """The results are bitwise equal, one sentence reports the redirection, and nothing stays in the temporary
    folder.
    """
    source, edits = PROGRAMS[name]
    script(source)
    script(by_hand(source, edits), "twin.py")
    (tmp_path / "tmp").mkdir()
    counterpart = flatout.plain("python", "twin.py")
    done = flatout("run", "--device", "cpu", "python", "train.py", env={"TMPDIR": str(tmp_path / "tmp")})
    assert counterpart.code == done.code == 0, counterpart.err + done.err
    assert counterpart.out.count("loss") >= 4
    assert done.out == counterpart.out
    assert done.said[1:] == [SENTENCE]
    assert list((tmp_path / "tmp").glob("flatout*")) == []


ANSWERS = """
import sys, torch
assert torch.cuda.is_available(), "needs a GPU"
if not torch.cuda.is_available():
    raise RuntimeError("needs a GPU")
if torch.cuda.device_count() == 0:
    sys.exit("needs a GPU")
x = torch.ones(2).cuda()
assert x.is_cuda
print("trains", x.is_cuda, torch.cuda.is_available(), torch.cuda.device_count(), "cuda" if torch.cuda.is_available() else "cpu")
"""


def test_a_program_that_demands_cuda_runs(flatout, script):
    """CUDA is reported available only where the program would otherwise end; everywhere else it takes its CPU
    path.
    """
    script(ANSWERS)
    done = flatout("run", "--device", "cpu", "python", "train.py")
    assert done.out == "trains False False 0 cpu\n", done.err


EITHER_WAY = """
import torch
torch.manual_seed(0)
use_cuda = torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")
torch.cuda.manual_seed_all(5)
more = {"num_workers": 1, "pin_memory": True, "shuffle": True} if use_cuda else {}
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=16 * max(1, torch.cuda.device_count()), **more)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5)).to(device)
for x, in loader:
    loss = model(x.to(device)).square().mean()
    loss.backward()
    print("loss", loss.item().hex(), torch.cuda.device_count())
"""


def test_a_program_with_a_path_for_the_cpu_takes_it(flatout, script):
    """The option changes nothing, and nothing is reported."""
    script(EITHER_WAY)
    plain = flatout.plain("python", "train.py", env={"CUDA_VISIBLE_DEVICES": ""})
    done = flatout("run", "--device", "cpu", "python", "train.py")
    assert (done.code, done.out) == (0, plain.out)
    assert done.said == [
        "flatout: no plan fits this command yet; running it as it is. To tune: flatout tune --device cpu python train.py"
    ]


def test_seeds_of_cuda_alone_are_those_of_the_cpu(flatout, script):
    script(
        "import torch\ntorch.cuda.manual_seed_all(7)\nprint(torch.rand(2, device='cuda').tolist())\ntorch.cuda.manual_seed(7)\n"
        "print(torch.rand(2).tolist())\ntorch.manual_seed(7)\ntorch.cuda.manual_seed(8)\nprint(torch.rand(2).tolist())"
    )
    done = flatout("run", "--device", "cpu", "python", "train.py")
    assert len(done.out.splitlines()) == 3, done.err
    assert set(done.out.splitlines()) == {
        str(torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist())
    }


def test_where_a_program_would_end():
    for text, ends in {
        "assert torch.cuda.is_available()": True,
        "assert x.is_cuda": True,
        "assert not torch.cuda.is_available()": False,
        "print(torch.cuda.is_available())": False,
        "if not torch.cuda.is_available(): raise E": True,
        "if not torch.cuda.is_available():\n  print('no')\n  sys.exit(1)": True,
        "if torch.cuda.is_available() == False: exit()": True,
        "if torch.cuda.device_count() < 1: raise E": True,
        "if torch.cuda.is_available(): raise E": False,
        "if torch.cuda.device_count() > 1: raise E": False,
        "if not torch.cuda.is_available():\n  device = 'cpu'": False,
        "d = 'cuda' if torch.cuda.is_available() else 'cpu'\nassert d": False,
    }.items():
        assert would_end_at(text.split("\n")) is ends, text


NAMES = st.one_of(
    st.sampled_from(["cpu", "cuda", "xpu", "mps", "meta", "cuda:nonsense", "", "vulkan:0"]),
    st.builds("{}:{}".format, st.sampled_from(["cuda", "xpu", "cpu"]), st.integers(0, 9)),
    st.integers(-1, 9),
    st.none(),
    st.just(torch.float32),
)


@given(NAMES)
def test_an_accelerator_becomes_the_cpu(named):
    """The CPU stays, and devices that are not accelerators are left to torch."""
    messages = []
    ledger = Ledger()
    redirect = DeviceArguments(torch, ledger, messages.append)
    found = redirect(named)
    assert redirect(found) == found
    ledger.restore()
    accelerator = str(named).partition(":")[0] in ("cuda", "xpu", "mps") or isinstance(named, int)
    assert found == torch.device("cpu") if accelerator else found is named
    assert bool(messages) == accelerator


# -- what cannot be redirected

NCCL = """
import torch
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""
OTHERS = {
    "nccl": (NCCL, "NCCL: it connects CUDA devices", "without torchrun"),
    "graph": (
        "import torch\ng = torch.cuda.CUDAGraph()",
        "a CUDA graph: it replays work",
        "without torch.cuda.CUDAGraph",
    ),
    "comparison": (
        "import torch\nassert torch.ones(2).cuda().device.type == 'cuda'",
        "compares a device with cuda",
        "change or remove this line",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_uses_of_cuda_are_named(flatout, script, name):
    """Under its own traceback: what, why, the line and the next command."""
    source, why, then = OTHERS[name]
    script(source)
    done = flatout("run", "--device", "cpu", "python", "train.py")
    assert done.code == 1
    assert "Traceback" in done.err
    message = "\n".join(done.said)
    assert why in message, done.err
    assert re.search(rf"^flatout:   fix +.*{re.escape(then)}", message, re.MULTILINE)
    assert re.search(r"^flatout:   at .*train\.py:\d+", message, re.MULTILINE)
    assert message.endswith("flatout explain FE000")


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("No supported gpu backend found!", "a trainer that requests a GPU"),
        ("Found no NVIDIA driver on your system.", "this use of CUDA"),
        ("x must be a CUDA tensor", "a CUDA extension"),
        ("0 active drivers ([]). There should only be one.", "a Triton kernel"),
        ("NVML Shared Library Not Found", "NVML"),
        ("mat1 and mat2 shapes cannot be multiplied (16x8 and 4x4)", ""),
    ],
)
def test_texts_of_unsupported_uses_of_cuda(message, what):
    """The text appears only with the option, and only for a device other than CUDA."""

    def explained(device):
        return explain(
            FailureRecord(
                [ExceptionRecord("RuntimeError", ["RuntimeError"], message)],
                facts={"device": device} if device else {},
            )
        )

    found = explained("cpu")
    assert found is not None
    assert (found.rule == "FE000") is bool(what)
    assert f"--device cpu cannot redirect {what}: " in found.message or not what
    assert all(other is None or other.rule != "FE000" for other in map(explained, ("", "cuda:1")))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--device", "gpu", "python", "train.py"),
            "'gpu' is not a device; write cpu, cuda or cuda:1",
        ),
        (
            ("--device", "cpu", "python", "-I", "train.py"),
            "`python -I` disables flatout, so --device cpu cannot redirect anything. Remove -I.",
        ),
        (
            ("--device", "cpu", "--gpus", "2", "python", "train.py"),
            "--gpus gives each rank its own CUDA device, but --device cpu is a single device",
        ),
        (
            ("--device", "cuda:1", "--procs", "2", "python", "train.py"),
            "--procs 2 would put all ranks on cuda:1. Use --gpus 2",
        ),
        (
            ("--device", "cpu", "--ray", "auto", "python", "train.py"),
            "--device cpu is a device of this machine, but --ray starts the program on others",
        ),
    ],
)
def test_mistakes(flatout, script, words, says):
    script("print('runs')")
    done = flatout.here("run", *words)
    assert done.code == 2
    assert says in done.err
    assert done.out == ""


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="not run: this machine has such a device")
def test_a_device_that_is_not_here(flatout, script):
    """The error comes before the program starts and lists the available devices."""
    script("print('runs')")
    done = flatout("run", "--device", "cuda:3", "python", "train.py")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"flatout: this machine has no device cuda:3\. torch sees cpu.*\. Try `flatout run --device \S+ python train\.py`\.\n",
        done.err,
    )


# -- together with other features of flatout

TRAINS = """
import os, torch
from torch import nn
torch.manual_seed(0)
model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))).cuda()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(4, (256,))), 16, shuffle=True, pin_memory=True)
for epoch in range(int(os.environ.get("EPOCHS", 1))):
    for at, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x.cuda() + torch.randn(x.shape, device="cuda")), y.cuda(non_blocking=True))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        torch.cuda.synchronize()
        print("loss", loss.item().hex(), torch.cuda.max_memory_allocated(), flush=True)
        if at == 5 and "STOPS" in os.environ:
            os.kill(os.getpid(), 15)
"""
TRAINS_BY_HAND = {
    ".cuda()": "",
    ".cuda(non_blocking=True)": "",
    'device="cuda"': 'device="cpu"',
    ", pin_memory=True": "",
    "torch.cuda.synchronize()": "",
    "torch.cuda.max_memory_allocated()": "0",
}


@pytest.fixture(scope="module")
def trained(flatout_in, tmp_path_factory):
    """The output of the edited copy."""
    cli = flatout_in(tmp_path_factory.mktemp("counterpart"))
    (cli.folder / "twin.py").write_text(by_hand(TRAINS, TRAINS_BY_HAND))
    return cli.plain("python", "twin.py").out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        ["--with", "gc_pause", "--with", "loader", "--with", "resident_data"],
        ["--rescue", "--watch"],
        ["--supervise"],
    ],
)
def test_with_the_other_options(flatout, script, trained, options):
    """Levers see a program on the CPU; every bit stays the same."""
    script(TRAINS)
    done = flatout("run", "--device", "cpu", *options, "python", "train.py")
    assert (done.code, done.out) == (0, trained), done.err
    assert done.said.count(SENTENCE) == 1
    if "--with" in options:
        assert re.search(r"applied [^;]*gc_pause", done.err)
        assert re.search(r"resident_data \([^)]*CUDA", done.err), done.err


def test_a_trial_is_redirected_too(flatout, script):
    script(TRAINS)
    done = flatout(
        "trial",
        "--device",
        "cpu",
        "--steps",
        "5",
        "--out",
        "record.json",
        "python",
        "train.py",
        env={"EPOCHS": "40"},
    )
    assert done.code == 0, done.err
    record = json.loads((flatout.folder / "record.json").read_text())
    assert record["steps"] == 5
    assert record["context"]["device"] == "cpu"


def test_a_plan_belongs_to_its_device():
    command = parse_command(["python", "-c", "1"])
    own, redirected = (
        plan_key(command, Facts(environment=environment)) for environment in ({}, {"FLATOUT_DEVICE": "cpu"})
    )
    assert differences(own, redirected) == ["another device ('the device in the script')"]
    assert differences(redirected, own) == ["another device ('cpu')"]
    assert differences(redirected, redirected) == []
