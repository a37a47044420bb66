"""Replace hand-written attention by its fused form in a graph that is about to be compiled.

The compiler has its own patterns for this, one per form, and most hand-written forms match none. This module
recognises the same forms as ``attention_deferred``. It leaves weights that other nodes use alone, and
attention with in-place changes around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from flatout.kernels.attend import attend, causal_and_whole
from flatout.kernels.attention_forms import (
    OUT_OF_PLACE,
    PRODUCTS,
    AttentionForm,
    AttentionMatch,
    Call,
    extended,
    finished,
    product,
    with_operands,
)
from flatout.kernels.attention_masks import MAKES_MASKS

MOST_ELEMENTS = 1 << 26  # largest mask that is computed to test whether it is causal


class _NodeArguments:
    """Interprets arguments of a node: other nodes, which know the shape and dtype of their result."""

    def tensor(self, thing: object) -> Any:
        node = thing.node if isinstance(thing, Proxy) else thing
        made = node.meta.get("example_value") if isinstance(node, Node) else None
        return made if isinstance(made, torch.Tensor) else None

    def number(self, thing: object) -> float | None:
        if (
            isinstance(thing, Node)
            and _name(thing) in ("full", "tensor")
            and thing.op == "call_function"
            and self.tensor(thing) is not None
        ):
            value = thing.args[-1] if thing.args else thing.kwargs.get("fill_value")
            thing = value if self.tensor(thing).dim() == 0 else None
        return float(thing) if isinstance(thing, (int, float)) and not isinstance(thing, bool) else None

    def same(self, one: object, other: object) -> bool:
        if isinstance(one, int) and isinstance(other, int):
            return one == other
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # a slow import

        return statically_known_true(one == other)


SEE = _NodeArguments()


def rewrite(graph: Graph) -> int:
    """Change the graph and return the number of fused attentions."""
    forms: dict[Node, AttentionForm] = {}
    matches: list[tuple[Node, AttentionMatch]] = []
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        name, made = _name(node), SEE.tensor(node)
        if name is None or made is None:
            continue
        args, kwargs = with_operands(name, node.args), dict(node.kwargs)
        known = [at for at, argument in enumerate(args) if isinstance(argument, Node) and argument in forms]
        if known == [0] and name in OUT_OF_PLACE:  # later uses refer to this operator's result
            args[0].replace_all_uses_with(
                node, delete_user_cb=lambda user, here=order[node]: order[user] > here
            )
        if not known and name in PRODUCTS:
            form = product(SEE, name, args, kwargs)
            if form is not None and made.dtype.is_floating_point:
                forms[node] = replace(form, dtype=made.dtype)
        elif len(known) == 1 and len(args[known[0]].users) == 1:
            form, call = forms[args[known[0]]], Call(SEE, name, args, kwargs, known[0], made)
            if name in PRODUCTS:
                match = finished(form, call)
                if match is not None and _can_be_placed(match):
                    matches.append((node, match))
            elif (longer := extended(form, call)) is not None:
                forms[node] = longer
    return sum(_replace(graph, node, match, forms) for node, match in matches)


def _name(node: Node) -> str | None:
    """Torch's name for the operator of this node."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", None) if node.op == "call_function" else None
    module = str(getattr(node.target, "__module__", None) or "torch")
    return (
        name if name is not None and (module.startswith("torch") or module in ("_operator", "math")) else None
    )


def _can_be_placed(match: AttentionMatch) -> bool:
    """Whether all sizes are numbers, or every tensor already has its four axes.

    A node cannot hold a symbolic size.
    """
    form = match.form
    shapes = [SEE.tensor(each).shape for each in (form.q, form.k, match.v)]
    if all(isinstance(size, int) for shape in (*shapes, form.batch) for size in shape):
        return True
    orders = [
        axes or range(len(shape))
        for shape, axes in zip(shapes, (form.q_axes, form.k_axes, match.v_axes), strict=True)
    ]
    batches = [
        *([shape[axis] for axis in order[:-2]] for shape, order in zip(shapes, orders, strict=True)),
        form.masked or form.batch,
        form.batch,
    ]
    return all(len(batch) == 2 and all(map(SEE.same, batch, form.batch)) for batch in batches)


def _replace(graph: Graph, last: Node, match: AttentionMatch, forms: dict[Node, AttentionForm]) -> bool:
    chain = [last]
    while (before := next((each for each in chain[-1].all_input_nodes if each in forms), None)) is not None:
        chain.append(before)
    if any(_changes(node) for node in _between(chain[-1], last) if node not in chain):
        return False
    tracer = GraphAppendingTracer(graph)
    form = match.form
    causal, checked = _causal(form)
    with graph.inserting_before(last):
        masks = tuple(replace(mask, tensor=Proxy(mask.tensor, tracer)) for mask in form.masks)
        placed = replace(form, q=Proxy(form.q, tracer), k=Proxy(form.k, tracer), masks=masks)
        out = attend(SEE, replace(match, form=placed, v=Proxy(match.v, tracer)), causal, checked).node
    out.meta = dict(last.meta)
    last.replace_all_uses_with(out)
    for node in chain:
        graph.erase_node(node)
    return True


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first
    while node is not last:
        yield node
        node = node.next


CHANGES_IT = re.compile(
    r"(?!__)\w+_|setitem|__setitem__|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)"
)
KEEPS_IT = frozenset(("and_", "or_", "not_", "is_"))  # of the module operator


def _changes(node: Node) -> bool:
    """Whether this may change a tensor in place."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    inside = CHANGES_IT.fullmatch(name) is not None and name not in KEEPS_IT
    return inside or any(node.kwargs.get(key) for key in ("out", "inplace"))


def _causal(form: AttentionForm) -> tuple[bool, bool]:
    """``causal_and_whole`` of a mask that the graph computes only from constants."""
    if len(form.masks) != 1:
        return False, False
    mask = _constant(form.masks[0].tensor)
    return (
        (False, False)
        if mask is None
        else causal_and_whole(replace(form, masks=(replace(form.masks[0], tensor=mask),)))
    )


def _constant(thing: object) -> Any:
    """The value, on the CPU, of a node that depends on no input of the graph; None for other nodes."""
    if not isinstance(thing, Node):
        return thing
    made = SEE.tensor(thing)
    if (
        not MAKES_MASKS.fullmatch(_name(thing) or "")
        or made is None
        or any(not isinstance(size, int) for size in made.shape)
        or made.numel() > MOST_ELEMENTS
    ):
        return None
    if any(_constant(each) is None for each in thing.all_input_nodes) or any(
        _changes(user) for each in (thing, *thing.all_input_nodes) for user in each.users
    ):
        return None
    args, kwargs = torch.fx.node.map_aggregate((thing.args, thing.kwargs), _constant)
    kwargs = {key: each for key, each in kwargs.items() if key not in ("device", "pin_memory")}
    args = tuple(each for each in args if not isinstance(each, torch.device))
    with torch.no_grad(), torch.device("cpu"):
        return (
            getattr(torch.Tensor, thing.target)(*args, **kwargs)
            if isinstance(thing.target, str)
            else thing.target(*args, **kwargs)
        )
