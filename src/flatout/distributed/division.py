"""How to split a program over ranks: the value of the lever `data_parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEAN, SUM = "mean", "sum"
INDEX, CUT, INPUT, WHOLE, SAME = "index", "cut", "input", "whole", "same"
OWN, ALL = "own", "all"
ACCEPTED = {
    "reduction": (MEAN, SUM),
    "batches": (INDEX, CUT, INPUT, WHOLE, SAME),
    "batchnorm": (OWN, ALL),
    "draws": (OWN, ALL),
}


@dataclass(frozen=True)
class SplitSettings:
    """How to split a program over ranks.

    ``loaders``: the indices of the training loaders, in the order in which the script makes them; text in a
    plan: "0,2".

    ``reduction``: the loss is a mean or a sum over samples.

    ``batches``: ``index`` splits by index before fetching, ``cut`` splits after fetching, ``input`` splits at
    the model's input. ``whole`` splits at the model's input and joins its outputs, so that the script sees
    whole batches and its loss may be anything. ``same`` does not split: every rank computes all of each
    batch, like one process.

    ``batchnorm``: statistics of each rank's share or of all. ``draws``: random numbers of each rank, or those
    of one process."""

    reduction: str = MEAN
    batches: str = INDEX
    loaders: tuple[int, ...] = (0,)
    batchnorm: str = OWN
    draws: str = OWN

    @classmethod
    def read(cls, value: Any) -> SplitSettings:
        """Read a value that the lever accepts."""
        loaders = str(value.get("loaders", "0")).split(",")
        return cls(
            **{name: value[name] for name in ACCEPTED if name in value},
            loaders=tuple(int(number) for number in loaders if number),
        )
