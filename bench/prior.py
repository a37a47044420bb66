"""Builds the table of effect sizes, ``src/flatout/tune/prior.json``, from the committed records.

Run it with ``python bench/prior.py``.

Sources of the figures
* open_set and trainers: all measured blocks of a session, in the tuner's own regression with a nearly flat prior, so that
  no prior feeds the next one. Also every comparison in which one lever differs: by itself against the plain
  program, or removed from a plan. Sessions disturbed by other programs are left out.
* regret: the exhaustive search. For each lever and value, all pairs of combinations that differ only in this
  choice.
* data: the training with batched_transforms, with cached_prefix, and with four workers, against the plain
  program.
* memory: the training with recomputed activations, against the plain program.
* PUBLISHED of prior_records.py: figures for what no record of this repository covers, from the "Evidence"
  lines of the levers. They are marked in the table.
Not used: guard has no times. The programs of what_ifs have one fault each on purpose, so fixing it says
nothing about other programs.

How an entry is computed. All comparisons of one lever and value in one program become one record: the mean of
the log ratios, weighted by their inverse variances (from the 95 % interval; at least 3 %). The entry for all
values of a lever also counts each program once. Over programs, effects are normal with unknown mean and
variance. The prior of both is conjugate: mean 0, worth half a record, and the neutral standard deviation of
an unmeasured lever. A record counts by its share of between-program variance, so imprecise records count
little. A kind of program starts from the estimate over all programs, which is worth one record. The entry is
the mean and standard deviation of the predictive distribution for a new program. A kind to which all records
of a lever belong has no entry. No randomness is involved.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prior_records import Record, all_records, one_per_program
from provenance import RESULTS

from flatout.job.folder import write_atomically
from flatout.tune.prior import ANY, ANY_VALUE, NEUTRAL, TABLE_FILE

# Records that the prior of the mean is worth: of a lever, and of a lever in a kind of program.
MEAN_WORTH, KIND_WORTH = 0.5, 1.0
SHAPE = 2.0  # of the prior of the variance
BETWEEN_PROGRAMS = 0.15  # standard deviation of an effect from program to program, to weigh imprecise records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=TABLE_FILE,
        help="write the table to this file instead of the packaged one",
    )
    out = parser.parse_args().out
    table = table_of(all_records(RESULTS))
    write_atomically(out, rendered(table))
    print(
        f"{out.name}: {len(table['entries'])} entries for {len({each['lever'] for each in table['entries']})} levers"
    )


@dataclass(frozen=True)
class Estimate:
    """Normal-inverse-gamma: mean, the records it is worth, shape and scale of the variance."""

    mean: float
    worth: float
    shape: float
    scale: float

    @property
    def variance(self) -> float:
        """The expected variance between programs."""
        return self.scale / (self.shape - 1)

    @property
    def sd(self) -> float:
        """The predictive variance of the effect in a new program."""
        return math.sqrt(self.variance * (self.worth + 1) / self.worth)

    def after(self, records: Sequence[Record]) -> Estimate:
        weights = [
            record.count * BETWEEN_PROGRAMS**2 / (BETWEEN_PROGRAMS**2 + record.variance) for record in records
        ]
        n = sum(weights)
        mean = sum(w * record.effect for w, record in zip(weights, records, strict=True)) / n
        squares = sum(
            w * ((record.effect - mean) ** 2 + record.spread**2)
            for w, record in zip(weights, records, strict=True)
        )
        worth = self.worth + n
        return Estimate(
            (self.worth * self.mean + n * mean) / worth,
            worth,
            self.shape + n / 2,
            self.scale + squares / 2 + self.worth * n * (mean - self.mean) ** 2 / (2 * worth),
        )


def unmeasured() -> Estimate:
    """Returns the prior whose predictive standard deviation is the neutral one."""
    between = NEUTRAL.sd**2 * MEAN_WORTH / (MEAN_WORTH + 1)
    return Estimate(NEUTRAL.mean, MEAN_WORTH, SHAPE, between * (SHAPE - 1))


def table_of(records: Iterable[Record]) -> dict[str, Any]:
    """Returns the entries by lever, value, device and kind of program, in a fixed order."""
    records = list(records)
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in [*records, *one_per_program(replace(record, value=ANY_VALUE) for record in records)]:
        groups[record.lever, record.value, record.device].append(record)
    entries = []
    for (lever, value, device), group in sorted(groups.items()):
        every = unmeasured().after(group)
        entries.append(entry(lever, value, device, ANY, every, group))
        start = Estimate(every.mean, KIND_WORTH, SHAPE, every.variance * (SHAPE - 1))
        for kind in sorted({kind for record in group for kind in record.kinds}):
            of_kind = [record for record in group if kind in record.kinds]
            if len(of_kind) < len(group):
                entries.append(entry(lever, value, device, kind, start.after(of_kind), of_kind))
    return {"schema": 1, "made_by": "python bench/prior.py", "entries": entries}


def entry(
    lever: str, value: str, device: str, kind: str, estimate: Estimate, records: Sequence[Record]
) -> dict[str, Any]:
    return {
        "lever": lever,
        "value": value,
        "device": device,
        "kind": kind,
        "mean": round(estimate.mean, 3),
        "sd": round(estimate.sd, 3),
        "n": sum(record.count for record in records),
        "published": sum(record.count for record in records if record.published),
    }


def rendered(table: Mapping[str, Any]) -> str:
    """Returns JSON with a line for each entry."""
    lines = ",\n".join(f"  {json.dumps(each)}" for each in table["entries"])
    head = ", ".join(
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key != "entries"
    )
    return f'{{{head}, "entries": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    main()
