"""`flatout run --with`: a lever by name for this run, on one process and on several ranks, and errors for
invalid names.
"""

import os
import re

import pytest
from click.exceptions import BadParameter
from options import as_option

from flatout.cli.options.arguments import LeverByName
from flatout.schema.enums import Origin

pytestmark = pytest.mark.timeout(150)

LEARNS = """
import sys, torch
from torch import nn
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 8), torch.arange(96) % 3), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def step(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

for epoch in range(3):
    for x, y in loader:
        step(x, y)
    print("loss", len(x), flush=True)
print("sum", sum(p.double().sum().item() for p in model.state_dict().values()).hex(), file=sys.stderr)
print("done")
"""


@pytest.mark.processes
def test_it_is_a_choice_of_this_run(flatout):
    """The choice adds to the plan's levers and names the user as its origin.

    The program learns of it, whether or not it uses it.
    """
    (flatout.folder / "plan.toml").write_text("schema = 1\n[levers]\ngc_pause = true\nthreads = 2\n")
    shown = "import json, os; print([(c['name'], c['value'], c['origin']) for c in json.load(open(os.environ['FLATOUT_JOB']))['plan']['choices']])"
    done = flatout(
        "run",
        "--plan",
        "plan.toml",
        "--with",
        "comm_compression=bf16",
        "--with",
        "threads=1",
        "python",
        "-c",
        shown,
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "[('gc_pause', True, 'file'), ('comm_compression', 'bf16', 'user'), ('threads', 1, 'user')]"
    ]


@pytest.mark.full
@pytest.mark.processes
def test_by_name_with_ranks(flatout, script):
    """Ranks that step by themselves, an option of data_parallel in the text, levers by name only, and a rank
    that loses the others.
    """
    script(LEARNS)
    words = [
        "run",
        "--procs",
        "2",
        "--with",
        'data_parallel={reduction = "mean"}',
        "--with",
        "comm_compression",
        "--with",
        "fused_optimizer",
        "--with",
        "loader",
        "python",
        "train.py",
    ]
    ranks = flatout(*words)
    assert ranks.code == 0, ranks.err
    assert "rehearsing" not in ranks.err
    assert "comm_compression=bf16, fused_optimizer=" in ranks.err
    assert "left out" not in ranks.err  # a lever of the plan for loaders would be
    assert ranks.out.endswith("done\n")
    assert len(re.findall(r"^sum ", ranks.err, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("autocast", True),
        ("comm_compression=bf16", "bf16"),
        ('comm_compression="bf16"', "bf16"),
        ("threads=2", 2),
        ("memory_budget=0.5", 0.5),
        ("batch_size={size=8}", {"size": 8}),
        ('comm_compression={kind = "powersgd", rank = 1}', {"kind": "powersgd", "rank": 1}),
        ("gc_pause = true", True),
        ("compile=max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_texts_that_name_a_lever(text, value):
    choice = LeverByName().convert(text, None, None)
    assert (choice.value, choice.origin) == (value, Origin.USER)
    assert LeverByName().convert(as_option(choice), None, None) == choice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("autocats", "no lever 'autocats'; did you mean autocast?"),
        ("=3", "no lever ''"),
        ("nothing_like_it=3", "`flatout levers` lists them"),
        ("threads=", "not a value for threads"),
        ("threads=[1, 2]", "not a value for threads"),
        ("threads=2\nother=1", "not a value for threads"),
        (
            "batch_size={size=0}",
            "'size' in the value of batch_size must be a whole number from 1 to 2147483647, not 0",
        ),
        ("comm_compression=bf17", "powersgd"),
        ("gradient_buckets=-1", "a number from 1e-06 to 1048576, not -1"),
        (
            "data_parallel={reduction='product'}",
            ' in the value of data_parallel must be "mean" or "sum", not',
        ),
        ("batch_size", "a table {size = a whole number from 1 to 2147483647, loader ="),
        ("threads=99999", f"must be a whole number from 1 to {os.cpu_count()}, not 99999"),
        ("threads=1.0", "whole number"),
        ("memory_budget=nan", "must be a number from 0 to 1, not 'nan'"),
        ("gc_pause=false", "must be true, not False"),
        ("ddp_flags={}", "gradient_as_bucket_view = true"),
    ],
)
def test_texts_that_name_no_lever(text, says):
    with pytest.raises(BadParameter, match=re.escape(says)):
        LeverByName().convert(text, None, None)
