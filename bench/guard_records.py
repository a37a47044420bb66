"""Records for the guard's test bed: plain runs, edited. The guard must judge none of them "bit for bit".

The records of three seeds are judged against their edited copies, under a claim of EXACT. A second plain run of
the first seed shows that the program repeats its own bits. ``unedited`` must be judged "bit for bit".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from provenance import markdown_table

from flatout.guard.verdict import MIN_EXACT_LOSSES, judge
from flatout.schema.enums import Effect
from flatout.schema.plan import Plan
from flatout.schema.records import TrialRecord

PROGRAMS_OF_RECORDS = ("mlp", "cnn")
SEEDS = (0, 1, 2)
Edit = Callable[[TrialRecord], TrialRecord]


def without_digests(record: TrialRecord) -> TrialRecord:
    return replace(record, weights_digests={})


def digests_of_other_steps(record: TrialRecord) -> TrialRecord:
    """Names each digest after a step where the plain run has none."""
    digests = {str(3 * int(step)): digest for step, digest in record.weights_digests.items()}
    return replace(record, weights_digests=digests)


def digest_of_the_step_before(record: TrialRecord) -> TrialRecord:
    """Gives the last step the digest of the one before it."""
    *_, before, last = record.weights_digests
    return replace(record, weights_digests={**record.weights_digests, last: record.weights_digests[before]})


def one_bit_in_the_last_digest(record: TrialRecord) -> TrialRecord:
    last = list(record.weights_digests)[-1]
    digest = record.weights_digests[last]
    flipped = f"{int(digest, 16) ^ 1:0{len(digest)}x}"
    return replace(record, weights_digests={**record.weights_digests, last: flipped})


def too_few_losses(record: TrialRecord) -> TrialRecord:
    """Keeps so few losses of each seed that all seeds together miss the minimum by at least one."""
    count = (MIN_EXACT_LOSSES - 1) // len(SEEDS)
    return replace(record, losses=record.losses[:count], loss_steps=record.loss_steps[:count])


def one_loss_in_its_last_bit(record: TrialRecord) -> TrialRecord:
    """Changes the last loss by one unit in float64's last place."""
    last = float.fromhex(record.losses[-1])
    return replace(record, losses=[*record.losses[:-1], math.nextafter(last, math.inf).hex()])


# Whether each edit touches the records of all seeds, or only that of the last
EDITS: dict[str, tuple[Edit, bool]] = {
    "unedited": (replace, True),
    "without_digests": (without_digests, True),
    "digests_of_other_steps": (digests_of_other_steps, True),
    "digest_of_the_step_before": (digest_of_the_step_before, False),
    "one_bit_in_the_last_digest": (one_bit_in_the_last_digest, False),
    "too_few_losses": (too_few_losses, True),
    "one_loss_in_its_last_bit": (one_loss_in_its_last_bit, False),
}


def record_rows(beds: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for bed in (bed for bed in beds if bed.name in PROGRAMS_OF_RECORDS):
        plain = [bed.record(f"plain-{seed}", Plan(), seed, fetch_samples=True) for seed in SEEDS]
        repeats = [
            bed.record("plain-again" if seed == SEEDS[0] else f"plain-again-{seed}", Plan(), seed)
            for seed in (SEEDS[0], SEEDS[-1])
        ]
        for name, (edit, every_seed) in EDITS.items():
            edited = [edit(p) if every_seed or p is plain[-1] else p for p in plain]
            found = judge(Effect.EXACT, plain, edited, None, repeats)
            kept = found.verdict not in ("failed", "not checked")
            undone = next((c for c in found.checks if not c.passed), None)
            rows.append(
                {
                    "program": bed.name,
                    "edit": name,
                    "broken": name != "unedited",
                    "outcome": "accepted"
                    if kept
                    else "rejected"
                    if found.verdict == "failed"
                    else "left out",
                    "verdict": found.verdict,
                    "why": found.why,
                    "check": undone.name if undone else "bitwise",
                }
            )
    return rows


def records_section(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    wrong = sum(row["broken"] == (row["outcome"] == "accepted") for row in rows)
    table = [
        (row["edit"], row["program"], row["outcome"], row["verdict"], row["check"], row["why"])
        for row in rows
    ]
    return [
        "\n## Edited records (to be rejected or left out)\n\n"
        f"Plain runs against edited copies of their records, under a claim of equal bits: {wrong} of {len(rows)} judged wrongly. "
        "Only *unedited* is to be accepted.\n\n"
        + markdown_table(("edit", "program", "outcome", "verdict", "check", "why"), table)
    ]
