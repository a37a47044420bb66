"""Failures of shapes: matrix products, views, broadcasting and concatenation."""

from __future__ import annotations

import re

from flatout.diagnose.kind import (
    RUNTIME,
    SHORT,
    Diagnosis,
    describe_tensors,
    kind,
    layer,
    match_message,
    on_own_line,
    shape,
    sizes,
)
from flatout.schema.failure import FailureRecord

SIZE = r"(?:torch\.Size\()?\[[-\d, x]*\]\)?"


@kind("FE020", "matrix-sizes")
def matrix_sizes(failure: FailureRecord) -> Diagnosis | None:
    """The sizes of a matrix product or linear layer do not match.

    What:
        The last size of the input must equal `in_features` of the layer (the columns of the first matrix must
        equal the rows of the second).
    Why it happens:
        The images have another size than the network was written for, so flattening gives more or fewer
        features. Or the batch was flattened into the features, or a transpose is missing.
    How to fix it:
        Give the layer the size of its input: `nn.Linear(in_features, out)`, or let `nn.LazyLinear(out)` infer
        it. Or resize the images to the size that the network was written for.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.LazyLinear.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "ValueError"),
        r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\d+)x(?P<b>\d+) and (?P<c>\d+)x(?P<d>\d+)\)",
        rf"mat1 and mat2 shapes cannot be multiplied{SHORT}",
        r"mat1 dim 1 must match mat2 dim 0",
        r"size mismatch, m1: \[(?P<a>\d+) x (?P<b>\d+)\], m2: \[(?P<c>\d+) x (?P<d>\d+)\]",
        r"size mismatch, got input \((?P<a>\d+)\), mat \((?P<e>\d+)x(?P<c>\d+)\), vec \((?P<b>\d+)\)",
        r"a and b must have same reduction dim, but got \[(?P<a>\S+), (?P<b>\S+)\] X \[(?P<c>\S+), (?P<d>\S+)\]",
        r"Expected size for first two dimensions of batch2 tensor to be: \[(?P<e>\d+), (?P<b>\d+)\] but got: \[(?P<f>\d+), (?P<c>\d+)\]",
        r"inconsistent tensor size, expected tensor \[(?P<b>\d+)\] and src \[(?P<c>\d+)\] to have the same number of elements",
    )
    if found is None:
        return None
    a, b, c, d = (found[part] for part in "abcd")
    weight = failure.module.parameters.get("weight", []) if failure.module else []
    if len(weight) == 2 and layer(failure):
        arrives, wants = b, str(weight[1])
        return Diagnosis(
            f"{layer(failure)} expects {wants} features and got {arrives}",
            f"{failure.module.path if failure.module else 'layer'} = "
            f"nn.Linear({arrives}, {weight[0]})   # or nn.LazyLinear({weight[0]})\n"
            f"x = x.flatten(1)   # if the batch was flattened into the features: the first size must stay the batch",
            sizes(failure),
        )
    if not b:
        return Diagnosis(
            "a matrix product got sizes that do not match", "print(a.shape, b.shape)", sizes(failure)
        )
    first, second = (f"{a}x{b}", f"{c}x{d}") if a and d else (f"size {b}", f"size {c}")
    hint = (
        "a @ b.T   # if the second matrix is stored transposed"
        if d == b
        else f"nn.Linear({b}, {d or '...'})   # if this is a linear layer"
    )
    return Diagnosis(
        f"a product of {first} and {second}{' in ' + layer(failure) if layer(failure) else ''}: {b} and {c} must be equal",
        hint,
        sizes(failure),
    )


@kind("FE024", "view-size")
def view_size(failure: FailureRecord) -> Diagnosis | None:
    """A view or reshape does not fit the tensor.

    What:
        A view must keep the number of elements, and `view` also needs a compatible memory layout.
    Why it happens:
        The size is written for other images or another batch (the last batch is smaller), or a transpose
        comes before the view.
    How to fix it:
        `x.flatten(1)` or `x.reshape(x.size(0), -1)`, which keep the batch and infer the rest. After a
        transpose use `reshape`, not `view`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.Tensor.view.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"shape '(?P<wants>\[[-\d, ]*\])' is invalid for input of size (?P<got>\d+)",
        r"(?P<layout>view size is not compatible with input tensor's size and stride)",
        r"(?P<layout>Cannot view a tensor with shape)",
        r"unflatten: Provided sizes (?P<wants>\[[-\d, ]*\]) don't multiply up to the size of dim \d+ \((?P<got>\d+)\)",
        r"cannot reshape tensor of (?P<got>0) elements into shape (?P<wants>\[[-\d, ]*\])",
    )
    if found is None:
        return None
    if found["layout"]:
        return Diagnosis(
            "`view` was called on a tensor with an incompatible memory layout (after a transpose, permute or slice)",
            "x.reshape(...)   # copies if necessary; or x.contiguous().view(...)",
            sizes(failure),
        )
    numbers = [int(size) for size in re.findall(r"-?\d+", found["wants"])]
    known = 1
    for size in numbers:
        known *= size if size > 0 else 1
    total = found.number("got")
    why = f": {total:,} is not a multiple of {known:,}" if -1 in numbers else f", which holds {known:,}"
    return Diagnosis(
        f"{total:,} elements cannot become {found['wants']}{why}",
        "x = x.flatten(1)   # keeps the batch and infers the rest\nx = x.view(x.size(0), -1)",
        sizes(failure),
    )


@kind("FE025", "broadcast")
def broadcast(failure: FailureRecord) -> Diagnosis | None:
    """Two tensors do not broadcast.

    What:
        Counted from the last dimension, the two sizes must be equal or one of them must be 1.
    Why it happens:
        A mask, a weight or a target belongs to another dimension, or the last batch of the epoch is smaller
        than a fixed-size buffer.
    How to fix it:
        Add a dimension of 1 in the right position: `mask[:, None]`. Slice a buffer to the batch: `buffer[:
        x.size(0)]`.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/broadcasting.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) at non-singleton dimension (?P<dim>\d+)",
        r"The expanded size of the tensor \((?P<a>\d+)\) must match the existing size \((?P<b>\d+)\) at non-singleton dimension (?P<dim>\d+)",
        r"output with shape (?P<out>\[[\d, ]*\]) doesn't match the broadcast shape (?P<wide>\[[\d, ]*\])",
        r"Attempting to broadcast a dimension of length (?P<b>\d+) at -?\d+!? ?.{0,60}",
        r"shape mismatch: (?:value tensor of shape (?P<out>\[[\d, ]*\]) cannot be broadcast to indexing result of shape|indexing tensors "
        r"could not be broadcast "
        r"together with shapes) (?P<wide>\[.*?\])",
    )
    if found is None:
        return None
    tensors = on_own_line(failure)
    names = " and ".join(f"`{tensor.name}` ({shape(str(tensor.shape))})" for tensor in tensors[:3])
    if found["out"] or found["wide"]:
        said = f"{found['out'] or 'an index'} and {found['wide']} do not broadcast"
    elif found["a"]:
        said = f"{names or 'two tensors'}: sizes {found['a']} and {found['b']} of dimension {found['dim']} do not broadcast"
    else:
        said = f"{names or 'two tensors'} do not broadcast"
    return Diagnosis(
        said,
        "small[:, None]            # add a dimension of 1 to the smaller tensor in the right position\n"
        "buffer[: batch.size(0)]   # if one has the full batch size and this is the last batch",
        describe_tensors(tensors) or sizes(failure),
    )


@kind("FE026", "concatenation")
def concatenation(failure: FailureRecord) -> Diagnosis | None:
    """Tensors of different sizes were concatenated or stacked.

    What:
        `cat` needs equal sizes in every dimension but one, `stack` in all of them.
    Why it happens:
        Sequences or images have several sizes, or the two branches of a skip connection halve an odd size
        differently.
    How to fix it:
        `torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)` for sequences, a crop or resize for images,
        `dim=` to choose the dimension of the concatenation.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pad_sequence.html
    """
    if failure.chain and any(
        frame.function in ("default_collate", "collate_tensor_fn", "collate")
        for thrown in failure.chain
        for frame in thrown.frames
    ):
        return None
    found = match_message(
        failure,
        RUNTIME,
        r"Sizes of tensors must match except in dimension (?P<dim>\d+)\. (?:Expected size (?P<a>\d+) but got size (?P<b>\d+) for tensor number (?P<at>\d+)"
        r"|Got (?P<a2>\d+) and (?P<b2>\d+))",
        r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]*\]) at entry 0 and (?P<other>\[[\d, ]*\]) at entry (?P<at>\d+)",
        r"Tensors must have same number of dimensions: got (?P<a>\d+) and (?P<b>\d+)(?P<dims>)",
        r"zero-dimensional tensor \(at position (?P<at>\d+)\) cannot be concatenated",
    )
    if found is None:
        return None
    if found["one"]:
        return Diagnosis(
            f"`stack` got tensors of {shape(found['one'])} and {shape(found['other'])} (entry {found['at']})",
            "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)   # for rows of several lengths",
            sizes(failure),
        )
    a, b = found["a"] or found["a2"], found["b"] or found["b2"]
    if not found["dim"]:
        return Diagnosis(
            "`cat` got tensors with different numbers of dimensions" + (f": {a} and {b}" if a else ""),
            "x.unsqueeze(0)   # add the missing dimension to the smaller tensor",
            sizes(failure),
        )
    return Diagnosis(
        f"`cat` along dimension {found['dim']} got sizes {a} and {b} in another dimension"
        + (f" (tensor {found['at']})" if found["at"] else ""),
        "torch.cat([...], dim=...)   # the dimension that may differ\nF.interpolate(x, size=other.shape[2:])   # for a skip connection of odd sizes",
        sizes(failure),
    )


@kind("FE029", "scalar-expected")
def scalar_expected(failure: FailureRecord) -> Diagnosis | None:
    """One value was needed and the tensor holds several.

    What:
        `.item()`, `float()` and `if` need one value, and the tensor holds several.
    Why it happens:
        A loss with `reduction="none"`, a comparison of two tensors in an `if`, or a metric for a whole batch.
    How to fix it:
        `.mean().item()` for a number, `.all()` or `.any()` for a condition, `.tolist()` for all values.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.Tensor.item.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "ValueError", "TypeError"),
        r"a Tensor with (?P<count>\d+) elements cannot be converted to Scalar",
        r"(?P<truth>Boolean value of Tensor with (?:more than one|no) values? is ambiguous)",
        r"only one element tensors can be converted to Python scalars",
        r"only (?:length-1 arrays|0-dimensional arrays) can be converted to Python scalars(?!)",
    )
    if found is None:
        return None
    names = [tensor.name for tensor in on_own_line(failure)]
    name = f"`{names[0]}`" if names else "a tensor"
    if found["truth"]:
        return Diagnosis(
            f"{name} holds several values, and a condition needs one",
            f"{names[0] if names else 'x'}.all()   # or .any()",
            describe_tensors(on_own_line(failure)),
        )
    many = f"{int(found['count']):,} values" if found["count"] else "several values"
    return Diagnosis(
        f"{name} holds {many}, and one number is needed",
        f"{names[0] if names else 'x'}.mean().item()   # or .tolist() for all values",
        describe_tensors(on_own_line(failure)),
    )
