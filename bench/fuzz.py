"""Opens hostile and mutated files with every parser of flatout.

First, each command gets the files that are hostile on purpose. Then, until the time is over, the parsers get
valid files mutated by seed. A child process opens each file, with 512 MiB of memory and 5 s to spare. A
result is wrong if code of the file ran, if the child died of a signal or with a traceback of flatout, if it
ended with an undocumented exit code, if it left control codes on the terminal, if it rejected the file
without a message, or if it exceeded its limits.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from provenance import ROOT, markdown_table, stamp, write_result

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from hostile import Outcome, hostile, mutated, opened, openers, warm

from flatout.measure.clock import seconds


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
            for title, make in hostile(opener).items():
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
