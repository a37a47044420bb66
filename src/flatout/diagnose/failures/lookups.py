"""Indices and labels outside their range."""

from __future__ import annotations

from flatout.diagnose.kind import (
    Diagnosis,
    describe_tensors,
    kind,
    layer,
    match_message,
    on_own_line,
)
from flatout.schema.failure import FailureRecord, TensorSeen


def out_of_range(
    tensors: list[TensorSeen], below: int | None, lowest: int = 0
) -> tuple[TensorSeen, int, list[int]] | None:
    """The first integer tensor with an entry outside [lowest, below), with that entry and its position.

    Skips -100, torch's value for "ignore".
    """
    for tensor in tensors:
        if tensor.high is not None and below is not None and tensor.high >= below:
            return tensor, tensor.high, tensor.where_high
        if tensor.low is not None and tensor.low < lowest and tensor.low != -100:
            return tensor, tensor.low, tensor.where_low
    return None


def at_position(where: list[int]) -> str:
    return f" at [{', '.join(map(str, where))}]" if where else ""


def batch_of(failure: FailureRecord) -> str:
    return f", in batch {failure.batch} of the loader" if failure.batch is not None else ""


def user_names(failure: FailureRecord, tensors: list[TensorSeen]) -> list[TensorSeen]:
    """The tensors by the user's own names first, then by torch's (`input`, `target`)."""
    return [*on_own_line(failure), *tensors]


@kind("FE030", "index-out-of-range")
def index_out_of_range(failure: FailureRecord) -> Diagnosis | None:
    """A token or index is outside the table.

    What:
        An embedding (or another look-up) was indexed with a row that it does not have.
    Why it happens:
        The tokenizer's vocabulary is larger than `num_embeddings`, tokens were added without resizing the
        embedding, the padding is -1, or a position is beyond the longest sequence.
    How to fix it:
        `num_embeddings` must be the largest token plus one: `model.resize_token_embeddings(len(tokenizer))`
        in transformers, `nn.Embedding(len(vocabulary), ...)` in your own model. Cut sequences to the number
        of positions.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html
    """
    found = match_message(
        failure,
        ("IndexError", "RuntimeError"),
        r"index out of range in self",
        r"index out of range: Tried to access index (?P<index>-?\d+) out of table with (?P<last>\d+) rows",
        r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)",
    )
    if found is None:
        return None
    weight = failure.module.parameters.get("weight", []) if failure.module else []
    rows = (
        weight[0]
        if weight
        else found.number("last") + 1
        if found["last"]
        else found.number("size")
        if found["size"]
        else None
    )
    bad = out_of_range(user_names(failure, failure.tensors), rows)
    name = layer(failure) or ("the embedding" if "self" in found.thrown.message else "the table")
    if bad is None and not found["index"]:
        return Diagnosis(
            f"{name} was indexed with a row that it does not have"
            + (f"; it has {rows:,} rows" if rows else ""),
            "print(int(tokens.min()), int(tokens.max()))   # must be in 0 .. num_embeddings - 1",
            describe_tensors(failure.tensors),
        )
    value, where, what = (
        (bad[1], at_position(bad[2]), f"`{bad[0].name}` holds ")
        if bad
        else (found.number("index"), "", "it was indexed with ")
    )
    has = f"{name} has {rows:,} rows (0 to {rows - 1:,})" if rows else name
    return Diagnosis(
        f"{what}{value:,}{where}{batch_of(failure)}, and {has}",
        f"nn.Embedding({value + 1 if value > 0 else '...'}, ...)   # at least the largest token plus one\n"
        "model.resize_token_embeddings(len(tokenizer))   # in transformers, after tokens were added"
        if value >= 0
        else f"padding_idx=0, or replace {value} before the look-up: rows below 0 do not exist",
        describe_tensors(failure.tensors),
    )


@kind("FE031", "label-out-of-range")
def label_out_of_range(failure: FailureRecord) -> Diagnosis | None:
    """A label is not a class of the model.

    What:
        The loss got a label that is below 0, or equal to or above the number of outputs.
    Why it happens:
        Labels start at 1, the last layer has fewer outputs than the data set has classes, or unlabelled
        pixels are 255.
    How to fix it:
        `nn.Linear(..., classes)`; `target - 1` if labels start at 1; `ignore_index=255` for unlabelled
        entries.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
    """
    found = match_message(
        failure,
        ("IndexError", "RuntimeError"),
        r"Target (?P<label>-?\d+) is out of bounds",
        r"Class values must be (?:smaller than num_classes|non-negative)(?P<hot>)",
    )
    if found is None:
        return None
    outputs = next(
        (
            tensor
            for tensor in user_names(failure, failure.tensors)
            if "float" in tensor.dtype and len(tensor.shape) > 1
        ),
        None,
    )
    classes = outputs.shape[1] if outputs else None
    bad = out_of_range(user_names(failure, failure.tensors), classes)
    label = found.number("label") if found["label"] else bad[1] if bad else None
    if label is None:
        return Diagnosis(
            "`one_hot` got a label that is not a class",
            "F.one_hot(target, num_classes=int(target.max()) + 1)",
            describe_tensors(failure.tensors),
        )
    has = (
        f"the model has {classes} outputs (0 to {classes - 1})" if classes else "the model has fewer outputs"
    )
    holder = bad[0].name if bad and bad[1] == label else "the target"
    where = at_position(bad[2]) if bad and bad[1] == label else ""
    return Diagnosis(
        f"`{holder}` holds the label {label}{where}{batch_of(failure)}, and {has}",
        label_fix(label, classes),
        describe_tensors(user_names(failure, failure.tensors)),
    )


def label_fix(label: int, classes: int | None) -> str:
    if label < 0:
        return (
            f"F.cross_entropy(logits, target, ignore_index={label})   # if {label} marks unlabelled entries"
        )
    lines = [f"nn.Linear(..., {label + 1})   # at least as many outputs as the largest label plus one"]
    if classes is not None and label == classes:
        lines.insert(0, "target = target - 1   # if the labels start at 1")
    if label == 255:
        lines.insert(
            0, "F.cross_entropy(logits, target, ignore_index=255)   # 255 usually marks unlabelled pixels"
        )
    return "\n".join(lines)
