"""Failures of layers that expect another input size. The messages name the layer."""

import re

from flatout.diagnose.kind import Form, MessageMatch, pattern_kind, shape
from flatout.schema.failure import FailureRecord

SIZE = r"(?:torch\.Size\()?\[[-\d, x]*\]\)?"


def _channel_texts(_: FailureRecord, match: MessageMatch) -> dict[str, str]:
    sizes = re.findall(r"\d+", match["size"])
    fix = f"nn.Conv2d({match['got']}, ...)   # or convert the input to {match['wants']} channels"
    if sizes and sizes[-1] == match["wants"] != match["got"]:
        fix = "x = x.permute(0, 3, 1, 2)   # the channels are last (NHWC); torch expects them second"
    elif (match["wants"], match["got"]) == ("3", "1"):
        fix = "x = x.expand(-1, 3, -1, -1)   # grey images for a colour network, or nn.Conv2d(1, ...)"
    convolution = f"a convolution (weight {shape(match['weight'])})" if match["weight"] else ""
    return {"size": shape(match["size"]), "conv": convolution or match["conv"], "fix": fix}


convolution_input = pattern_kind(
    "FE021",
    "convolution-input",
    """A convolution got the wrong number of channels or dimensions.
    Grey images in a network for colour images or the reverse, images with channels last as in NumPy and PIL
    (NHWC), or an image without a batch dimension. The input's channels (its second size, NCHW) must equal
    `in_channels`.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Conv2d.html""",
    Form(
        "{layer|a convolution} expects {wants} channels and got {got} (input {size})",
        "{fix|nn.Conv2d(channels of the images, ...)   # or x.permute(0, 3, 1, 2), if the channels are last}",
        rf"Given (?:groups|transposed)=\w+, weight of size (?P<weight>{SIZE}), expected input(?P<size>{SIZE}) to have (?P<wants>\d+) "
        r"channels, but got (?P<got>\d+) channels",
    ),
    Form(
        "{conv|a convolution} got an input of {size} and expects {dims|another number of dimensions}",
        "x = x.unsqueeze(0)   # a single image: add the batch dimension",
        rf"Expected (?P<dims>.{{3,60}}?) input to (?P<conv>conv\w+), but got input of size: (?P<size>{SIZE})",
        rf"Expected \d-dimensional input for \d-dimensional weight (?P<weight>{SIZE}), but got \d-dimensional input of size (?P<size>{SIZE}) instead",
    ),
    show_tensors=True,
    values=_channel_texts,
)

batch_norm_width = pattern_kind(
    "FE022",
    "batch-norm-width",
    """Batch normalisation got the wrong number of channels.
    The layer before it was changed, or the layers are called in another order than they are defined.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html""",
    Form(
        "{layer|the normalisation} expects {wants} channels and got {got}",
        "nn.BatchNorm2d({got|channels of the input})",
        r"(?:running_mean|running_var|weight|bias) should contain (?P<got>\d+) elements not (?P<wants>\d+)",
        r"Expected weight to be a vector of size equal to the number of channels in input, but got weight of "
        r"shape \[(?P<wants>\d+)\] and input of shape \[\d+, (?P<got>\d+)",
    ),
    Form(
        "{layer|the normalisation} expects {dims} input and got {got} dimensions",
        "nn.BatchNorm1d for rows (NxC), BatchNorm2d for images (NxCxHxW), BatchNorm3d for volumes",
        r"expected (?P<dims>\w+(?: or \w+)?) input \(got (?P<got>\d+)D input\)",
    ),
    types=("RuntimeError", "ValueError"),
    show_tensors=True,
)

batch_norm_of_one = pattern_kind(
    "FE023",
    "batch-norm-of-one",
    """Batch normalisation got a batch of one.
    The last batch of an epoch has one sample (`len(dataset) % batch_size == 1`), or the model should be in
    `eval()` mode. In training it needs more than one value per channel to compute a variance.
    https://github.com/pytorch/pytorch/issues/4534""",
    Form(
        "{layer|a normalisation} got a batch of one[[ (batch {batch} of the loader)]], {size}, and cannot compute its variance",
        "DataLoader(..., drop_last=True)   # if the last batch of the epoch has one sample\nmodel.eval()                      # if this is not training",
        rf"Expected more than 1 (?:value per channel|spatial element) when training, got input size (?P<size>{SIZE})",
    ),
    types=("ValueError",),
    values=lambda _, match: {"size": shape(match["size"])},
)


def _width_texts(_: FailureRecord, match: MessageMatch) -> dict[str, str]:
    actual, expected = (shape(match[name]) if match[name] else "" for name in ("got", "wants"))
    if match["form"]:  # as many of the last sizes as the layer normalises
        actual = "x".join(actual.split("x")[-len(expected.split("x")) :])
    return {"got": actual, "wants": expected}


layer_width = pattern_kind(
    "FE027",
    "layer-width",
    """A normalisation, recurrent or attention layer got the wrong width.
    The tokenizer, embedding or feature set differs from the one the layer was written for, or batch and time
    are swapped.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html""",
    Form(
        "{layer|the layer} expects {wants} and got {got}",
        "build the layer for {got|the width of its input}, or check batch_first and the input tokens",
        rf"Given normalized_shape=(?P<wants>\[[\d, ]+\]), expected input with shape (?P<form>\[.*?\]), but got input of size ?(?P<got>{SIZE})",
        r"input\.size\(-1\) must be equal to input_size\. Expected (?P<wants>\d+), got (?P<got>\d+)",
        r"input has inconsistent input_size: got (?P<got>\d+),? expected (?P<wants>\d+)",
        r"was expecting embedding dimension of (?P<wants>\d+), but got (?P<got>\d+)",
        r"(?:For (?:un)?batched \w+-D input, hx|Expected hidden(?:\[\d\])? size) .{0,80}?(?P<wants>[\[(][\d, ]+[\])]).{0,20}?got (?P<got>[\[(][\d, ]+[\])])",
        r"Expected number of channels in input to be divisible by num_groups, but got input of shape (?P<got>\[[\d, ]+\]) and num_groups=(?P<wants>\d+)",
    ),
    Form(
        "{layer|the layer} got {got} dimensions",
        "x.unsqueeze(0)   # a single sequence: add the batch dimension",
        r"query should be unbatched 2D or batched 3D tensor but received (?P<got>\d+)-D",
        r"(?:LSTM|RNN|GRU): Expected input to be 2D or 3D, got (?P<got>\d+)D",
    ),
    Form(
        "the attention width is not a multiple of the number of heads",
        "embed_dim % num_heads == 0   # choose heads that divide the width",
        r"embed_dim must be divisible by num_heads",
    ),
    types=("RuntimeError", "ValueError", "AssertionError"),
    show_tensors=True,
    values=_width_texts,
)
