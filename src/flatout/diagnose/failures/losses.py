"""Failures of losses and look-ups: labels and tokens out of range, targets of the wrong shape."""

import re

from flatout.diagnose.kind import (
    Diagnosis,
    Form,
    MessageMatch,
    describe_tensors,
    frame_matches,
    kind,
    layer,
    match_message,
    pattern_kind,
    search_log,
    shape,
    tensors_on_line,
)
from flatout.schema.failure import FailureRecord, TensorRecord

SIZE = r"torch\.Size\(\[[\d, ]*\]\)|\[[\d, ]*\]"
SINGLE_ROW = r"Dimension out of range \(expected to be in range of \[-1, 0\], but got 1\)"


def out_of_range(
    tensors: list[TensorRecord], below: int | None
) -> tuple[TensorRecord, int, list[int]] | None:
    """The first integer tensor with an entry outside [0, below), with that entry and its position.

    Skips -100, torch's value for "ignore"."""
    for tensor in tensors:
        if tensor.high is not None and below is not None and tensor.high >= below:
            return tensor, tensor.high, tensor.argmax
        if tensor.low is not None and tensor.low < 0 and tensor.low != -100:
            return tensor, tensor.low, tensor.argmin
    return None


def index_text(index: list[int]) -> str:
    return f" at [{', '.join(map(str, index))}]" if index else ""


def batch_text(failure: FailureRecord) -> str:
    return f", in batch {failure.batch} of the loader" if failure.batch is not None else ""


def user_names(failure: FailureRecord) -> list[TensorRecord]:
    """The tensors by the user's own names first, then by torch's (`input`, `target`)."""
    return [*tensors_on_line(failure), *failure.tensors]


@kind("FE030", "index-out-of-range")
def index_out_of_range(failure: FailureRecord) -> Diagnosis | None:
    """A token or index is outside the table.

    Why it happens:
        The tokenizer's vocabulary is larger than `num_embeddings`, tokens were added without resizing the
        embedding, the padding is -1, or a position is beyond the longest sequence.
    How to fix it:
        `num_embeddings` must be the largest token plus one: `model.resize_token_embeddings(len(tokenizer))`
        in transformers, `nn.Embedding(len(vocabulary), ...)` in your own model. Cut sequences to the number
        of positions.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html"""
    match = match_message(
        failure,
        r"index out of range in self",
        r"index out of range: Tried to access index (?P<index>-?\d+) out of table with (?P<last>\d+) rows",
        r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)",
        types=("IndexError", "RuntimeError"),
    )
    if match is None:
        return None
    weight = failure.module.parameters.get("weight", []) if failure.module else []
    rows = match.number("size") if match["size"] else None
    if weight:
        rows = weight[0]
    elif match["last"]:
        rows = match.number("last") + 1
    invalid = out_of_range(user_names(failure), rows)
    name = layer(failure) or ("the embedding" if "self" in match.error.message else "the table")
    if invalid is None and not match["index"]:
        return Diagnosis(
            f"{name} was indexed with a row that it does not have"
            + (f"; it has {rows:,} rows" if rows else ""),
            "print(int(tokens.min()), int(tokens.max()))   # must be in 0 .. num_embeddings - 1",
            describe_tensors(failure.tensors),
        )
    value, index, subject = match.number("index"), "", "it was indexed with "
    if invalid:
        value, index, subject = invalid[1], index_text(invalid[2]), f"`{invalid[0].name}` holds "
    table_size = f"{name} has {rows:,} rows (0 to {rows - 1:,})" if rows else name
    return Diagnosis(
        f"{subject}{value:,}{index}{batch_text(failure)}, and {table_size}",
        f"nn.Embedding({value + 1 if value > 0 else '...'}, ...)   # at least the largest token plus one\n"
        "model.resize_token_embeddings(len(tokenizer))   # in transformers, after tokens were added"
        if value >= 0
        else f"padding_idx=0, or replace {value} before the look-up: rows below 0 do not exist",
        describe_tensors(failure.tensors),
    )


@kind("FE031", "label-out-of-range")
def label_out_of_range(failure: FailureRecord) -> Diagnosis | None:
    """A label is not a class of the model.

    Why it happens:
        Labels start at 1, the last layer has fewer outputs than the data set has classes, or unlabelled
        pixels are 255.
    How to fix it:
        `nn.Linear(..., classes)`; `target - 1` if labels start at 1; `ignore_index=255` for unlabelled
        entries.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html"""
    match = match_message(
        failure,
        r"Target (?P<label>-?\d+) is out of bounds",
        r"Class values must be (?:smaller than num_classes|non-negative)(?P<hot>)",
        types=("IndexError", "RuntimeError"),
    )
    if match is None:
        return None
    outputs = next(
        (tensor for tensor in user_names(failure) if "float" in tensor.dtype and len(tensor.shape) > 1), None
    )
    classes = outputs.shape[1] if outputs else None
    invalid = out_of_range(user_names(failure), classes)
    label = match.number("label") if match["label"] else invalid[1] if invalid else None
    if label is None:
        return Diagnosis(
            "`one_hot` got a label that is not a class",
            "F.one_hot(target, num_classes=int(target.max()) + 1)",
            describe_tensors(failure.tensors),
        )
    outputs_text = (
        f"the model has {classes} outputs (0 to {classes - 1})" if classes else "the model has fewer outputs"
    )
    target_name = invalid[0].name if invalid and invalid[1] == label else "the target"
    index = index_text(invalid[2]) if invalid and invalid[1] == label else ""
    return Diagnosis(
        f"`{target_name}` holds the label {label}{index}{batch_text(failure)}, and {outputs_text}",
        label_fix(label, classes),
        describe_tensors(user_names(failure)),
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


def _shape_texts(_: FailureRecord, match: MessageMatch) -> dict[str, str]:
    return {name: shape(match[name]) for name in ("got", "wants") if match[name]}


target_shape = pattern_kind(
    "FE032",
    "target-shape",
    """The labels have the wrong shape for the loss.
    Labels have an extra dimension of 1, labels are one-hot integers, the batch was flattened into the
    features, or tokens and logits were not flattened together. For `logits` of NxC (or NxCxHxW)
    `cross_entropy` needs labels of N (or NxHxW), or probabilities of the same shape as the logits.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html""",
    Form(
        "the loss got {got} rows of logits and {wants} labels",
        "x = x.flatten(1)   # keeps the batch, unlike x.view(-1, features)\n"
        "F.cross_entropy(logits.flatten(0, 1), target.flatten())   # sequences: NxTxC and NxT",
        r"Expected input batch_size \((?P<got>\d+)\) to match target batch_size \((?P<wants>\d+)\)",
    ),
    Form(
        "the labels have one dimension too many: the loss needs one class number per sample",
        "target = target.squeeze(1)   # labels of Nx1\ntarget = target.argmax(1)    # one-hot labels of NxC",
        r"(?:(?:0D or 1D|1D) target tensor expected, )?multi-target not supported",
    ),
    Form(
        "the loss got labels of {got} and needs {wants}",
        "F.cross_entropy(logits.transpose(1, 2), target)   # classes are the second dimension: NxCxT with NxT",
        rf"Expected target size (?P<wants>{SIZE}), got (?P<got>{SIZE})",
        rf"size mismatch \(got input: (?P<got>{SIZE}),? target: (?P<wants>{SIZE})\)",
        r"input and target batch or spatial sizes don't match: target (?P<wants>\[.*?\]), input (?P<got>\[.*?\])",
    ),
    Form(
        "the loss needs labels of NxHxW for logits of NxCxHxW",
        "target = target.squeeze(1)   # labels of Nx1xHxW",
        r"only batches of spatial targets supported \([^)]*\)",
    ),
    Form(
        "the loss needs logits of NxC and got a single row",
        "logits = logits.unsqueeze(0)   # one sample: add its batch",
        SINGLE_ROW,
    ),
    types=("ValueError", "RuntimeError", "IndexError"),
    show_tensors=True,
    when=lambda failure, match: (
        match.pattern != SINGLE_ROW or frame_matches(failure, ":(?:cross_entropy|nll_loss)$")
    ),
    values=_shape_texts,
)

binary_target_shape = pattern_kind(
    "FE033",
    "binary-target-shape",
    """The targets of a binary loss differ in shape from the output.
    A network with one output gives Nx1, and the labels are N. The loss needs exactly equal shapes.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html""",
    Form(
        "the targets are {got} and the output is {wants}; the loss needs equal shapes",
        "target[:, None].float()   # or output.squeeze(1)\ntarget.view_as(output)    # if both have as many elements",
        rf"Target size \((?P<got>{SIZE})\) must be the same as input size \((?P<wants>{SIZE})\)",
        rf"Using a target size \((?P<got>{SIZE})\) that is different to the input size \((?P<wants>{SIZE})\) is (?:deprecated|likely)",
    ),
    types=("ValueError",),
    show_tensors=True,
    values=_shape_texts,
)

not_a_probability = pattern_kind(
    "FE034",
    "not-a-probability",
    """The input of a binary loss is not a probability.
    The sigmoid is missing, or the output is NaN. The form of the loss with logits is also more accurate.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html""",
    Form(
        "the input of a binary loss is outside [0, 1]: it is not a probability (or it is NaN)",
        "F.binary_cross_entropy_with_logits(logits, target)   # and no sigmoid before it",
        r"all elements of input should be between 0 and 1",
    ),
    Form(
        "the targets of a binary loss are outside [0, 1]",
        "target = target / target.max()   # or read the right column of the data",
        r"all elements of target should be between 0 and 1",
    ),
    show_tensors=True,
)

ASSERTION = (
    r"(?P<file>[\w./\\-]*\.cu[h]?):(?P<line>\d+): .{0,400}?block: \[(?P<block>\d+),\d+,\d+\], thread: \[(?P<thread>\d+),\d+,\d+\] "
    r"Assertion `(?P<what>.{1,200}?)` failed"
)
CLASS_ASSERTION = re.compile(r"(?:t|cur_target|target_val)\w* (?:>= 0|< n_classes)")


@kind("FE035", "device-side-assert")
def device_side_assert(failure: FailureRecord) -> Diagnosis | None:
    """An assertion on the GPU failed.

    Why it happens:
        A kernel got an invalid value. The GPU reports it late, so the traceback shows a later line, and this
        process can no longer use the GPU. The causes are those of label-out-of-range and index-out-of-range on the CPU, a probability outside
        [0, 1] in a binary loss, or an index that is too large.
    How to fix it:
        Check the labels on the CPU, where the error names them: run one step with `device = "cpu"`. Or set
        CUDA_LAUNCH_BLOCKING=1 so that the traceback shows the right line.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution"""
    match = match_message(failure, r"(?:CUDA|HIP) error: device-side assert triggered")
    assertion = search_log(failure, ASSERTION)
    if match is None and (assertion is None or (failure.chain and failure.chain[-1].frames)):
        return None
    condition = assertion["what"] if assertion else ""
    evidence = []
    if assertion:
        file = assertion["file"].replace("\\", "/").rpartition("/")[2]
        evidence.append(
            f"assertion `{condition}` in {file}, block {assertion['block']}, thread {assertion['thread']}"
        )
    classes, tensors = _class_count(failure), user_names(failure)
    invalid = out_of_range([tensor for tensor in tensors if tensor.device == "cpu"], classes)
    if invalid is not None and classes and (not condition or CLASS_ASSERTION.search(condition)):
        tensor, value, index = invalid
        return Diagnosis(
            f"the label {value} (`{tensor.name}`{index_text(index)}{batch_text(failure)}) is not a class: the model has {classes} outputs (0 "
            f"to {classes - 1})",
            label_fix(value, classes),
            [*evidence, *describe_tensors(tensors)],
        )
    if CLASS_ASSERTION.search(condition):
        sample = ""
        if assertion and "2d" not in condition:
            sample = f"; sample {assertion['thread']} of its batch or a multiple of the block after it"
        cause = f"a label is below 0 or not below the number of the model's outputs (the assertion of the loss failed on the GPU{sample})"
        fix = (
            "assert 0 <= int(target.min()) and int(target.max()) < logits.size(1), (target.min(), target.max())   # before the loss; names the label\n"
            "nn.Linear(..., classes)   # as many outputs as there are classes"
        )
    elif re.search(r"srcIndex|index.{0,40}(?:<|out of bounds)|idx", condition):
        cause = "an index (a token, a position, a row) is out of range, found on the GPU"
        fix = "print(int(tokens.min()), int(tokens.max()), model.embedding.num_embeddings)   # the largest token must be below num_embeddings"
    elif re.search(r"input_val|zero.{0,10}one|>= 0 && .{0,20}<= 1", condition):
        cause = "the input of a binary loss is not a probability (or it is NaN), found on the GPU"
        fix = "F.binary_cross_entropy_with_logits(logits, target)   # and no sigmoid before it"
    else:
        cause = "a kernel got an invalid value, and the GPU reports it late: the real error may be before the line below"
        fix = "check labels and tokens: they must be in 0 .. classes - 1"
    running_layer = f" ({layer(failure)} was running when the GPU reported it)" if layer(failure) else ""
    return Diagnosis(
        cause + running_layer,
        fix + "\nCUDA_LAUNCH_BLOCKING=1 python train.py   # the traceback then shows the right line",
        evidence,
    )


def _class_count(failure: FailureRecord) -> int | None:
    """The number of classes: the second size of the loss's input."""
    for error in failure.chain:
        for frame in reversed(error.frames):
            if frame.function in ("cross_entropy", "nll_loss"):
                outputs = next(
                    (tensor for tensor in frame.tensors if tensor.name == "input" and len(tensor.shape) > 1),
                    None,
                )
                if outputs is not None:
                    return outputs.shape[1]
    own = failure.user_frame
    for tensor in own.tensors if own else ():
        if (
            "float" in tensor.dtype
            and len(tensor.shape) > 1
            and re.search(r"logit|output|pred|score", tensor.name)
        ):
            return tensor.shape[1]
    return None
