"""Failures of shapes: matrix products, broadcasting and concatenation."""

from flatout.diagnose.kind import (
    MESSAGE_END,
    Diagnosis,
    Form,
    MessageMatch,
    frame_matches,
    kind,
    layer,
    match_message,
    pattern_kind,
    shape,
    tensor_lines,
    tensors_on_line,
)
from flatout.schema.failure import FailureRecord

SIZE = r"(?:torch\.Size\()?\[[-\d, x]*\]\)?"


@kind("FE020", "matrix-sizes")
def matrix_sizes(failure: FailureRecord) -> Diagnosis | None:
    """The sizes of a matrix product or linear layer do not match.

    Why it happens:
        The images have another size than the network was written for, so flattening gives more or fewer
        features. Or the batch was flattened into the features, or a transpose is missing.
    How to fix it:
        Give the layer the size of its input: `nn.Linear(in_features, out)`, or let `nn.LazyLinear(out)` infer
        it. Or resize the images to the size that the network was written for.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.LazyLinear.html"""
    match = match_message(
        failure,
        r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\d+)x(?P<b>\d+) and (?P<c>\d+)x(?P<d>\d+)\)",
        rf"mat1 and mat2 shapes cannot be multiplied{MESSAGE_END}",
        r"mat1 dim 1 must match mat2 dim 0",
        r"size mismatch, got input \((?P<a>\d+)\), mat \((?P<e>\d+)x(?P<c>\d+)\), vec \((?P<b>\d+)\)",
        r"a and b must have same reduction dim, but got \[(?P<a>\S+), (?P<b>\S+)\] X \[(?P<c>\S+), (?P<d>\S+)\]",
        r"Expected size for first two dimensions of batch2 tensor to be: \[(?P<e>\d+), (?P<b>\d+)\] but got: \[(?P<f>\d+), (?P<c>\d+)\]",
        r"inconsistent tensor size, expected tensor \[(?P<b>\d+)\] and src \[(?P<c>\d+)\] to have the same number of elements",
        types=("RuntimeError", "ValueError"),
    )
    if match is None:
        return None
    a, b, c, d = (match[part] for part in "abcd")
    weight = failure.module.parameters.get("weight", []) if failure.module else []
    if len(weight) == 2 and layer(failure):
        actual, expected = b, str(weight[1])
        return Diagnosis(
            f"{layer(failure)} expects {expected} features and got {actual}",
            f"{failure.module.path if failure.module else 'layer'} = "
            f"nn.Linear({actual}, {weight[0]})   # or nn.LazyLinear({weight[0]})\n"
            f"x = x.flatten(1)   # if the batch was flattened into the features: the first size must stay the batch",
            tensor_lines(failure),
        )
    if not b:
        return Diagnosis(
            "a matrix product got sizes that do not match", "print(a.shape, b.shape)", tensor_lines(failure)
        )
    first, second = (f"{a}x{b}", f"{c}x{d}") if a and d else (f"size {b}", f"size {c}")
    fix = f"nn.Linear({b}, {d or '...'})   # if this is a linear layer"
    if d == b:
        fix = "a @ b.T   # if the second matrix is stored transposed"
    return Diagnosis(
        f"a product of {first} and {second}{' in ' + layer(failure) if layer(failure) else ''}: {b} and {c} must be equal",
        fix,
        tensor_lines(failure),
    )


def _tensor_names(failure: FailureRecord, _: MessageMatch) -> dict[str, str]:
    tensors = tensors_on_line(failure)[:3]
    return {"names": " and ".join(f"`{tensor.name}` ({shape(str(tensor.shape))})" for tensor in tensors)}


BROADCAST_FIX = (
    "small[:, None]            # add a dimension of 1 to the smaller tensor in the right position\n"
    "buffer[: batch.size(0)]   # if one has the full batch size and this is the last batch"
)
broadcast = pattern_kind(
    "FE025",
    "broadcast",
    """Two tensors do not broadcast.
    A mask, a weight or a target belongs to another dimension, or the last batch of the epoch is smaller than a
    fixed-size buffer. Counted from the last dimension, the sizes must be equal or one of them must be 1.
    https://docs.pytorch.org/docs/stable/notes/broadcasting.html""",
    Form(
        "{names|two tensors}: sizes {a} and {b} of dimension {dim} do not broadcast",
        BROADCAST_FIX,
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) at non-singleton dimension (?P<dim>\d+)",
        r"The expanded size of the tensor \((?P<a>\d+)\) must match the existing size \((?P<b>\d+)\) at non-singleton dimension (?P<dim>\d+)",
    ),
    Form(
        "{out|an index} and {wide} do not broadcast",
        BROADCAST_FIX,
        r"output with shape (?P<out>\[[\d, ]*\]) doesn't match the broadcast shape (?P<wide>\[[\d, ]*\])",
        r"shape mismatch: (?:value tensor of shape (?P<out>\[[\d, ]*\]) cannot be broadcast to indexing result of shape|indexing tensors "
        r"could not be broadcast together with shapes) (?P<wide>\[.*?\])",
    ),
    Form(
        "{names|two tensors} do not broadcast",
        BROADCAST_FIX,
        r"Attempting to broadcast a dimension of length (?P<b>\d+) at -?\d+",
    ),
    show_tensors=True,
    values=_tensor_names,
)

concatenation = pattern_kind(
    "FE026",
    "concatenation",
    """Tensors of different sizes were concatenated or stacked.
    Sequences or images have several sizes, or the two branches of a skip connection halve an odd size
    differently. `cat` needs equal sizes in every dimension but one, `stack` in all of them.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pad_sequence.html""",
    Form(
        "`cat` along dimension {dim} got sizes {a} and {b} in another dimension[[ (tensor {at})]]",
        "torch.cat([...], dim=...)   # the dimension that may differ\nF.interpolate(x, size=other.shape[2:])   # for a skip connection of odd sizes",
        r"Sizes of tensors must match except in dimension (?P<dim>\d+)\. Expected size (?P<a>\d+) but got size (?P<b>\d+) for tensor number (?P<at>\d+)",
        r"Sizes of tensors must match except in dimension (?P<dim>\d+)\. Got (?P<a>\d+) and (?P<b>\d+)",
    ),
    Form(
        "`stack` got tensors of {one} and {other} (entry {at})",
        "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)   # for rows of several lengths",
        r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]*\]) at entry 0 and (?P<other>\[[\d, ]*\]) at entry (?P<at>\d+)",
    ),
    Form(
        "`cat` got tensors with different numbers of dimensions[[: {a} and {b}]]",
        "x.unsqueeze(0)   # add the missing dimension to the smaller tensor",
        r"Tensors must have same number of dimensions: got (?P<a>\d+) and (?P<b>\d+)",
        r"zero-dimensional tensor \(at position \d+\) cannot be concatenated",
    ),
    show_tensors=True,
    when=lambda failure, _: not frame_matches(failure, ":(?:default_collate|collate_tensor_fn|collate)$"),
)
