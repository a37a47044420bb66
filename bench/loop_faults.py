"""Injects out-of-memory errors at all kinds of places of a training with `flatout.Loop`.

An error is injected at one operator, counted by torch's dispatcher: in forward and backward, in the
optimizer, or in an evaluation between two steps. Models, optimizers, precisions and seeds
vary. Each run is compared with the same run without an error:

    done again     the Loop repeated the step. The weights of every step equal those of the undisturbed run:
                   bit for bit where no micro-batches were needed, otherwise up to the rounding of the
                   precision. No tensor of the failed attempt remains
    refused        it ended with an error message before an unsafe step (an optimizer that had started to
                   update weights)
    wrong          anything else: different weights, a leaked tensor, a hang, another error

Finally, the address space of the process is limited (RLIMIT_AS), and the allocator really fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import HERE, RESULTS, markdown_table, stamp, write_result

PROGRAM = HERE / "programs" / "faults.py"
GOAL = 300
TIMEOUT_S = 1500
LIMITS_MIB = (40, 50, 60, 80)  # of address space in addition to the current use


def run(words: list[str]) -> list[Any]:
    """Runs the program and returns its records. A hang is a record, too."""
    record = {"phase": words[0], "case": " ".join(words), "site": "", "verdict": "wrong"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return [{**record, "why": f"no end within {TIMEOUT_S} s"}]
    if done.returncode:
        return [{**record, "why": done.stderr[-300:]}]
    return [json.loads(line) for line in done.stdout.splitlines()]


def page(found: list[Any]) -> str:
    injected = [each for each in found if each["phase"] != "real"]
    verdicts = ("done again", "refused", "wrong")
    phases = list(dict.fromkeys(each["phase"] for each in found))
    counts = {phase: Counter(each["verdict"] for each in found if each["phase"] == phase) for phase in phases}
    rows = [
        (phase, sum(counts[phase].values()), *(counts[phase][verdict] for verdict in verdicts))
        for phase in phases
    ]
    cases = list(dict.fromkeys((each["phase"], each["case"]) for each in found))
    each_case = [
        (phase, case, len(of), *(sum(each["verdict"] == verdict for each in of) for verdict in verdicts))
        for phase, case in cases
        for of in [[each for each in found if (each["phase"], each["case"]) == (phase, case)]]
    ]
    wrong = [
        (each["phase"], each["case"], each["site"], each["why"])
        for each in found
        if each["verdict"] == "wrong"
    ]
    total = Counter(each["verdict"] for each in injected)
    said = (
        f"{len(injected)} injected sites: {total['done again']} done again, {total['refused']} refused with an error message, **{total['wrong']} wrong**. "
        f"Goal: at least {GOAL} sites, none wrong: {'reached' if len(injected) >= GOAL and not total['wrong'] else '**missed**'}."
    )
    text = f"# Out of memory in a Loop\n\n{(__doc__ or '').strip()}\n\n{said}\n\n{markdown_table(('where', 'sites', *verdicts), rows)}\n"
    text += f"\n## Cases\n\n{markdown_table(('where', 'case', 'sites', *verdicts), each_case)}\n"
    return text + (
        f"\n## Wrong\n\n{markdown_table(('where', 'case', 'site', 'why'), wrong)}\n" if wrong else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=3, help="inject at every n-th operator")
    parser.add_argument(
        "--only",
        default="",
        help="some of gradients, optimizer, evaluation, real, separated by commas",
    )
    parser.add_argument(
        "--at-once", type=int, default=3, help="programs that run at once; the benchmark measures no times"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    asked = args.only.split(",") if args.only else ["gradients", "optimizer", "evaluation", "real"]
    made = stamp()
    todo = [
        (phase, str(more)) for phase in asked for more in (LIMITS_MIB if phase == "real" else [args.every])
    ]
    with ThreadPoolExecutor(args.at_once) as pool:
        found = [each for records in pool.map(lambda words: run(list(words)), todo) for each in records]
    text = page(found)
    print(text.split("## Cases")[0])
    for each in found:
        if each["verdict"] == "wrong":
            print(each)
    print(*(path.name for path in write_result("loop_faults", made, text, {"sites": found}, folder=args.out)))


if __name__ == "__main__":
    main()
