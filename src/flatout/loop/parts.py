"""Which parts of a save a rank goes on from; and where in the data, when there were more ranks or fewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.plan.errors import SaveError
from flatout.state.randoms import random_states
from flatout.state.saves import Save
from flatout.state.together import part_of

ANEW = "fresh=True begins anew."


def parts_of(torch: Any, save: Save, rank: int, ranks: int, shape: Mapping[str, Any]) -> tuple[dict, dict, dict, list[str]]:
    """The state of the training, what this rank has of its own, the place in the data, and why all that is not exact. Raises SaveError."""
    before, name = save.manifest.told.get("ranks", 1), part_of(rank)
    state = save.read(torch)
    mine = save.read(torch, name) if name and f"{name}.json" in save.manifest.files else None
    own = state if not rank else mine if mine is not None else {"random": random_states(torch), "all buffers": {}}
    if before == ranks:
        return state, own, own["place"], []
    place, words = place_for(state["place"], before, ranks, shape)
    place["now"] = {**place["now"], "random": (own["place"]["now"] if "place" in own else {"random": random_states(torch)})["random"]}
    return state, own, place, words


def place_for(place: Mapping[str, Any], before: int, ranks: int, shape: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The place of every one of ``ranks`` after the samples that ``before`` of them have seen."""
    then, now = place["shape"].get("batch"), shape.get("batch")
    if not place["begun"]:
        return dict(place), [f"there were {before} ranks, whose gradients were added up in another order"]
    if not then or not now:
        raise SaveError(f"{before} ranks were in the middle of their data when they were saved, and how many samples they had seen is not known of a loader "
                        f"without a batch size. Start as many ranks again, or: {ANEW}")
    seen = place["given"] * then * before
    given, rest = divmod(seen, now * ranks)
    words = [f"there were {before} ranks: samples come in the same order, and their gradients are added up in another"]
    if rest:
        words.append(f"{rest} samples of this epoch are seen again, because {seen} are no whole number of steps of {now * ranks}")
    if "DistributedSampler" not in {*place["shape"]["order"], *shape["order"]} and ranks > 1:
        words[0] = f"there were {before} ranks, and the samples are not shared out by a DistributedSampler: they come in another order"
    return {**place, "given": given, "workers": [None] * int(shape["workers"]), "made": None}, words
