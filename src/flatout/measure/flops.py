"""FLOPs of single operators, from the shapes that a profiler recorded. A multiply-add counts as two.

The formulas are those of ``torch.utils.flop_counter``. That module requires tensors or the output shape, but
a recording has only the inputs.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any

Shape = Sequence[int]

FORWARD_CONVOLUTIONS = re.compile(
    "aten::((mkldnn|cudnn|miopen)_convolution|_slow_conv2d_forward|slow_conv3d_forward|thnn_conv2d|_conv_depthwise2d|conv_depthwise3d)"
)


def flops_of(name: str, shapes: Sequence[Shape], arguments: Sequence[Any] = ()) -> float | None:
    """The FLOPs of one call.

    None for an incomplete recording, and for an operator other than a matrix product, convolution or
    attention. ``arguments`` are the non-tensor arguments at their positions: numbers and lists, or nothing.
    """
    try:
        if name in ("aten::mm", "aten::_scaled_mm", "aten::_int_mm"):
            return _product(shapes[0], shapes[1])
        if name == "aten::addmm":
            return _product(shapes[1], shapes[2])
        if name == "aten::bmm":
            return shapes[0][0] * _product(shapes[0][1:], shapes[1][1:])
        if name == "aten::baddbmm":
            return shapes[1][0] * _product(shapes[1][1:], shapes[2][1:])
        if FORWARD_CONVOLUTIONS.fullmatch(name):
            return _convolution(name, shapes, arguments)
        if name == "aten::convolution_backward":
            # Each gradient costs as much as the forward pass: one product per output value and contributing
            # weight.
            output_mask = _list(arguments[10]) if len(arguments) > 10 else [1, 1, 1]
            per_gradient = 2.0 * prod(shapes[0]) * prod(shapes[2][1:])
            return per_gradient * (int(bool(output_mask[0])) + int(bool(output_mask[1])))
        if "scaled_dot_product" in name and "attention" in name:
            return _attention(name, shapes)
    except (IndexError, ValueError, TypeError):
        return None
    return None


def _product(a: Shape, b: Shape) -> float:
    (rows, inner), (also_inner, columns) = a, b
    if inner != also_inner:
        raise ValueError("no matrix product")
    return 2.0 * rows * inner * columns


def _convolution(name: str, shapes: Sequence[Shape], arguments: Sequence[Any]) -> float:
    x, weight = shapes[0], shapes[1]
    if not x or not weight:
        raise ValueError("not recorded")
    indices = {
        "aten::mkldnn_convolution": (3, 4, 5),
        "aten::cudnn_convolution": (2, 3, 4),
        "aten::miopen_convolution": (3, 4, 5),
    }
    if name not in indices:  # (input, weight, kernel size, bias, stride, padding): never dilated
        stride, padding, dilation = _list(arguments[4]), _list(arguments[5]), [1]
    else:
        padding, stride, dilation = (_list(arguments[index]) for index in indices[name])
    out = 1
    for dimension, (size, kernel) in enumerate(zip(x[2:], weight[2:], strict=True)):
        kernel_extent = _item_or_last(dilation, dimension) * (kernel - 1) + 1
        out *= (size + 2 * _item_or_last(padding, dimension) - kernel_extent) // _item_or_last(
            stride, dimension
        ) + 1
    return 2.0 * x[0] * out * weight[0] * prod(weight[1:])


def _attention(name: str, shapes: Sequence[Shape]) -> float:
    """Shapes are (batch, heads, length, width).

    Backward computes the scores again and four more products, as in flop_counter.
    """
    backward = "backward" in name
    q, k, v = shapes[1:4] if backward else shapes[:3]
    *_, q_length, width = q
    scores = 2.0 * prod(q) * k[-2]
    values = 2.0 * prod(q[:-1]) * v[-2] * v[-1]
    if width <= 0 or q_length <= 0:
        raise ValueError("not recorded")
    return 3 * scores + 2 * values if backward else scores + values


def _list(value: Any) -> list[int]:
    """A list of integers. Recordings hold a list as a list or as text."""
    if isinstance(value, str):
        words = value.strip("[]").replace(",", " ").split()
        return [{"True": 1, "False": 0}[word] if word in ("True", "False") else int(word) for word in words]
    if isinstance(value, (int, float)):
        return [int(value)]
    numbers = [int(item) for item in value]
    if not numbers:
        raise ValueError("not recorded")
    return numbers


def _item_or_last(values: list[int], index: int) -> int:
    return values[index] if index < len(values) else values[-1]
