"""Reads the programs of bench/zoo and bench/reports: each file holds an ill program and its fixed version (see zoo.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ZOO = Path(__file__).resolve().parent / "zoo"
MARK = re.compile(r"\s*# (ill!?|well|both!)$")


@dataclass(frozen=True)
class Specimen:
    """One program with its fault. ``lines`` are the acceptable lines of the ill text, counted from 1.

    ``says``: a pattern of a true message. ``kind``: of a report, correctness or performance."""

    name: str
    fault: str
    codes: tuple[str, ...]
    ill: str
    well: str
    lines: frozenset[int]
    link: str = ""
    says: str = ""
    kind: str = "correctness"


def read_specimen(path: Path) -> Specimen:
    text = path.read_text(encoding="utf-8")
    _, header, body = text.split('"""', 2)
    fields = dict(re.findall(r"^(fault|codes|link|says|kind): (.+)$", header, re.MULTILINE))
    if "fault" not in fields or not fields.keys() & {"codes", "says"}:
        raise SystemExit(f"{path.name} lacks `fault:`, or `codes:` and `says:` in its docstring; add them")
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
        fields["fault"],
        tuple(fields.get("codes", "").split()),
        "\n".join(texts["ill"]),
        "\n".join(texts["well"]),
        frozenset(lines),
        **{name: fields[name] for name in ("link", "says", "kind") if name in fields},
    )
