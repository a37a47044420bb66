"""Which tool names a planted wall first: TraceML or `flatout profile`, on the programs of ``bench/rivals/walls``.

The walls are those of TraceML's own list of diagnoses that exist on a CPU. A line that ends in ``# wall`` is
only in the slow version of a program, ``# fixed`` only in the other; ``# wall!`` marks a line that a finding
may name. The docstring says which diagnosis of each tool names the wall; it was written before any of them ran.
TraceML gets its two calls (rivals/traceml.toml), flatout the program alone. Judged is the first verdict: that
of TraceML's final summary, and the first finding of the profile. A warning on the other version is a false
alarm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import HERE
from rivals_edits import edited, lines_edited, read_edits

FOLDER = HERE / "rivals" / "walls"
EDITS = HERE / "rivals" / "traceml.toml"
WALLS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
STEPS = 300  # of a run under TraceML, which says its verdict at the end
ENDLESS = 10_000_000  # steps of a run under `flatout profile`, which ends it
LIMIT_S = 600.0


def version_of(text: str, wall: bool) -> tuple[str, list[int]]:
    """Returns one version of a program, and the numbers of its marked lines."""
    kept, marked = [], []
    for line in text.splitlines():
        mark = re.search(r"\s*# (wall|fixed)(!?)$", line)
        if mark and (mark[1] == "wall") != wall:
            continue
        kept.append(line[: mark.start()] if mark else line)
        if mark and mark[2]:
            marked.append(len(kept))
    program = "\n".join(kept)
    return re.sub(
        r'^""".*?"""', lambda doc: "\n" * doc[0].count("\n"), program, flags=re.DOTALL
    ) + "\n", marked


def expected(text: str) -> tuple[str, list[str], list[str]]:
    """Returns the wall in words, the words of TraceML's diagnosis, and flatout's rules."""
    found = {key: re.search(rf"^{key}: (.*)$", text, re.MULTILINE) for key in ("wall", "traceml", "flatout")}
    wall, traceml, flatout = (found[key][1] if found[key] else "" for key in found)
    return wall, traceml.split(), flatout.split()


def ask_traceml(program: str) -> dict[str, Any]:
    """Returns TraceML's primary diagnosis of a program."""
    after = edited(program, read_edits(EDITS))
    with tempfile.TemporaryDirectory(prefix="walls-") as text:
        folder, began_s = Path(text), time.monotonic()
        (folder / "train.py").write_text(after, encoding="utf-8")
        words = ["run", "train.py", "--run-name", "run", "--logs-dir", "logs", "--args", str(STEPS)]
        done = subprocess.run(
            [sys.executable, "-m", "traceml_ai.launcher.cli", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        spent_s = time.monotonic() - began_s
        summary = next(folder.glob("logs/run/**/final_summary.json"), None)
        if summary is None:
            return {"failed": (done.stderr or done.stdout).strip()[-300:], "seconds": spent_s}
        said = json.loads(summary.read_text(encoding="utf-8"))["primary_diagnosis"]
    return {
        **{key: said[key] for key in ("kind", "severity", "summary", "action")},
        "seconds": spent_s,
        "lines_edited": lines_edited(program, after),
    }


def ask_flatout(program: str) -> dict[str, Any]:
    """Returns the findings of `flatout profile`, the first one first."""
    with tempfile.TemporaryDirectory(prefix="walls-") as text:
        folder, began_s = Path(text), time.monotonic()
        (folder / "train.py").write_text(program, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "flatout", "profile", "--json", "python", "train.py", str(ENDLESS)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
        )
        spent_s = time.monotonic() - began_s
    try:
        record = json.loads(done.stdout)
    except ValueError:
        return {"failed": done.stderr.strip()[-300:], "seconds": spent_s}
    return {
        "findings": [
            {
                "rule": finding["rule"],
                "name": finding["name"],
                "said": finding["message"],
                "lines": [
                    place["line"]
                    for place in (finding.get("place"), *(finding.get("others") or ()))
                    if place and place.get("line")
                ],
            }
            for finding in record["findings"]
        ],
        "seconds": spent_s,
        "lines_edited": 0,
    }


def judge_traceml(said: dict[str, Any], words: list[str]) -> bool:
    """Returns whether its first verdict names the wall: the kind, and the phase where one is expected."""
    return said.get("kind") == words[0] and all(word in said["summary"].lower() for word in words[1:])


def judge_flatout(said: dict[str, Any], rules: list[str]) -> bool:
    return bool(said.get("findings")) and said["findings"][0]["rule"] in rules


def look_at(wall: str) -> dict[str, Any]:
    """Returns what both tools say of both versions of a program."""
    text = (FOLDER / f"{wall}.py").read_text(encoding="utf-8")
    words, traceml_words, rules = expected(text)
    slow, marked = version_of(text, wall=True)
    fixed, _ = version_of(text, wall=False)
    traceml, flatout = ask_traceml(slow), ask_flatout(slow)
    healthy = {"traceml": ask_traceml(fixed), "flatout": ask_flatout(fixed)}
    failed = [said["failed"] for said in (traceml, flatout, *healthy.values()) if "failed" in said]
    first = (flatout.get("findings") or [{}])[0]
    return {
        "status": "failed" if failed else "measured",
        "why": "; ".join(failed),
        "wall": words,
        "traceml": {**traceml, "named": judge_traceml(traceml, traceml_words)},
        "flatout": {
            **flatout,
            "named": judge_flatout(flatout, rules),
            "line_named": bool(set(first.get("lines", ())) & set(marked)),
        },
        "fixed": {
            **healthy,
            "false_alarms": [
                name
                for name, alarmed in (
                    ("traceml", healthy["traceml"].get("severity") in ("warn", "crit")),
                    ("flatout", bool(healthy["flatout"].get("findings"))),
                )
                if alarmed
            ],
        },
    }
