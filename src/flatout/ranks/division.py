"""How a program divides over ranks: the value of the lever `data_parallel`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MEAN, SUM = "mean", "sum"
INDEX, CUT, DOOR, WHOLE, SAME = "index", "cut", "door", "whole", "same"
OWN, ALL = "own", "all"
DIVIDED = "divided"
WORDS = {"reduction": (MEAN, SUM), "batches": (INDEX, CUT, DOOR, WHOLE, SAME), "batchnorm": (OWN, ALL), "draws": (OWN, ALL), "evaluation": (WHOLE, DIVIDED)}


@dataclass(frozen=True)
class Division:
    """``loaders`` are the places of those that train, in the order in which the script makes them; a text in a plan, as in "0,2".

    ``reduction``: the loss is a mean or a sum over samples. ``batches``: divided by index before they are fetched, cut after that, or cut at the door of the
    model; ``whole``: cut at the door, and what the model gives put together behind it, so that the script sees whole batches and its loss may be anything;
    ``same``: not divided, every rank computes all of each batch, as one process does.
    ``batchnorm``: statistics of each rank's own share or of all. ``draws``: random numbers of each rank's own, or those of one process.
    ``evaluation``: whole on every rank, or divided, and what the model gives put together.
    """

    reduction: str = MEAN
    batches: str = INDEX
    loaders: tuple[int, ...] = (0,)
    batchnorm: str = OWN
    draws: str = OWN
    evaluation: str = WHOLE

    @classmethod
    def read(cls, value: Any) -> Division:
        """Raises TypeError, with a sentence, for what is no such value."""
        if not isinstance(value, Mapping) or not set(value) <= {*WORDS, "loaders"}:
            raise TypeError(f"the value of data_parallel is a table with some of {', '.join([*WORDS, 'loaders'])}, not {value!r}")
        for name, allowed in WORDS.items():
            if value.get(name, allowed[0]) not in allowed:
                raise TypeError(f"{name} is one of {', '.join(allowed)}, not {value[name]!r}")
        loaders = str(value.get("loaders", "0")).split(",")
        if not all(each.strip().isdigit() for each in loaders if each):
            raise TypeError(f'loaders are numbers with commas, as in "0,2", not {value["loaders"]!r}')
        return cls(**{name: value[name] for name in WORDS if name in value}, loaders=tuple(int(each) for each in loaders if each))

    def to_value(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in WORDS}, "loaders": ",".join(map(str, self.loaders))}
