"""`--device` on a machine with two cards: a script that names the first card runs on the CPU, or on the second."""

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
    ("device", "before", "seen"),
    [("cpu", None, "0 ''"), ("cuda:1", None, "1 '1'"), ("cuda:1", "5,7", "1 '7'"), ("cuda", None, "2 None")],
)
def test_the_program_and_the_levers_see_only_that_device(tmp_path, device, before, seen):
    visible = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    (tmp_path / "train.py").write_text(
        "import json, os\n"
        "print(len(json.load(open(os.environ['FLATOUT_JOB']))['facts']['gpus']), repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    )
    done = on_cards(
        tmp_path, "flatout", "run", "--device", device, "--with", "gc_pause", "train.py", **visible
    )
    assert done.stdout == f"{seen}\n", done.stderr


def test_a_card_that_is_not_here(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nprint(torch.cuda.get_device_name(0))\n")
    missing = on_cards(tmp_path, "flatout", "run", "--device", "cuda:2", "train.py").stderr
    assert re.search(
        r"no device cuda:2\. torch sees cpu, cuda:0 \(.+\), cuda:1 \(.+\)\. Try `flatout run --device cuda:1 train\.py`",
        missing,
    )
