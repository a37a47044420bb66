"""Measures whether `flatout compare --same-training` is right on pairs of programs whose answer is known.

Each pair is a small training program and an edit of it. The verdict of three pairs of processes is held against
the expected one. A harmful edit that is called the same is the error that matters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import markdown_table, read_result, some_or_all, stamp, write_result

PROGRAM = """
import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(240, 16)
labels = (data[:, :5] + 0.2 * torch.randn(240, 5)).argmax(1)
samples = torch.utils.data.TensorDataset(data, labels)
loader = torch.utils.data.DataLoader(samples, 16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5)
criterion = nn.CrossEntropyLoss()
for epoch in range(30):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 50.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = (model(data).argmax(1) == labels).float().mean()
"""
SOUND, HARMFUL = ("same", "equivalent"), ("different",)
# name: the expected verdicts, what is replaced, by what, further options
EDITS: dict[str, tuple[tuple[str, ...], str, str, tuple[str, ...]]] = {
    "renamed variables": (SOUND, "optimizer", "descent", ()),
    "loss in a function": (
        SOUND,
        "criterion = nn.CrossEntropyLoss()",
        "def criterion(scores, classes):\n    return nn.functional.cross_entropy(scores, classes)",
        (),
    ),
    "model in a class": (
        SOUND,
        "model = nn.Sequential(",
        "class Net(nn.Sequential):\n    def forward(self, x):\n        return super().forward(x)\n\n\nmodel = Net(",
        (),
    ),
    "loop over parameters": (SOUND, "weight_decay=0.01", "weight_decay=0.01, foreach=False", ()),
    "fused optimizer": (SOUND, "weight_decay=0.01", "weight_decay=0.01, fused=True", ()),
    "logits in float64": (SOUND, "criterion(model(x), y)", "criterion(model(x).double(), y)", ()),
    "sum over the count": (
        SOUND,
        "criterion(model(x), y)",
        "nn.functional.cross_entropy(model(x), y, reduction='sum') / len(y)",
        (),
    ),
    "product written out": (SOUND, "nn.ReLU()", "nn.Hardtanh(0.0, 1e9)", ()),
    "clipping that never acts": (SOUND, "50.0", "60.0", ()),
    "batches in a worker": (SOUND, "16, shuffle=True", "16, shuffle=True, num_workers=1", ()),
    "evaluation written otherwise": (
        SOUND,
        "(model(data).argmax(1) == labels)",
        "(labels == model(data).argmax(1))",
        (),
    ),
    "bfloat16 with --half": (
        SOUND,
        "criterion(model(x), y)",
        "criterion(torch.autocast('cpu', torch.bfloat16)(model)(x).float(), y)",
        ("--half",),
    ),
    "bfloat16": (
        HARMFUL,
        "criterion(model(x), y)",
        "criterion(torch.autocast('cpu', torch.bfloat16)(model)(x).float(), y)",
        (),
    ),
    "another initialisation": (
        HARMFUL,
        "optimizer = ",
        "nn.init.normal_(model[0].weight, 0.0, 0.1)\noptimizer = ",
        (),
    ),
    "another seed": (HARMFUL, "manual_seed(0)", "manual_seed(1)", ()),
    "no zero_grad": (HARMFUL, "        optimizer.zero_grad()\n", "", ()),
    "last batch dropped": (HARMFUL, "shuffle=True", "shuffle=True, drop_last=True", ()),
    "samples in order": (HARMFUL, "shuffle=True", "shuffle=False", ()),
    "schedule one step early": (HARMFUL, "StepLR(optimizer, 30", "StepLR(optimizer, 29", ()),
    "learning rate 0.1 % higher": (HARMFUL, "lr=1e-3", "lr=1.001e-3", ()),
    "dropout 0.11": (HARMFUL, "Dropout(0.1)", "Dropout(0.11)", ()),
    "label smoothing 0.01": (HARMFUL, "CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.01)", ()),
    "no decay of biases": (
        HARMFUL,
        "AdamW(model.parameters(), lr=1e-3",
        "AdamW([{'params': [p for p in model.parameters() if p.dim() > 1]}, "
        "{'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}], lr=1e-3",
        (),
    ),
    "evaluation mode after epoch 1": (HARMFUL, "    model.train()\n", "    model.train(epoch == 0)\n", ()),
    "a detached layer": (
        HARMFUL,
        "nn.Linear(32, 5))",
        "nn.Linear(32, 5))\nmodel[0].bias.requires_grad_(False)",
        (),
    ),
    "clipping that acts": (HARMFUL, "50.0", "0.5", ()),
    "epsilon of 1e-7": (HARMFUL, "weight_decay=0.01", "weight_decay=0.01, eps=1e-7", ()),
}
LAST_BATCH = {"last batch dropped": ("randn(240", "randn(248")}  # applied to both programs first


def judged(name: str) -> dict[str, Any]:
    """The verdict on one pair, with the figures of the record."""
    expected, old, new, options = EDITS[name]
    program = PROGRAM
    for before, after in [LAST_BATCH[name], ("randn(240, 5", "randn(248, 5")] if name in LAST_BATCH else ():
        program = program.replace(before, after)
    assert old in program, name
    with tempfile.TemporaryDirectory(prefix="same-") as place:
        folder = Path(place)
        (folder / "a.py").write_text(program)
        (folder / "b.py").write_text(program.replace(old, new))
        argv = [sys.executable, "-m", "flatout", "compare", "--same-training", "--json", "--pairs", "3"]
        argv += ["--budget", "1s", *options, "python a.py", "python b.py"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode not in (0, 1, 12):
        return {
            "name": name,
            "verdict": "failed",
            "why": done.stderr[-400:],
            "right": False,
            "expected": expected,
        }
    record = json.loads(done.stdout)
    training = record["training"]
    assert done.returncode == {"different": 1, "cannot tell": 12}.get(training["verdict"], 0)
    row = {"name": name, "expected": expected, "right": training["verdict"] in expected}
    return {**training, **row, "seconds": record["seconds"]}


def page(rows: Sequence[dict[str, Any]]) -> str:
    sound = [row for row in rows if tuple(row["expected"]) == SOUND]
    harmful = [row for row in rows if tuple(row["expected"]) == HARMFUL]
    table = markdown_table(
        ("edit", "verdict", "", "why"),
        [(row["name"], row["verdict"], "" if row["right"] else "**wrong**", row["why"]) for row in rows],
    )
    return (
        f"# Do two programs learn the same?\n\n{sum(row['right'] for row in sound)} of {len(sound)} sound edits and "
        f"{sum(row['right'] for row in harmful)} of {len(harmful)} harmful ones were called what they are. Three pairs of "
        f"processes each. Where the expected verdict is `same`, `equivalent` is right too.\n\n{table}"
    )


def main() -> None:
    options = some_or_all(__doc__, "edits")
    made = stamp()
    known = {row["name"]: row for row in read_result("same_training", made, options.out).get("rows", ())}
    for name in [name for name in EDITS if not options.only or name in options.only]:
        known[name] = row = judged(name)
        print(f"{name}: {row['verdict']}{'' if row['right'] else ' (WRONG)'}: {row['why']}", flush=True)
    rows = [known[name] for name in EDITS if name in known]
    write_result("same_training", made, page(rows), {"made": made, "rows": rows}, folder=options.out)


if __name__ == "__main__":
    main()
