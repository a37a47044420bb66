"""The parts of a checkpoint that a rank needs, and its place in the data if the number of ranks changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from flatout.checkpoint.checkpoint import Checkpoint
from flatout.checkpoint.joint_checkpoint import part_of
from flatout.checkpoint.random_states import random_states
from flatout.schema.errors import SaveError

FROM_SCRATCH = "use from_scratch=True to start from scratch."


@dataclass
class Parts:
    """``state``: of the whole training. ``own``: of this rank. ``place``: where to resume in the data.

    ``words``: the reasons why the result is not exact.
    """

    state: dict[str, Any]
    own: dict[str, Any]
    place: dict[str, Any]
    words: list[str]


def parts_of(torch: ModuleType, save: Checkpoint, rank: int, ranks: int, shape: Mapping[str, Any]) -> Parts:
    """Read what this rank of ``ranks`` needs. Raises SaveError."""
    before, name = save.manifest.metadata["ranks"], part_of(rank)
    state = save.read(torch)
    if rank and f"{name}.json" in save.manifest.files:
        own = save.read(torch, name)
    else:
        own = {"random": random_states(torch)} if rank else state
    if before == ranks:
        return Parts(state, own, own["place"], [])
    place, words = place_for(state["place"], before, ranks, shape)
    place["now"] = {**place["now"], "random": (own["place"]["now"] if "place" in own else own)["random"]}
    return Parts(state, own, place, words)


def slices_of_others(torch: ModuleType, save: Checkpoint, rank: int) -> Iterator[Mapping[Any, Any]]:
    """The slices of the other saved ranks, one rank at a time."""
    for other in range(1, save.manifest.metadata["ranks"]):
        if other != rank:
            yield save.read(torch, part_of(other))["slices"]


def place_for(
    place: Mapping[str, Any], before: int, ranks: int, shape: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The place in the data for ``ranks`` ranks, after the samples that ``before`` ranks have processed."""
    then, now = place["shape"].get("batch"), shape.get("batch")
    if not place["begun"]:
        return dict(place), [f"{_there_were(before)}, which added their gradients in another order"]
    if not then or not now:
        raise SaveError(
            f"{before} ranks were saved within an epoch, and the number of samples they had processed is unknown: the loader has no "
            f"batch size. Start as many ranks again, or {FROM_SCRATCH}"
        )
    seen = place["given"] * then * before
    given, rest = divmod(seen, now * ranks)
    words = [
        f"{_there_were(before)}: samples come in the same order, and their gradients are added in another"
    ]
    if rest:
        words.append(
            f"{rest} samples of this epoch are repeated, because {seen} is not a multiple of the {now * ranks} samples of a step"
        )
    if "DistributedSampler" not in {*place["shape"]["order"], *shape["order"]} and ranks > 1:
        words[0] = (
            f"{_there_were(before)}, and no DistributedSampler distributes the samples: they come in another order"
        )
    return {**place, "given": given, "workers": [None] * int(shape["workers"]), "made": None}, words


def _there_were(ranks: int) -> str:
    return f"there were {ranks} ranks" if ranks > 1 else "there was one rank"
