"""Tests checkpoints under interruptions, power loss and damage: at every point, and thousands of times.

cuts          SIGKILL hits a saving process before, during and after every call that changes the disk. The
              newest checkpoint must be the previous or the new one, bit for bit. The next writer must
              leave nothing incomplete behind
power         after every call, unflushed data is lost, torn or kept, many times by seed
accidents     a bit, a page, a length, a file or a folder of the newest checkpoint changes: this must be
              detected, and the previous checkpoint used
all bad       the same for every checkpoint: an error, and nothing is changed
torch.load    accidents of a single file, applied to the same state saved by `torch.save`: how many of
              them it loads without an error
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import ROOT, markdown_table, stamp, write_result

sys.path.insert(0, str(ROOT / "tests" / "checkpoint"))

import torch
from corrupting import KINDS, OF_ONE_FILE
from cutting import AFTER, BEFORE, MIDDLE, Disk, copied, killed_at, points

from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.values import pack
from flatout.measure.clock import seconds
from flatout.schema.errors import CheckpointError

ACCIDENTS, LOSSES, LOADS = 10_000, 3_000, 1_000


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {f"layer{at}": torch.randn(64, 48, generator=generator) for at in range(6)},
        "step": step,
        "random": torch.get_rng_state(),
        "optimizer": {at: {"m": torch.randn(64, 48, generator=generator)} for at in range(6)},
    }


def save(folder: Path, step: int, keep: int = 3) -> None:
    with CheckpointFolder(folder, keep=keep) as saves:
        saves.write(
            "bench",
            step,
            {
                "": pack(torch, state(step)),
                "rank1": pack(torch, {"step": step, "more": torch.full((3000,), float(step))}),
            },
        )


def found(folder: Path, steps: tuple[int, ...]) -> str:
    """Returns what is wrong; "" if the newest checkpoint is intact, chosen first, and of these steps."""
    try:
        newest, bad = CheckpointFolder(folder).newest()
        if newest is None or newest.step not in steps or bad:
            return f"picked {newest and newest.step}, skipped {len(bad)}"
        got, expected = newest.read(torch), state(newest.step)
        if (
            not all(torch.equal(got["model"][name], tensor) for name, tensor in expected["model"].items())
            or newest.read(torch, "rank1")["step"] != newest.step
        ):
            return "other bits"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cuts(folder: Path) -> list[dict[str, str]]:
    """Tests the first checkpoint, one more, one that removes older ones, and one after two killed writers."""
    rows = []
    for scenario, before, keep in (
        ("the first checkpoint", (), 3),
        ("one more", (1, 2), 9),
        ("one more, older ones removed", (1, 2, 3, 4), 2),
        ("one more, after two killed writers", (1, 2, 3), 2),
    ):
        start = folder / "start"
        shutil.rmtree(start, ignore_errors=True)
        for step in before:
            save(start, step, keep=9)
        start.mkdir(exist_ok=True)
        if "killed writers" in scenario:
            for at in (12, 30):
                killed_at(at, AFTER, lambda start=start: save(start, 9, keep=9))
        last = max(before, default=0)
        whole = copied(start, folder / "whole")
        calls = points(lambda whole=whole, last=last, keep=keep: save(whole, last + 1, keep))
        for at, name in enumerate(calls):
            for when in (BEFORE, MIDDLE, AFTER) if name == "write" else (BEFORE, AFTER):
                cut = copied(start, folder / "cut")
                code = killed_at(at, when, lambda cut=cut, last=last, keep=keep: save(cut, last + 1, keep))
                nothing = not before and CheckpointFolder(cut).newest() == (None, [])
                wrong = "" if nothing else found(cut, (last, last + 1))
                if not wrong:
                    save(cut, last + 2, keep)
                    wrong = found(cut, (last + 2,)) or (
                        "left behind" if any(each.name.startswith(".") for each in cut.iterdir()) else ""
                    )
                rows.append(
                    {
                        "scenario": scenario,
                        "call": name,
                        "when": when,
                        "wrong": wrong or ("" if code == -9 else f"ended with {code}"),
                    }
                )
    return rows


def power(folder: Path, losses: int, seed: int) -> list[dict[str, str]]:
    start, before, fresh = folder / "running", folder / "as it was", folder / "left"
    save(start, 1)
    save(start, 2)
    copied(start, before)
    disk = Disk(start)
    disk.record(lambda: save(start, 3, keep=2))
    renamed = next(
        at
        for at, (name, args, *_) in enumerate(disk.observed)
        if name == "rename" and str(args[1]).endswith("step-00000003")
    )
    flushed = next(at for at, (name, *_) in enumerate(disk.observed) if at > renamed and name == "fsync")
    rows = []
    for number in range(losses):
        chance = random.Random(f"{seed} {number}")
        at, how = (
            1 + number % len(disk.observed),
            ("nothing", "everything", "any", "any", "any")[number // len(disk.observed) % 5],
        )
        replayed = Disk(start, like=before)
        replayed.observed = disk.observed
        shutil.rmtree(fresh, ignore_errors=True)
        replayed.after(at).left(chance, how, fresh)
        rows.append(
            {
                "at": str(at),
                "how": how,
                "wrong": found(fresh, (3,) if at > flushed else (2,) if at <= renamed else (2, 3)),
            }
        )
    return rows


def accidents(folder: Path, count: int, seed: int) -> list[dict[str, str]]:
    whole, hurt = folder / "whole saves", folder / "hurt"
    for step in (1, 2, 3):
        save(whole, step)
    rows = []
    for number in range(count):
        chance, kind = random.Random(f"{seed} {number}"), KINDS[number % len(KINDS)]
        copied(whole, hurt)
        what = kind(chance, hurt / "step-00000003", hurt / "step-00000002")
        newest, bad = CheckpointFolder(hurt).newest()
        seen = newest is not None and newest.step == 2 and len(bad) == 1
        rows.append(
            {
                "kind": kind.__name__,
                "what": what,
                "wrong": "" if seen and (number % 20 or not found_older(newest)) else "not seen",
            }
        )
    return rows


def found_older(newest: Any) -> str:
    got, expected = newest.read(torch), state(2)
    return (
        ""
        if all(torch.equal(got["model"][name], tensor) for name, tensor in expected["model"].items())
        else "other bits"
    )


def all_bad(folder: Path, count: int, seed: int) -> list[dict[str, str]]:
    whole, hurt, rows = folder / "three saves", folder / "all hurt", []
    for step in (1, 2, 3):
        save(whole, step)
    kinds = [
        kind
        for kind in KINDS
        if kind.__name__ not in ("duplicate", "renamed_folder", "swap", "stale_manifest")
    ]
    for number in range(count):
        chance = random.Random(f"{seed} all {number}")
        copied(whole, hurt)
        for step in (1, 2, 3):
            chance.choice(kinds)(chance, hurt / f"step-{step:08d}", hurt / "step-00000001")
        before = sorted((str(each), each.stat().st_size) for each in hurt.rglob("*"))
        try:
            CheckpointFolder(hurt).newest()
            wrong = "a damaged checkpoint was accepted"
        except CheckpointError:
            wrong = (
                ""
                if sorted((str(each), each.stat().st_size) for each in hurt.rglob("*")) == before
                else "something was changed"
            )
        rows.append({"kind": "all", "what": "", "wrong": wrong})
    return rows


def torch_load(folder: Path, count: int, seed: int) -> list[dict[str, str]]:
    place, expected, rows = folder / "single", state(3), []
    place.mkdir()
    for number in range(count):
        chance, kind = random.Random(f"{seed} torch {number}"), OF_ONE_FILE[number % len(OF_ONE_FILE)]
        torch.save(expected, place / "state.pt")
        kind(chance, place, place)
        try:
            got = torch.load(place / "state.pt", weights_only=True)
            same = equal(got, expected)
            outcome = "loaded correctly" if same else "loaded without an error, but wrong"
        except Exception:
            outcome = "an error"
        rows.append({"kind": kind.__name__, "outcome": outcome})
    return rows


def equal(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in b)
    return torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def page(records: dict[str, list[dict[str, str]]], took: dict[str, float]) -> str:
    def line(title: str, rows: list[dict[str, str]]) -> list[str]:
        wrong = [row for row in rows if row["wrong"]]
        return [title, f"{len(rows):,}", f"{len(rows) - len(wrong):,}", f"{len(wrong):,}"]

    table = [
        line(f"killed during a save: {name}", [row for row in records["cuts"] if row["scenario"] == name])
        for name in dict.fromkeys(row["scenario"] for row in records["cuts"])
    ]
    table += [
        line(
            f"loss of power; unflushed data kept: {how}",
            [row for row in records["power"] if row["how"] == how],
        )
        for how in dict.fromkeys(row["how"] for row in records["power"])
    ]
    table += [
        line(
            f"accident: {(kind.__doc__ or 'A file is missing').splitlines()[0].rstrip('.')}",
            [row for row in records["accidents"] if row["kind"] == kind.__name__],
        )
        for kind in KINDS
    ]
    table.append(line("accidents to every checkpoint at once: an error, nothing changed", records["all bad"]))
    loads = Counter((row["kind"], row["outcome"]) for row in records["torch.load"])
    outcomes = ("an error", "loaded correctly", "loaded without an error, but wrong")
    beside = [
        [kind.__name__.replace("_", " "), *(f"{loads[kind.__name__, outcome]:,}" for outcome in outcomes)]
        for kind in OF_ONE_FILE
    ]
    total, wrong = (
        sum(len(records[name]) for name in ("cuts", "power", "accidents", "all bad")),
        sum(
            bool(row["wrong"]) for name in ("cuts", "power", "accidents", "all bad") for row in records[name]
        ),
    )
    return "\n\n".join(
        [
            f"{total:,} faults, {wrong:,} wrong choices. A fault counts as survived if the newest checkpoint is the right one, bit for bit. "
            "After a kill, the next writer must also leave nothing behind.",
            markdown_table(["fault", "n", "survived", "not"], table),
            f"`torch.load` of {torch.__version__}: accidents of a single file that `torch.save` wrote with the same state (n = {len(records['torch.load']):,}):",
            markdown_table(["accident", *outcomes], beside),
            "Seconds: "
            + ", ".join(f"{name} {time:.0f}" for name, time in took.items())
            + ". `--seed` reproduces the accidents.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="run one hundredth of the faults, and write no page"
    )
    asked = parser.parse_args()
    made = stamp()
    less = 100 if asked.quick else 1
    torch.set_num_threads(1)
    records: dict[str, list[dict[str, str]]] = {}
    took: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="flatout-faults-") as place:
        campaigns: dict[str, Callable[[Path], list[dict[str, str]]]] = {
            "cuts": cuts,
            "power": lambda folder: power(folder, LOSSES // less, asked.seed),
            "accidents": lambda folder: accidents(folder, ACCIDENTS // less, asked.seed),
            "all bad": lambda folder: all_bad(folder, ACCIDENTS // less // 20, asked.seed),
            "torch.load": lambda folder: torch_load(folder, LOADS // less, asked.seed),
        }
        for name, campaign in campaigns.items():
            began, folder = seconds(), Path(place, name.replace(" ", "-"))
            folder.mkdir()
            records[name] = campaign(folder)
            took[name] = seconds() - began
            print(
                name,
                len(records[name]),
                "wrong:",
                sum(bool(row.get("wrong")) for row in records[name]),
                f"{took[name]:.0f} s",
                flush=True,
            )
    if asked.quick:
        print(page(records, took))
    else:
        wrong = {name: [row for row in rows if row.get("wrong")] for name, rows in records.items()}
        counts = {name: len(rows) for name, rows in records.items()}
        text, data = write_result(
            "faults",
            made,
            page(records, took),
            {"seed": asked.seed, "seconds": took, "counts": counts, "wrong": wrong},
        )
        print(text.name, data.name)


if __name__ == "__main__":
    main()
