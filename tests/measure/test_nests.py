"""Every kind of container that holds tensors is walked and rebuilt, those that torch's pytree does not know too."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from flatout.measure.nests import mapped, tensors_in  # noqa: E402

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: object
    size: int = field(init=False, default=3)


class Rows(list):
    pass


class Features(dict):
    pass


CONTAINERS = {
    "tuple": lambda x: (x, [x]),
    "named tuple": lambda x: Pair(x, {"b": x}),
    "ordered": lambda x: OrderedDict(b=x, a=1),
    "list class": lambda x: Rows([x, (x,)]),
    "dictionary class": lambda x: Features(b=x, a={"c": x}),
    "mapping": lambda x: UserDict(b=[x]),
    "dataclass": lambda x: Sample(Sample((x, "text"))),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_tensor_is_found_and_replaced_in_new_containers(name):
    nest = CONTAINERS[name](torch.ones(2))
    again = mapped(nest, lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf)
    assert type(again) is type(nest)
    assert again is not nest
    assert str(again) == str(CONTAINERS[name](torch.full((2,), 2.0)))
    assert [float(tensor[0]) for tensor in tensors_in((nest, again))] == [1.0] * (
        count := len(list(tensors_in(nest)))
    ) + [2.0] * count
    assert count == str(nest).count("tensor(")


def test_a_container_may_count_as_a_leaf():
    assert mapped({"a": [1, 2]}, len, lambda part: isinstance(part, list)) == {"a": 2}
