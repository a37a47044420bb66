"""Failures of dtypes: mixed dtypes, targets of the wrong dtype, unsupported operations."""

from flatout.diagnose.kind import (
    Diagnosis,
    Form,
    describe_tensors,
    kind,
    layer,
    match_message,
    pattern_kind,
    tensor_name,
    tensors_on_line,
)
from flatout.schema.failure import FailureRecord

CASTS = {
    "Long": "long()",
    "Float": "float()",
    "Double": "double()",
    "Half": "half()",
    "BFloat16": "bfloat16()",
    "long": "long()",
    "float": "float()",
    "double": "double()",
    "int64": "long()",
    "float32": "float()",
    "Int": "int()",
    "Byte": "byte()",
    "unsigned char": "byte()",
    "c10::BFloat16": "bfloat16()",
    "c10::Half": "half()",
}
DTYPE = r"[\w:]+(?: char)?"
LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "gaussian_nll_loss",
    "kl_div",
    "poisson_nll_loss",
    "multilabel_margin_loss",
    "multi_margin_loss",
)


def _in_loss(failure: FailureRecord) -> str:
    """The loss function that was running or that the failing line calls."""
    for error in failure.chain:
        for frame in reversed(error.frames):
            if frame.function in LOSSES:
                return frame.function
    text = failure.user_frame.text if failure.user_frame else ""
    return next((name for name in LOSSES if name in text), "")


@kind("FE010", "two-dtypes")
def two_dtypes(failure: FailureRecord) -> Diagnosis | None:
    """One operation got two dtypes.

    Why it happens:
        Matrix products and convolutions never convert. NumPy numbers are float64 and images uint8, so `torch.from_numpy` gives double or byte. Or part of the
        model was converted (`.half()`, `.bfloat16()`) and its input was not, or autocast ended too early.
    How to fix it:
        Convert the batch to the dtype of the weights: `x = x.to(weight.dtype)`. For mixed precision use
        `torch.autocast` and leave the model in float32.
    Sources:
        https://docs.pytorch.org/docs/stable/amp.html"""
    match = match_message(
        failure,
        rf"mat1 and mat2 must have the same dtype, but got (?P<got>{DTYPE}) and (?P<wants>{DTYPE})",
        rf"expected (?:scalar type|m1 and m2 to have the same dtype, but got:) (?P<wants>{DTYPE}) (?:but found|!=) (?P<got>{DTYPE})",
        rf"Input type \((?:torch\.)?(?:cuda\.)?(?P<got>{DTYPE})\) and (?:weight|bias) type \((?:torch\.)?(?:cuda\.)?(?P<wants>{DTYPE})\) should be the same",
        rf"expected m1 and m2 to have the same dtype, but got: (?P<got>{DTYPE}) != (?P<wants>{DTYPE})",
        r"(?:.{0,200}?)Expected query, key, and value to have the same dtype, but got query\.dtype: (?P<got>\S+) key\.dtype: (?P<wants>\S+)",
        rf"[Ii]nput dtype (?:torch\.)?(?P<got>{DTYPE}) (?:does not match|not equal to) (?:weight|hidden) dtype (?:torch\.)?(?P<wants>{DTYPE})",
        rf"mixed dtype \(CPU\): expect (?:parameter to have scalar type of Float|input to have scalar type of (?P<wants>{DTYPE}))",
        rf"value cannot be converted to type (?P<wants>{DTYPE}) without overflow(?!)",
    )
    if match is None or _in_loss(failure):
        return None
    actual, expected = match["got"].replace("Tensor", ""), match["wants"].replace("Tensor", "")
    if actual == expected:
        return None
    conversion = CASTS.get(expected, f"to({expected.lower()})")
    tensors = tensors_on_line(failure) or failure.tensors
    name = next(
        (
            tensor.name
            for tensor in tensors
            if tensor.dtype.lower().startswith(_dtype_name(actual)) and tensor.name.isidentifier()
        ),
        "x",
    )
    receiver = layer(failure) or "a product"
    return Diagnosis(
        f"{receiver} got {_described(actual)} and has {_described(expected)}",
        f"{name} = {name}.{conversion}",
        describe_tensors(tensors),
    )


def _dtype_name(name: str) -> str:
    return {
        "double": "float64",
        "float": "float32",
        "long": "int64",
        "int": "int32",
        "half": "float16",
        "byte": "uint8",
        "unsigned char": "uint8",
        "c10::bfloat16": "bfloat16",
        "c10::half": "float16",
    }.get(name.lower(), name.lower())


def _described(name: str) -> str:
    dtype = _dtype_name(name)
    return f"{dtype} ({name.lower().removeprefix('c10::')})" if dtype != name.lower() else dtype


@kind("FE011", "target-dtype")
def target_dtype(failure: FailureRecord) -> Diagnosis | None:
    """The targets have the wrong dtype for the loss.

    Why it happens:
        Class labels are int64; targets of a regression or a binary loss are floating point. Labels were read as floats, or `mse_loss` or `binary_cross_entropy` got the integers that
        `cross_entropy` needs.
    How to fix it:
        `target.long()` for `cross_entropy` and `nll_loss`, `target.float()` for the others.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html"""
    match = match_message(
        failure,
        rf"Found dtype (?P<got>{DTYPE}) but expected (?P<wants>{DTYPE})",
        rf"expected target dtype to be (?P<wants>Long) or Byte, but got (?P<got>{DTYPE})",
        rf"result type (?P<wants>{DTYPE}) can't be cast to the desired output type (?P<got>{DTYPE})",
        rf"expected scalar type (?P<wants>{DTYPE}) but found (?P<got>{DTYPE})",
        rf'"(?:nll_loss|host_softmax|log_softmax|cross_entropy|mse|smooth_l1|binary_cross_entropy)\w*" not implemented for \'(?P<got>{DTYPE})\'',
        rf"(?:nll_loss\w*|multi_margin_loss\w*)[^\n]{{0,80}}Expected (?:object of scalar type|dtype) (?P<wants>{DTYPE}) but got (?:scalar "
        rf"type )?(?P<got>{DTYPE})",
        r"Expected floating point type for target with class probabilities, got (?P<got>\w+)(?P<probabilities>)",
        types=("RuntimeError", "NotImplementedError"),
    )
    loss = _in_loss(failure)
    if match is None or (match.error.message.startswith("expected scalar type") and not loss):
        return None
    backward = match.error.message.startswith("Found dtype")
    if (
        backward
        and not any("backward" in frame.function or "backward" in frame.text for frame in match.error.frames)
        and match.error.frames
    ):
        return None
    classes = loss in ("cross_entropy", "nll_loss") and "probabilities" not in match.error.message
    expected = "long" if classes else "float"
    if not loss and not backward and match["wants"]:
        expected = "long" if match["wants"] == "Long" else "float"
    target = next(
        (
            tensor.name
            for tensor in tensors_on_line(failure)
            if ("float" in tensor.dtype) == (expected == "long") and tensor.name.isidentifier()
        ),
        "target",
    )
    actual = _described(match["got"]) if match["got"] else "another dtype"
    return Diagnosis(
        f"the loss{f' `{loss}`' if loss else ''} got `{target}` as {actual} and needs {_described(expected)}",
        f"{target} = {target}.{expected}()",
        describe_tensors(tensors_on_line(failure)),
    )


no_such_operation = pattern_kind(
    "FE012",
    "no-such-operation",
    """The operation does not support this dtype on this device.
    A model converted for a GPU (`.half()`) runs on the CPU, or the program takes a mean or a norm of integers.
    On the CPU bfloat16 supports more operations than float16.
    https://docs.pytorch.org/docs/stable/amp.html""",
    Form(
        "`{what}` does not support {dtype} on this device[[ in {layer}]]",
        "x = x.float()                                            # for this operation; convert back with .to(dtype) afterwards\n"
        'model.float()                                            # on the CPU, keep the model in float32 or use torch.autocast("cpu")',
        rf'"(?P<what>[^"]+)" not implemented for \'(?P<dtype>{DTYPE})\'',
        r"(?P<what>\w+)\(\): (?:could not infer output dtype|Expected a floating point or complex tensor as input\. Got|input dtype should be either floating "
        r"point or complex dtypes\. Got) (?P<dtype>\w+)",
        r"(?P<what>[\w.]+): (?:Low precision dtypes not supported|Expected a floating point or complex tensor as input)\. Got (?P<dtype>\w+)",
    ),
    types=("RuntimeError", "NotImplementedError"),
    show_tensors=True,
    when=lambda failure, match: "loss" not in match["what"] and not _in_loss(failure),
    values=lambda _, match: {"dtype": _described(match["dtype"])},
)


numpy_has_no_bfloat16 = pattern_kind(
    "FE014",
    "numpy-has-no-bfloat16",
    """A bfloat16 tensor was converted to NumPy.
    The output of a model in bfloat16 or under autocast is converted to an array for a metric or a plot.
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.numpy.html""",
    Form(
        "`{tensor|x}` is {dtype}, which NumPy does not support",
        "{tensor|x}.detach().float().cpu().numpy()",
        r"Got unsupported ScalarType (?P<dtype>\w+)",
    ),
    types=("TypeError", "RuntimeError"),
    show_tensors=True,
    values=lambda failure, match: {
        "dtype": match["dtype"].lower(),
        **tensor_name(failure, lambda tensor: tensor.dtype == match["dtype"].lower()),
    },
)
