"""A record of each kind of page, with every part that a page can have, and a strict reader of pages.

The figures are invented: they are for display and are no results.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

from profiles import GAIN, ILL, LINE, healthy, what_ifs

from flatout.diagnose.check import profile_findings
from flatout.render.batch_page import batch_page
from flatout.render.compare_page import compare_page
from flatout.render.history_page import history_page
from flatout.render.lr_page import lr_page
from flatout.render.memory_page import memory_page
from flatout.render.profile_page import profile_page
from flatout.render.report import session_page
from flatout.render.scale_page import scale_page
from flatout.schema.batch import (
    BatchPoint,
    BatchRecord,
    LrPoint,
    LrRecord,
    MemoryForecast,
    MemoryPoint,
    NoiseScale,
)
from flatout.schema.compare import Blame, BlameRow, Change, CompareRecord, Gate, LossVerdict, SideRecord
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import MemoryGrowth, ProfileRecord, SyncRecord
from flatout.schema.records import PhaseTime, Ratio
from flatout.schema.run_request import HistoryRecord, JobEntry, RunEntry
from flatout.schema.scale import Link, ScalePoint, ScaleRecord
from flatout.schema.session import SessionRecord, TimeMemoryPoint

TAGS = frozenset(
    [
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "footer",
        "h1",
        "h2",
        "p",
        "ul",
        "li",
        "strong",
        "code",
        "pre",
        "small",
        "span",
        "i",
        "a",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "svg",
        "text",
        "rect",
        "line",
        "path",
        "circle",
    ]
)
MIB = 2**20
COMMAND = ["python", "train.py"]


class Parsed(HTMLParser):
    """Parses a page as a browser would, and rejects content that the pages never have."""

    def __init__(self, html):
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS, f"foreign tag <{tag}>"
        for name, value in attrs:
            assert not name.startswith("on"), f"a handler: {name}={value}"
            assert name not in ("src", "xlink:href", "action", "srcset", "style"), f"{name}={value}"
            assert name != "href" or re.fullmatch(r"[\w./%-]+", value or ""), value
            assert re.fullmatch(r"[a-z][a-z0-9-]*", name), f"foreign attribute {name}"
            if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "d"):
                assert not re.search("nan|inf", value or ""), f"{name}={value}"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(f"{word} " for word in self.words).split())


def session(name="session"):
    """One that found a plan; also "failed", and "empty" (just started)."""
    path = Path(__file__).parent / f"{name}.json"
    return SessionRecord.from_json(json.loads(path.read_text(encoding="utf-8")))


def limited():
    record = session()
    record.memory_limit_bytes = 100 * MIB
    record.frontier = [
        TimeMemoryPoint("plain", 150 * MIB),
        TimeMemoryPoint("recompute(blocks=0.5)", 90 * MIB, Ratio(0.95, 0.9, 1.0, 4), True, True),
        TimeMemoryPoint("recompute(blocks=1.0)", 40 * MIB, Ratio(0.75, 0.7, 0.8, 4), True),
        TimeMemoryPoint("inplace", None, note="it failed"),
    ]
    return record


def ill():
    """A profile with several faults."""
    growing = [2.0**26 + 98_000 * i + 20_000 * (i % 3) for i in range(14)]
    changes = {
        **ILL["slow_fetch"][0],
        **ILL["not_finite"][0],
        "what_ifs": what_ifs(loader=GAIN, syncs=Ratio(1.3, 1.2, 1.4, 20)),
        "synchronisations": [
            SyncRecord("item", LINE, 2.0, 2.4),
            SyncRecord("to device", LINE, 1.0, 0.2, MIB, False, True),
        ],
        "tensor_growth": MemoryGrowth(
            98_000, 1e-6, True, "list `losses`", LINE, graph=True, steps=14, series=growing
        ),
        "notes": ["no roof was measured"],
        "device_ms": {"computing": 6.0, "copies": 2.0, "communication": 3.0},
        "idle_ms": 1.5,
    }
    record = healthy(**changes)
    record.findings = profile_findings(record)
    found = {finding.name: finding for finding in record.findings}
    # As long as real ones are: they must not make a page wider than its screen.
    found["loss_kept_with_graph"].place = replace(
        LINE, file="/job/" + "a_folder_with_a_long_name/" * 4 + "train.py", text="x" * 150
    )
    found["loss_kept_with_graph"].evidence.append("y" * 200)
    return record


def comparison():
    def side(label, factor):
        phases = {"data": PhaseTime(factor, 0.9, 1.1, 0.25), "forward": PhaseTime(3.0, 2.9, 3.1, 0.75)}
        losses = {"0": [3.0, 2.0, 1.0], "1": [3.1, 2.2, 1.0]}
        return SideRecord(
            label, COMMAND, step_ms=4.0 * factor, peak_memory_bytes=2**30, phases=phases, losses=losses
        )

    line = SourceLocation("/work/a.py", 3, text="x = <b>(x)")
    slow = BlameRow("aten::bmm", "replaced", 0.9, 0.8, 1.0, 0.9, 1, 2, "aten::<flash>", line, True)
    same = BlameRow("aten::mm", "new", 0.1, -0.1, 0.3, 0.1, 0, 1)
    return CompareRecord(
        COMMAND,
        "/work",
        a=side("main", 1.0),
        b=side("</code>`x` | <img>", 1.25),
        step_time=Change(0.25, 0.2, 0.3, 6),
        phases_ms={"data": [0.25, 0.2, 0.3]},
        pairs=[0.2, 0.25, 0.3],
        losses=LossVerdict("different", "loss 3 is <b>nan</b> | _worse_"),
        gates=[Gate("step time", "3 %", "failed", "the step time changes by +20.0 % to +30.0 %")],
        notes=["another program ran"],
        blame=Blame("90 % of it is in 1 rows", 1.0, 0.8, 1.2, 4, [slow, same], ["<i>: 2 in A, 1 in B"]),
    )


def batch():
    points = [
        BatchPoint(
            size, step_ms=size / 8, samples_per_s=8000.0, speed=Ratio(1.1, 0.9, 1.2, 6), peak_bytes=size * MIB
        )
        for size in (8, 16, 32)
    ]
    points.append(BatchPoint(64, "too big", "it takes 64 MiB", peak_bytes=64 * MIB))
    noise = NoiseScale(5, 8, 64, 20.0, 15.0, 30.0)
    return BatchRecord(COMMAND, "/", own_size=16, effective=16, limit_bytes=40 * MIB, points=points, best=32, near_best=32, noise=noise)  # fmt: skip


def forecast():
    points = [
        MemoryPoint(4, 300, {"parameters": 100, "activations": 200}, {"a<b>": 200}, measured_bytes=310),
        MemoryPoint(8, why_not="it <fails>"),
    ]
    return MemoryForecast(COMMAND, "/", limit_bytes=500, limit_source="asked for", own_size=4, points=points, largest=4, largest_peak_bytes=300)  # fmt: skip


def scaling():
    points = [
        ScalePoint(strategy, devices, 64.0, 10.0, exposed_ms=1.0, wire_bytes=1e6, efficiency=1 / (1 + loss * devices), bound="latency: it waits")
        for strategy, loss in (("ddp", 0.01), ("fsdp", 0.1))
        for devices in (1, 2, 4)
    ]  # fmt: skip
    return ScaleRecord(COMMAND, "/", network=Link("<i>", 1e9, 5.0), points=points, notes=["one node"])


def lr():
    points = [LrPoint(1e-6 * 2**at, 3.0 - 0.1 * at, 3.0 - 0.1 * at) for at in range(20)]
    return LrRecord(
        COMMAND, "/", points=points, steepest=1e-3, lowest=0.1, suggestion=1e-3, why="it falls", groups=[0.1]
    )


def run(at, where="a CPU, torch 2.14", result="finished", speed=50.0):
    how = "KeyError" if result == "failed" else "ended"
    when = f"2026-11-{1 + at:02}T08:00:00Z"
    return RunEntry(
        f"job/runs/{at}/rank0.json", when, result, how, where, 100, speed + at, 2**29, "computing"
    )


def history():
    runs = [
        run(0),
        run(1),
        run(2, result="failed"),
        run(3),
        run(4, "a GPU"),
        run(5, "a GPU"),
        run(6, result="interrupted"),
    ]
    speedup = Ratio(1.3, 1.2, 1.4, 5)
    reports = {"tune": "job/a report.html"}
    job = JobEntry("job", COMMAND, "1.3 times as fast", speedup, True, runs, reports)
    return HistoryRecord(
        "/home/me/project/.flatout", "2026-11-25", "0.1.0", [job], {"job/profile.json": "of a newer flatout"}
    )


PAGES = {
    "session": (limited, session_page),
    "failed session": (lambda: session("failed"), session_page),
    "empty session": (lambda: session("empty"), session_page),
    "profile": (ill, profile_page),
    "empty profile": (lambda: ProfileRecord([], ""), profile_page),
    "failed profile": (lambda: ProfileRecord(["a"], "/", status="failed", message="it ended"), profile_page),
    "comparison": (comparison, compare_page),
    "batch": (batch, batch_page),
    "memory": (forecast, memory_page),
    "empty memory": (lambda: MemoryForecast(COMMAND, "/", notes=["<i>"]), memory_page),
    "scale": (scaling, scale_page),
    "lr": (lr, lr_page),
    "empty lr": (lambda: LrRecord(COMMAND, "/", why="<b>"), lr_page),
    "history": (history, history_page),
}


def with_text(thing, text, keep=frozenset({"status", "severity"})):
    """Put a text in place of every string of a record but the fields of these names."""
    if isinstance(thing, str):
        return text
    if isinstance(thing, list):
        return [with_text(item, text, keep) for item in thing]
    if isinstance(thing, dict):
        return {key: with_text(value, text, keep) for key, value in thing.items()}
    if is_dataclass(thing):
        changed = copy.copy(thing)
        for field in fields(thing):
            if field.name not in keep:
                object.__setattr__(changed, field.name, with_text(getattr(thing, field.name), text, keep))
        return changed
    return thing


def with_numbers(thing, number):
    """Put other numbers in place of all numbers of a record."""
    if thing is None or isinstance(thing, (bool, str)):
        return thing
    if isinstance(thing, (int, float)):
        return number()
    if isinstance(thing, list):
        return [with_numbers(item, number) for item in thing[:3]]
    if isinstance(thing, dict):
        return {key: with_numbers(value, number) for key, value in thing.items()}
    changed = copy.copy(thing)
    for field in fields(thing):
        object.__setattr__(changed, field.name, with_numbers(getattr(thing, field.name), number))
    return changed
