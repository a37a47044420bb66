"""Measures whether `flatout compare --blame` names what makes a program slower.

Each program is a healthy training program and the same one with a planted slow-down, or with nothing. The row
that is named first is held against the planted one.

    python bench/blame.py                  all ten, about 25 minutes
    python bench/blame.py --only copy,A/A
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import SRC, markdown_table, read_result, some_or_all, stamp, write_result

THEME = "blame"
PROGRAM = """
import time
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.images, self.labels = torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        h = F.gelu(self.up(x))
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 5, stride=4, padding=2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Images(), 16, shuffle=True)
for epoch in range(100000):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
"""
LINEAR = """
linear = F.linear


def slower_linear(x, weight, bias=None):
    rows = x.detach().flatten(0, -2)
    with torch.no_grad():
        linear(rows[: len(rows) // 5], weight, bias)
    return linear(x, weight, bias)


F.linear = slower_linear
"""
CONVOLUTIONS = (
    "nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), "
    "nn.Conv2d(32, width, 4, stride=4))"
)


@dataclass(frozen=True)
class Plant:
    """``old`` of the program becomes ``new``. ``row``: a pattern of the row that is right; "" is none.

    ``healthy``: an edit of both programs first. ``setting``: a pattern of a setting that must be named, too."""

    old: str
    new: str
    row: str
    healthy: tuple[str, str] = ("", "")
    setting: str = ""


PLANTS = {
    "copy": Plant(
        "h = F.gelu(self.up(x))", "h = F.gelu(self.up(x)).mT.contiguous().mT.contiguous()", "copy_.*new"
    ),
    "fallback": Plant(
        "        mixed = F.scaled",
        "        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):\n            mixed = F.scaled",
        "scaled_dot_product_flash_attention.* -> .*bmm",
    ),
    "no fusion": Plant(
        "self.attend(self.norm(x))",
        "self.attend((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() "
        "* self.norm.weight + self.norm.bias)",
        "native_layer_norm.* -> .*(div|mean|var|sub|mul)",
    ),
    "flag": Plant(
        "torch.set_num_threads(1)",
        "torch.set_num_threads(1)\ntorch.backends.mkldnn.set_flags(False)",
        "mkldnn_convolution.* -> |convolution_backward",
        ("nn.Conv2d(3, width, 5, stride=4, padding=2)", CONVOLUTIONS),
        "mkldnn: True in A, False in B",
    ),
    "loader": Plant(
        "return self.images[i]", "time.sleep(0.0003)\n        return self.images[i]", "waiting for data"
    ),
    "launches": Plant(
        "h = F.gelu(self.up(x))",
        "h = torch.stack([torch.stack([F.gelu(part) for part in row.split(8)]) for row in self.up(x)]).flatten(1, 2)",
        "(more calls|new|replaced).*F.gelu.part.",
    ),
    "denormals": Plant(
        "torch.randn(256, 3, 32, 32)", "torch.full((256, 3, 32, 32), 1e-39)", "conv.*slower at the same calls"
    ),
    "threads": Plant(
        "torch.set_num_threads(2)",
        "torch.set_num_threads(1)",
        "slower at the same calls",
        ("torch.set_num_threads(1)", "torch.set_num_threads(2)"),
        "threads: 2 in A, 1 in B",
    ),
    "wrapper": Plant(
        "torch.set_num_threads(1)\n",
        f"torch.set_num_threads(1)\n{LINEAR}",
        "addmm.*at `linear.rows",
        ("width=64", "width=128"),
    ),
    "A/A": Plant("", "", ""),
}


def judged(name: str) -> dict[str, Any]:
    """What was named first, and whether it is the planted slow-down."""
    plant = PLANTS[name]
    program = PROGRAM.replace(*plant.healthy) if plant.healthy[0] else PROGRAM
    assert plant.old in program, name
    planted = program.replace(plant.old, plant.new) if plant.old else program
    with tempfile.TemporaryDirectory(prefix="blame-") as place:
        folder = Path(place)
        (folder / "a.py").write_text(program)
        (folder / "b.py").write_text(planted)
        argv = [sys.executable, "-m", "flatout", "compare", "--blame", "--json", "--budget", "120s"]
        done = subprocess.run(
            [*argv, "python a.py", "python b.py"], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode:
        return {"name": name, "right": False, "first": done.stderr[-400:]}
    record = json.loads(done.stdout)
    blame = record["blame"]
    blamed = [row for row in blame["rows"] if row["blamed"]]
    first = text(blamed[0]) if blamed else "nothing"
    settings = "; ".join(blame["settings"])
    right = (
        bool(blamed and re.search(plant.row, first) and re.search(plant.setting, settings))
        if plant.row
        else not blamed
    )
    return {
        "name": name,
        "right": right,
        "first": first,
        "planted": plant.row or "nothing",
        "settings": settings,
        "verdict": blame["verdict"],
        "whole": [blame[key] for key in ("ms", "low", "high", "n")],
        "row": [blamed[0][key] for key in ("ms", "low", "high", "share")] if blamed else [],
        "further": [f"{row['ms']:+.3f} ms: {text(row)}" for row in blamed[1:6]],
        "seconds": record["seconds"],
        "disturbance": record["disturbance"],
    }


def text(row: dict[str, Any]) -> str:
    names = f"{row['before']} -> {row['name']}" if row["before"] else row["name"]
    place = f" at `{row['place']['text']}`" if row["place"] else ""
    return f"{names}: {row['change']}{place}"


def interval(values: Sequence[float]) -> str:
    return f"{values[0]:+.3f} ({values[1]:+.3f} to {values[2]:+.3f})" if values else ""


def page(rows: Sequence[dict[str, Any]]) -> str:
    table = markdown_table(
        ("planted", "whole difference, ms a step", "pairs", "named first", "its ms a step", "its share", ""),
        [
            (
                row["name"],
                interval(row.get("whole", ())),
                row["whole"][3] if "whole" in row else "",
                row["first"],
                interval(row.get("row", ())),
                f"{row['row'][3]:.0%}" if row.get("row") else "",
                "" if row["right"] else "**wrong**",
            )
            for row in rows
        ],
    )
    return (
        f"# What made a program slower\n\n`flatout compare --blame` named the planted slow-down first in "
        f"{sum(row['right'] for row in rows)} of {len(rows)} programs. In A/A nothing may be named.\n\n{table}"
    )


def main() -> None:
    options = some_or_all(__doc__, "programs")
    made = stamp()
    known = {row["name"]: row for row in read_result(THEME, made, options.out).get("rows", ())}
    for name in [name for name in PLANTS if not options.only or name in options.only]:
        known[name] = row = judged(name)
        print(json.dumps(row, indent=1), flush=True)
        rows = [known[name] for name in PLANTS if name in known]
        write_result(THEME, made, page(rows), {"made": made, "rows": rows}, {str(SRC): "src"}, options.out)


if __name__ == "__main__":
    main()
