"""Opens hostile and mutated files with every parser of flatout.

First, each command gets the files that are hostile on purpose. Then, until the time is over, the parsers get
valid files mutated by seed. A child process opens each file, with 512 MiB of memory and 5 s to spare. A
result is wrong if code of the file ran, if the child died of a signal or with a traceback of flatout, if it
ended with an undocumented exit code, if it left control codes on the terminal, if it rejected the file
without a message, or if it exceeded its limits.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import ROOT, markdown_table, stamp, write_result

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from hostile import (
    Bomb,
    Outcome,
    hostile,
    linked,
    mutated,
    odd,
    opened,
    openers,
    sparse,
    warm,
    with_header,
    written,
    zipped,
)

from flatout.measure.clock import seconds


def more_hostile(opener: Any) -> dict[str, Callable[[Path], object]]:
    """Files like those of ``tests/faults/hostile.py``, of kinds that the test suite covers with one of those."""
    deep, sound = 10**6, opener.sound or b"{}"
    contents = {
        "nothing": b"",
        "a pickle in a zip, as torch.save": zipped(
            archive__data__pkl=pickle.dumps(Bomb()), archive__version=b"3"
        ),
        "deep and closed": b"[" * deep + b"]" * deep,
        "zeros": bytes(1000),
        "UTF-16": sound.decode(errors="replace").encode("utf-16"),
        "a mark and then itself": b"\xef\xbb\xbf" + sound,
        "a number of a million digits inside": sound.replace(b"1", b"9" * deep, 1),
        "minus": b"-",
        "null": b"null",
        "a table": b"{}",
        "a word": b'"x"',
        "NaN": b"NaN",
        "itself twice": sound * 2,
        "marshal": b"\xe3\x00\x00\x00\x00",
        "a script": b"#!/bin/sh\ntouch canary\n",
        "an ELF": b"\x7fELF" + bytes(99),
        "TOML: tables": b"[a]\n" + b"[[a.b]]\n" * 5000,
        "TOML: deep": b"a = " + b"[" * 30_000,
        "Python: long": b"x = 1" + b" + 1" * 20_000,
        "Python: NUL": b"import torch\0\n",
        "a notebook": json.dumps(
            {"cells": [{"cell_type": "code", "source": ["!touch canary\n", "%run x\n"]}]}
        ).encode(),
    }
    made: dict[str, Callable[[Path], object]] = {title: written(data) for title, data in contents.items()}
    made |= {
        "a gigabyte of zeros": sparse(1 << 30),
        "a folder": lambda path: path.mkdir(),
        "a device that says nothing": linked("/dev/null"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to nowhere": linked("nowhere"),
        "memory": linked("/proc/self/mem"),
        "no right to read": unreadable(sound),
    }
    if opener.json and opener.sound:
        made |= {
            f"odd values {seed}": written(odd(opener, random.Random(seed), share=0.3)) for seed in range(2, 8)
        }
    if opener.kind == "tensors":
        rows = {str(at): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for at in range(200_000)}
        made["many"] = written(with_header(json.dumps(rows).encode()))
    return made


def unreadable(data: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data)
        path.chmod(0)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="only parsers whose name contains this")
    parser.add_argument("--no-page", action="store_true")
    asked = parser.parse_args()
    made, began = stamp(), seconds()
    warm()
    kinds = [each for each in openers().values() if asked.only in each.kind]
    codes: dict[str, Counter[int]] = defaultdict(Counter)
    longest: dict[str, float] = defaultdict(float)
    largest: dict[str, int] = defaultdict(int)
    wrong: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()

    def take(kind: str, what: str, outcome: Outcome) -> None:
        codes[kind][outcome.code] += 1
        longest[kind] = max(longest[kind], outcome.seconds)
        largest[kind] = max(largest[kind], outcome.grew_bytes)
        if why := outcome.wrong():
            wrong.append({"kind": kind, "file": what, "why": why})
            print(f"{kind}: {what}: {why}", flush=True)

    with tempfile.TemporaryDirectory(prefix="flatout-fuzz-") as place:
        folder = Path(place, "one")

        def once(opener: Any, what: str, make: Any) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            take(opener.kind, what, opened(opener, make, folder))

        for opener in kinds:
            for title, make in {**hostile(opener), **more_hostile(opener)}.items():
                once(opener, title, make)
                counts["on purpose"] += 1
        seed = asked.seed
        while seconds() - began < 60 * asked.minutes:
            for opener in kinds:
                if opener.sound:
                    once(
                        opener,
                        f"seed {seed}",
                        lambda path, opener=opener, seed=seed: path.write_bytes(mutated(opener, seed)),
                    )
                    counts["mutated"] += 1
            seed += 1
    rows = [
        [
            kind,
            f"{sum(codes[kind].values()):,}",
            ", ".join(f"{code}: {n:,}" for code, n in sorted(codes[kind].items())),
            f"{longest[kind]:.1f}",
            f"{largest[kind] / 2**20:.0f}",
            sum(each["kind"] == kind for each in wrong),
        ]
        for kind in codes
    ]
    text = "\n\n".join(
        [
            f"{counts['on purpose']:,} files that are hostile on purpose and {counts['mutated']:,} mutated ones (seeds {asked.seed} to {seed - 1}) in "
            f"{(seconds() - began) / 60:.0f} minutes: {len(wrong)} wrong, code of a file executed {sum('code of' in each['why'] for each in wrong)} times.",
            markdown_table(
                ["parser", "files", "exit code: files", "longest, s of CPU", "largest, MiB", "wrong"], rows
            ),
            " ".join((__doc__ or "").split("\n\n")[1].split()),
        ]
    )
    if asked.no_page:
        print(text)
    else:
        write_result(
            "fuzz", made, text, {"wrong": wrong, "seeds": [asked.seed, seed], "counts": dict(counts)}
        )


if __name__ == "__main__":
    main()
