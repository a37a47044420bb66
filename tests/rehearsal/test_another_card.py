"""`--device` on a machine with two cards: a script that names the first card runs on the second and on the
CPU, or names the right one already.
"""

import re

import pytest
from cards import needed, on_cards

pytestmark = [needed(), pytest.mark.processes]
PROGRAM = """
import os, torch, warnings
from torch import nn
warnings.simplefilter("ignore")
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
torch.manual_seed(0)
torch.cuda.manual_seed(1)
device = torch.device("cuda:0")
model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)), device_ids=[0]).cuda()
chance, side = torch.Generator(device="cuda:0").manual_seed(3), torch.cuda.Stream(device=0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 16, True, pin_memory=True)
for x, y in loader:
    x, y = x.cuda(0, non_blocking=True), y.to(device, non_blocking=True)
    with torch.cuda.device(0), torch.autocast("cuda", dtype=torch.bfloat16):
        x = x + torch.randn(x.shape, device=device, generator=chance) + torch.cuda.FloatTensor(16, 8).fill_(0.5)
        loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    print("loss", loss.item().hex(), x.device, side.device)
torch.save(model.state_dict(), "kept.pt")
states = [torch.load("kept.pt", map_location=way) for way in ("cuda:0", lambda storage, place: storage.cuda(0), None)]
with device:
    print([next(iter(state.values())).device for state in states], torch.ones(1).device, torch.cuda.current_device(), torch.cuda.memory_allocated(0) > 0)
torch.cuda.set_device(0)
print("current", torch.cuda.current_device())
"""
OTHER = [
    ("torch.cuda.manual_seed(1)", "torch.cuda.set_device(1)\ntorch.cuda.manual_seed(1)"),
    ("cuda:0", "cuda:1"),
    ("set_device(0)", "set_device(1)"),
    ("[0]", "[1]"),
    ("device=0", "device=1"),
    ("cuda(0", "cuda(1"),
    ("device(0)", "device(1)"),
    ("allocated(0)", "allocated(1)"),
    ('os.environ["CUDA_VISIBLE_DEVICES"] = "0"', ""),
]


def edited(*edits):
    text = PROGRAM
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after)
    return text


@pytest.mark.full
def test_a_script_for_one_card_trains_on_the_other(tmp_path):
    """The results are bitwise those of its edited copy there; the copy itself runs unchanged, without a
    message.
    """
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "twin.py").write_text(edited(*OTHER))
    plain = on_cards(tmp_path, "python", "twin.py")
    assert plain.stdout.count("cuda:1 cuda:1") == 4, plain.stderr
    moved = on_cards(tmp_path, "flatout", "run", "--device", "cuda:1", "train.py")
    assert moved.stdout == plain.stdout, moved.stderr
    assert moved.stderr.splitlines()[1:] == [
        "flatout: the script asks for cuda:0; --device cuda:1 runs it on cuda:1"
    ]
    alone = on_cards(tmp_path, "flatout", "run", "--device", "cuda:1", "twin.py")
    assert alone.stdout == plain.stdout
    assert len(alone.stderr.splitlines()) == 1  # there is no plan


def test_no_card_is_touched_on_the_cpu(tmp_path):
    """The script computes what a machine without cards computes, and a script that chooses its own cards
    chooses none.
    """
    (tmp_path / "train.py").write_text(
        PROGRAM + "print(torch.cuda.is_initialized(), torch._C._cuda_getDeviceCount())"
    )
    with_cards, without = (
        on_cards(tmp_path, "flatout", "run", "--device", "cpu", "train.py", cards=cards) for cards in (2, 0)
    )
    assert with_cards.stdout.count("cpu cpu") == 4, with_cards.stderr
    assert with_cards.stdout == without.stdout
    assert with_cards.stdout.endswith("False 0\n")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("device", "seen"),
    [("cpu", "[]"), ("cuda:1", "['Stand-in card 1']"), ("cuda", "['Stand-in card 0', 'Stand-in card 1']")],
)
def test_levers_see_only_that_device(tmp_path, device, seen):
    (tmp_path / "train.py").write_text(
        "import json, os\nprint([gpu['name'] for gpu in json.load(open(os.environ['FLATOUT_JOB']))['facts']['gpus']])"
    )
    assert (
        on_cards(tmp_path, "flatout", "run", "--device", device, "--with", "gc_pause", "train.py").stdout
        == f"{seen}\n"
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("device", "says"),
    [
        (
            "cuda:2",
            r"no device cuda:2\. torch sees cpu, cuda:0 \(.+\), cuda:1 \(.+\)\. Try `flatout run --device cuda:1 train\.py`",
        ),
        ("cuda", "the script names no accelerator: it trained on the CPU, and --device cuda had no effect"),
    ],
)
def test_messages(tmp_path, device, says):
    (tmp_path / "train.py").write_text(
        "import torch\nlayer = torch.nn.Linear(2, 2)\nlayer(torch.ones(1, 2)).sum().backward()\n"
    )
    assert re.search(says, on_cards(tmp_path, "flatout", "run", "--device", device, "train.py").stderr)
