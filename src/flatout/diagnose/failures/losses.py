"""Failures of losses and look-ups: labels and tokens out of range, targets of the wrong shape."""

from __future__ import annotations

import re

from flatout.diagnose.failures.lookups import at_position, batch_of, label_fix, out_of_range, user_names
from flatout.diagnose.kind import (
    RUNTIME,
    Diagnosis,
    describe_tensors,
    kind,
    layer,
    match_message,
    search_log,
    shape,
)
from flatout.schema.failure import FailureRecord

SIZE = r"torch\.Size\(\[[\d, ]*\]\)|\[[\d, ]*\]"


@kind("FE032", "target-shape")
def target_shape(failure: FailureRecord) -> Diagnosis | None:
    """The labels have the wrong shape for the loss.

    What:
        For `logits` of NxC (or NxCxHxW) `cross_entropy` needs labels of N (or NxHxW), or probabilities of the
        same shape as the logits.
    Why it happens:
        Labels have an extra dimension of 1, labels are one-hot integers, the batch was flattened into the
        features, or tokens and logits were not flattened together.
    How to fix it:
        `target.squeeze(1)`, `target.argmax(1)` for one-hot labels, `logits.flatten(0, 1), target.flatten()`
        for sequences.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
    """
    found = match_message(
        failure,
        ("ValueError", "RuntimeError"),
        r"Expected input batch_size \((?P<got>\d+)\) to match target batch_size \((?P<wants>\d+)\)",
        r"(?P<multi>(?:0D or 1D|1D) target tensor expected, multi-target not supported)",
        r"(?P<multi>multi-target not supported)",
        rf"Expected target size (?P<wants>{SIZE}), got (?P<got>{SIZE})",
        r"only batches of spatial targets supported \((?P<spatial>[^)]*)\)",
        rf"size mismatch \(got input: (?P<got>{SIZE}),? target: (?P<wants>{SIZE})\)",
        r"input and target batch or spatial sizes don't match: target (?P<wants>\[.*?\]), input (?P<got>\[.*?\])",
        r"Dimension out of range \(expected to be in range of \[-1, 0\], but got 1\)"
        if _in_cross_entropy(failure)
        else r"(?!)",
    )
    if found is None:
        return None
    tensors = describe_tensors(user_names(failure, failure.tensors))
    if found["multi"]:
        return Diagnosis(
            "the labels have one dimension too many: the loss needs one class number per sample",
            "target = target.squeeze(1)   # labels of Nx1\ntarget = target.argmax(1)    # one-hot labels of NxC",
            tensors,
        )
    if not found["got"] and not found["wants"]:
        return Diagnosis(
            "the loss needs logits of NxC and got a single row"
            if not found["spatial"]
            else "the loss needs labels of NxHxW for logits of NxCxHxW",
            "logits = logits.unsqueeze(0)   # one sample: add its batch"
            if not found["spatial"]
            else "target = target.squeeze(1)   # labels of Nx1xHxW",
            tensors,
        )
    got, wants = found["got"], found["wants"]
    if got.isdigit() and wants.isdigit():
        return Diagnosis(
            f"the loss got {got} rows of logits and {wants} labels",
            "x = x.flatten(1)   # keeps the batch, unlike x.view(-1, features)\n"
            "F.cross_entropy(logits.flatten(0, 1), target.flatten())   # sequences: NxTxC and NxT",
            tensors,
        )
    return Diagnosis(
        f"the loss got labels of {shape(got)} and needs {shape(wants)}",
        "F.cross_entropy(logits.transpose(1, 2), target)   # classes are the second dimension: NxCxT with NxT",
        tensors,
    )


def _in_cross_entropy(failure: FailureRecord) -> bool:
    return any(
        frame.function in ("cross_entropy", "nll_loss") for thrown in failure.chain for frame in thrown.frames
    )


@kind("FE033", "binary-target-shape")
def binary_target_shape(failure: FailureRecord) -> Diagnosis | None:
    """The targets of a binary loss differ in shape from the output.

    What:
        `binary_cross_entropy` needs targets of exactly the shape of the output.
    Why it happens:
        A network with one output gives Nx1, and the labels are N.
    How to fix it:
        `output.squeeze(1)` or `target[:, None]`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html
    """
    found = match_message(
        failure,
        ("ValueError",),
        rf"Target size \((?P<target>{SIZE})\) must be the same as input size \((?P<input>{SIZE})\)",
        rf"Using a target size \((?P<target>{SIZE})\) that is different to the input size \((?P<input>{SIZE})\) is (?:deprecated|likely)",
    )
    if found is None:
        return None
    given, wanted = shape(found["target"]), shape(found["input"])
    fix = (
        "target[:, None].float()   # or output.squeeze(1)"
        if wanted == f"{given}x1"
        else "target.view_as(output)   # if both have as many elements"
    )
    return Diagnosis(
        f"the targets are {given} and the output is {wanted}; the loss needs equal shapes",
        fix,
        describe_tensors(user_names(failure, failure.tensors)),
    )


@kind("FE034", "not-a-probability")
def not_a_probability(failure: FailureRecord) -> Diagnosis | None:
    """The input of a binary loss is not a probability.

    What:
        `binary_cross_entropy` needs an input between 0 and 1.
    Why it happens:
        The sigmoid is missing, or the output is NaN.
    How to fix it:
        `F.binary_cross_entropy_with_logits(logits, target)`, which is also more accurate, with no sigmoid
        before it.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html
    """
    found = match_message(
        failure, RUNTIME, r"all elements of (?P<what>input|target) should be between 0 and 1"
    )
    if found is None:
        return None
    if found["what"] == "target":
        return Diagnosis(
            "the targets of a binary loss are outside [0, 1]",
            "target = target / target.max()   # or read the right column of the data",
            describe_tensors(failure.tensors),
        )
    return Diagnosis(
        "the input of a binary loss is outside [0, 1]: it is not a probability (or it is NaN)",
        "F.binary_cross_entropy_with_logits(logits, target)   # and no sigmoid before it",
        describe_tensors(user_names(failure, failure.tensors)),
    )


ASSERTED = (
    r"(?P<file>[\w./\\-]*\.cu[h]?):(?P<line>\d+): .{0,400}?block: \[(?P<block>\d+),\d+,\d+\], thread: \[(?P<thread>\d+),\d+,\d+\] "
    r"Assertion `(?P<what>.{1,200}?)` failed"
)
CLASSES = re.compile(r"(?:t|cur_target|target_val)\w* (?:>= 0|< n_classes)")


@kind("FE035", "device-side-assert")
def device_side_assert(failure: FailureRecord) -> Diagnosis | None:
    """An assertion on the GPU failed.

    What:
        A kernel got an invalid value: usually a label or a token out of range. The GPU reports it late, so
        the traceback shows a later line, and this process can no longer use the GPU.
    Why it happens:
        The causes are those of label-out-of-range and index-out-of-range on the CPU, a probability outside
        [0, 1] in a binary loss, or an index that is too large.
    How to fix it:
        Check the labels on the CPU, where the error names them: run one step with `device = "cpu"`. Or set
        CUDA_LAUNCH_BLOCKING=1 so that the traceback shows the right line.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """
    found = match_message(
        failure,
        RUNTIME,
        r"(?:CUDA|HIP) error: device-side assert triggered",
        r"cuda runtime error \(\d+\) : device-side assert triggered",
        r"cuDNN error: CUDNN_STATUS_MAPPING_ERROR(?!)",
    )
    asserted = search_log(failure, ASSERTED)
    if found is None and (asserted is None or (failure.chain and failure.chain[-1].frames)):
        return None
    what = asserted["what"] if asserted else ""
    evidence = (
        [
            f"assertion `{what}` in {asserted['file'].replace(chr(92), '/').rpartition('/')[2]}, block {asserted['block']}, thread {asserted['thread']}"
        ]
        if asserted
        else []
    )
    classes, tensors = _logits(failure), user_names(failure, failure.tensors)
    bad = (
        out_of_range([tensor for tensor in tensors if tensor.device == "cpu"], classes)
        if classes and (not what or CLASSES.search(what))
        else None
    )
    if bad is not None:
        tensor, value, where = bad
        return Diagnosis(
            f"the label {value} (`{tensor.name}`{at_position(where)}{batch_of(failure)}) is not a class: the model has {classes} outputs (0 "
            f"to {classes - 1 if classes else 0})",
            label_fix(value, classes),
            [*evidence, *describe_tensors(tensors)],
        )
    if CLASSES.search(what):
        sample = (
            f"; sample {asserted['thread']} of its batch or a multiple of the block after it"
            if asserted and "2d" not in what
            else ""
        )
        said = f"a label is below 0 or not below the number of the model's outputs (the assertion of the loss failed on the GPU{sample})"
        fix = (
            "assert 0 <= int(target.min()) and int(target.max()) < logits.size(1), (target.min(), target.max())   # before the loss; names the label\n"
            "nn.Linear(..., classes)   # as many outputs as there are classes"
        )
    elif re.search(r"srcIndex|index.{0,40}(?:<|out of bounds)|idx", what):
        said = "an index (a token, a position, a row) is out of range, found on the GPU"
        fix = "print(int(tokens.min()), int(tokens.max()), model.embedding.num_embeddings)   # the largest token must be below num_embeddings"
    elif re.search(r"input_val|zero.{0,10}one|>= 0 && .{0,20}<= 1", what):
        said = "the input of a binary loss is not a probability (or it is NaN), found on the GPU"
        fix = "F.binary_cross_entropy_with_logits(logits, target)   # and no sigmoid before it"
    else:
        said = "a kernel got an invalid value, and the GPU reports it late: the real error may be before the line below"
        fix = "check labels and tokens: they must be in 0 .. classes - 1"
    running = f" ({layer(failure)} was running when the GPU reported it)" if layer(failure) else ""
    return Diagnosis(
        said + running,
        fix + "\nCUDA_LAUNCH_BLOCKING=1 python train.py   # the traceback then shows the right line",
        evidence,
    )


def _logits(failure: FailureRecord) -> int | None:
    """The number of classes: the second size of the loss's input."""
    for thrown in failure.chain:
        for frame in reversed(thrown.frames):
            if frame.function in ("cross_entropy", "nll_loss"):
                outputs = next(
                    (tensor for tensor in frame.tensors if tensor.name == "input" and len(tensor.shape) > 1),
                    None,
                )
                if outputs is not None:
                    return outputs.shape[1]
    own = failure.own
    for tensor in own.tensors if own else ():
        if (
            "float" in tensor.dtype
            and len(tensor.shape) > 1
            and re.search(r"logit|output|pred|score", tensor.name)
        ):
            return tensor.shape[1]
    return None
