"""Replace hand-written attention by its fused form in a graph that is about to be compiled.

The compiler has its own patterns for this, one per form, and most hand-written forms match none. This module
recognises the same forms as ``attention_deferred``. It leaves weights that other nodes use alone, and
attention with in-place changes around it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from flatout.kernels.attention_forms import (
    IN_PLACE_NAME,
    OUT_OF_PLACE,
    PRODUCTS,
    AttentionForm,
    AttentionMatch,
    Call,
    extend_form,
    match_attention,
    scores_form,
    unpack_operands,
)
from flatout.kernels.attention_runtime import MASK_OPERATORS, attend, mask_properties

MAX_MASK_ELEMENTS = 1 << 26  # largest mask that is computed to test whether it is causal


class _NodeArguments:
    """Interprets arguments of a node: other nodes, which know the shape and dtype of their result."""

    def tensor(self, arg: object) -> Any:
        node = arg.node if isinstance(arg, Proxy) else arg
        example = node.meta.get("example_value") if isinstance(node, Node) else None
        return example if isinstance(example, torch.Tensor) else None

    def number(self, arg: object) -> float | None:
        if (
            isinstance(arg, Node)
            and _name(arg) in ("full", "tensor")
            and arg.op == "call_function"
            and self.tensor(arg) is not None
        ):
            value = arg.args[-1] if arg.args else arg.kwargs.get("fill_value")
            arg = value if self.tensor(arg).dim() == 0 else None
        return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None

    def same(self, left: object, right: object) -> bool:
        if isinstance(left, int) and isinstance(right, int):
            return left == right
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # a slow import

        return statically_known_true(left == right)


READER = _NodeArguments()


def rewrite(graph: Graph) -> int:
    """Change the graph and return the number of fused attentions."""
    forms: dict[Node, AttentionForm] = {}
    matches: list[tuple[Node, AttentionMatch]] = []
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        name, example = _name(node), READER.tensor(node)
        if name is None or example is None:
            continue
        args, kwargs = unpack_operands(name, node.args), dict(node.kwargs)
        score_indices = [index for index, arg in enumerate(args) if isinstance(arg, Node) and arg in forms]
        if score_indices == [0] and name in OUT_OF_PLACE:  # later uses refer to this operator's result
            args[0].replace_all_uses_with(
                node, delete_user_cb=lambda user, position=order[node]: order[user] > position
            )
        if not score_indices and name in PRODUCTS:
            form = scores_form(READER, name, args, kwargs)
            if form is not None and example.dtype.is_floating_point:
                forms[node] = replace(form, dtype=example.dtype)
        elif len(score_indices) == 1 and len(args[score_indices[0]].users) == 1:
            form = forms[args[score_indices[0]]]
            call = Call(READER, name, args, kwargs, score_indices[0], example)
            if name in PRODUCTS:
                match = match_attention(form, call)
                if match is not None and _has_static_layout(match):
                    matches.append((node, match))
            elif (extended := extend_form(form, call)) is not None:
                forms[node] = extended
    return sum(_fuse(graph, node, match, forms) for node, match in matches)


def _name(node: Node) -> str | None:
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", None) if node.op == "call_function" else None
    module = str(getattr(node.target, "__module__", None) or "torch")
    return (
        name if name is not None and (module.startswith("torch") or module in ("_operator", "math")) else None
    )


def _has_static_layout(match: AttentionMatch) -> bool:
    """Whether all sizes are numbers, or every tensor already has its four axes.

    A node cannot hold a symbolic size.
    """
    form = match.form
    shapes = [READER.tensor(tensor).shape for tensor in (form.q, form.k, match.v)]
    if all(isinstance(size, int) for shape in (*shapes, form.batch) for size in shape):
        return True
    orders = [
        axes or range(len(shape))
        for shape, axes in zip(shapes, (form.q_axes, form.k_axes, match.v_axes), strict=True)
    ]
    batches = [
        *([shape[axis] for axis in order[:-2]] for shape, order in zip(shapes, orders, strict=True)),
        form.mask_batch or form.batch,
        form.batch,
    ]
    return all(len(batch) == 2 and all(map(READER.same, batch, form.batch)) for batch in batches)


def _fuse(graph: Graph, last: Node, match: AttentionMatch, forms: dict[Node, AttentionForm]) -> bool:
    chain = [last]
    while (source := next((node for node in chain[-1].all_input_nodes if node in forms), None)) is not None:
        chain.append(source)
    if any(_may_write(node) for node in _between(chain[-1], last) if node not in chain):
        return False
    tracer = GraphAppendingTracer(graph)
    form = match.form
    causal, no_empty_rows = _mask_properties(form)
    with graph.inserting_before(last):
        masks = tuple(replace(mask, tensor=Proxy(mask.tensor, tracer)) for mask in form.masks)
        with_proxies = replace(form, q=Proxy(form.q, tracer), k=Proxy(form.k, tracer), masks=masks)
        out = attend(
            READER, replace(match, form=with_proxies, v=Proxy(match.v, tracer)), causal, no_empty_rows
        ).node
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


NOT_IN_PLACE = frozenset(("and_", "or_", "not_", "is_"))  # of the module operator


def _may_write(node: Node) -> bool:
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    in_place = IN_PLACE_NAME.fullmatch(name) is not None and name not in NOT_IN_PLACE
    return in_place or any(node.kwargs.get(key) for key in ("out", "inplace"))


def _mask_properties(form: AttentionForm) -> tuple[bool, bool]:
    if len(form.masks) != 1:
        return False, False
    mask = _constant_value(form.masks[0].tensor)
    return (
        (False, False)
        if mask is None
        else mask_properties(replace(form, masks=(replace(form.masks[0], tensor=mask),)))
    )


def _constant_value(node: object) -> Any:
    """The value, on the CPU, of a node that depends on no input of the graph; None for other nodes."""
    if not isinstance(node, Node):
        return node
    example = READER.tensor(node)
    if (
        not MASK_OPERATORS.fullmatch(_name(node) or "")
        or example is None
        or any(not isinstance(size, int) for size in example.shape)
        or example.numel() > MAX_MASK_ELEMENTS
    ):
        return None
    if any(_constant_value(part) is None for part in node.all_input_nodes) or any(
        _may_write(user) for part in (node, *node.all_input_nodes) for user in part.users
    ):
        return None
    args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), _constant_value)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    args = tuple(value for value in args if not isinstance(value, torch.device))
    with torch.no_grad(), torch.device("cpu"):
        return (
            getattr(torch.Tensor, node.target)(*args, **kwargs)
            if isinstance(node.target, str)
            else node.target(*args, **kwargs)
        )
