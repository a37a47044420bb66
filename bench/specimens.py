"""Reads the programs of bench/zoo: each file holds an ill program and its fixed version (see zoo.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ZOO = Path(__file__).resolve().parent / "zoo"
MARK = re.compile(r"\s*# (ill!?|well|both!)$")


@dataclass(frozen=True)
class Specimen:
    """One program with its fault. ``lines`` are the acceptable lines of the ill text, counted from 1."""

    name: str
    fault: str
    codes: tuple[str, ...]
    ill: str
    well: str
    lines: frozenset[int]


def read_specimen(path: Path) -> Specimen:
    text = path.read_text(encoding="utf-8")
    _, header, body = text.split('"""', 2)
    fault, codes = (re.search(rf"^{name}: (.+)$", header, re.MULTILINE) for name in ("fault", "codes"))
    if fault is None or codes is None:
        raise SystemExit(f"{path.name} lacks `fault:` or `codes:` in its docstring; add both")
    texts: dict[str, list[str]] = {"ill": [], "well": []}
    lines = set()
    for line in body.lstrip("\n").split("\n"):
        found = MARK.search(line)
        bare = line[: found.start()] if found else line
        for kind in texts:
            if found is None or found[1].rstrip("!") in (kind, "both"):
                texts[kind].append(bare)
        if found and found[1].endswith("!"):
            lines.add(len(texts["ill"]))
    return Specimen(
        path.stem,
        fault[1],
        tuple(codes[1].split()),
        "\n".join(texts["ill"]),
        "\n".join(texts["well"]),
        frozenset(lines),
    )
