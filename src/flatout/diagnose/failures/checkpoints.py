"""Failures of writing and loading checkpoints."""

import re

from flatout.diagnose.kind import Diagnosis, Form, frame_matches, kind, match_message, pattern_kind
from flatout.schema.failure import FailureRecord

WRAPPERS = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "model.": "a wrapper called `model`",
}
LOADING_FAILED = r"Error\(s\) in loading state_dict for (?P<model>\w+):(?P<rest>.*)"
MAX_NAMED_KEYS = 3
LOADING_FRAMES = r"torch/(?:serialization|_weights_only_unpickler|hub|jit)|safetensors"
ATOMIC_SAVE = 'torch.save(state, path + ".part"); os.replace(path + ".part", path)   # next time: a kill leaves the old file intact'


def _keys(text: str, what: str) -> list[str]:
    match = re.search(
        rf"{what} key\(s\) in state_dict: (.*?)\.(?:\s*$|\s*\n|\s+(?=Unexpected|size mismatch))",
        text + "\n",
        re.DOTALL,
    )
    return re.findall(r'"([^"]+)"', match[1]) if match else []


def _first_keys(keys: list[str]) -> str:
    others = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
    return ", ".join(f"`{key}`" for key in keys[:MAX_NAMED_KEYS]) + others


@kind("FE090", "checkpoint-keys")
def checkpoint_keys(failure: FailureRecord) -> Diagnosis | None:
    """The names in the checkpoint do not match the model.

    Why it happens:
        The model was saved inside a wrapper: DataParallel and DDP prefix each name with `module.`,
        torch.compile with `_orig_mod.`. Or the file contains more than the weights (`checkpoint["model"]`),
        or the model has changed since.
    How to fix it:
        Remove the prefix when loading, and save `model.module.state_dict()` next time. Use `strict=False` if
        some parts are meant to be new.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict"""
    match = match_message(failure, LOADING_FAILED)
    if match is None:
        return None
    missing, unexpected = _keys(match["rest"], "Missing"), _keys(match["rest"], "Unexpected")
    if not missing and not unexpected:
        return None
    for prefix, origin in WRAPPERS.items():
        inner = prefix.rstrip(".")
        if _is_prefixed(unexpected, missing, prefix):
            return Diagnosis(
                f"every name in the checkpoint has `{prefix}`, and no name in the model does: it was saved inside {origin}",
                f'state = {{name.replace("{prefix}", "", 1): value for name, value in state.items()}}\n'
                f"torch.save(model.{inner}.state_dict(), path)   # next time",
            )
        if _is_prefixed(missing, unexpected, prefix):
            return Diagnosis(
                f"every name of the model has `{prefix}`, and no name in the checkpoint does: the model is inside {origin}",
                f"model.{inner}.load_state_dict(state)   # loads into the model inside the wrapper",
            )
    nested = [
        key for key in ("state_dict", "model", "model_state_dict", "net", "weights") if key in unexpected
    ]
    if nested and missing:
        return Diagnosis(
            f"the checkpoint holds more than the weights: they are under `{nested[0]}`",
            f'model.load_state_dict(checkpoint["{nested[0]}"])',
        )
    differences = [f"the checkpoint lacks {_first_keys(missing)}"] if missing else []
    differences += [f"the model lacks {_first_keys(unexpected)}"] if unexpected else []
    return Diagnosis(
        f"{'; '.join(differences)} ({match['model']})",
        "model.load_state_dict(state, strict=False)   # if these are meant to be new; it returns the names that did not match\n"
        "print(sorted(state)[:10], [name for name, _ in model.named_parameters()][:10])",
    )


def _is_prefixed(keys: list[str], bare_keys: list[str], prefix: str) -> bool:
    """Whether every key has the prefix, and some of the others are the same names without it."""
    return all(prefix in key for key in keys) and bool(
        {key.replace(prefix, "", 1) for key in keys} & set(bare_keys)
    )


@kind("FE091", "checkpoint-sizes")
def checkpoint_sizes(failure: FailureRecord) -> Diagnosis | None:
    """A parameter has a different size in the checkpoint.

    Why it happens:
        The number of classes, the vocabulary or the width differs from that of the saved model.
    How to fix it:
        Build the model with the settings it was saved with. For a new head, remove its entries:
        `state.pop("fc.weight")`. `strict=False` alone does not help.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict"""
    match = match_message(failure, LOADING_FAILED)
    size = r"(?:torch\.Size\()?\[?([\d, ]*)\]?\)?"
    sizes = re.findall(
        rf"size mismatch for ([\w.]+): copying a param with shape {size} from checkpoint, the shape in current model is {size}",
        match["rest"] if match else "",
    )
    if not sizes:
        return None
    name, stored, current = sizes[0]
    others = f" (and {len(sizes) - 1} more)" if len(sizes) > 1 else ""
    return Diagnosis(
        f"`{name}` is {stored.replace(', ', 'x')} in the checkpoint and {current.replace(', ', 'x')} in the model{others}",
        "state = {name: value for name, value in state.items() if value.shape == model.state_dict()[name].shape}\n"
        "model.load_state_dict(state, strict=False)   # parameters of another size keep their new values",
    )


@kind("FE093", "broken-checkpoint")
def broken_checkpoint(failure: FailureRecord) -> Diagnosis | None:
    """The checkpoint file is damaged or not a checkpoint.

    Why it happens:
        The program was killed while it wrote, the disk was full, or a download was interrupted or returned an
        HTML page or a Git LFS pointer.
    How to fix it:
        `ls -l` and `file` show what the file is. Use the previous checkpoint or download again (`git lfs
        pull`). Write to a temporary file and rename it, so that a kill leaves the old file intact.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/serialization.html"""
    match = match_message(
        failure,
        r"PytorchStreamReader failed (?:reading (?:zip archive|file \S+?)|locating file \S+?):? ?(?P<why>[\w .]+)",
        r"invalid load key, (?P<key>'.{1,6}?')\.",
        r"(?P<empty>Ran out of input)",
        r"(?:negative seek value -\d+|\[Errno 22\] Invalid argument)$"
        if _opens_an_archive(failure)
        else r"(?!)",
        r"$",
        r"unexpected EOF, expected \d+ more bytes\. The file might be corrupted",
        r"Weights only load failed\..*?(?:Unsupported operand (?P<number>\d+)|persistent_load)",
        r"unpickling stack underflow",
        r"pickle data was truncated",
        r"File is not a zip file",
        r"Invalid magic number; corrupt file\?",
        r".{0,60}Error while deserializing header: (?P<why>\w+)",
        types=("RuntimeError", "UnpicklingError", "EOFError", "BadZipFile", "OSError", "ValueError"),
    )
    if match is None:
        return None
    error, in_loading = match.error, frame_matches(failure, LOADING_FRAMES)
    class_names, message = set(error.class_names), error.message
    ambiguous = message.startswith(
        ("Ran out of input", "unpickling stack", "pickle data", "invalid load key", "File is not")
    )
    if (
        (class_names and not {"RuntimeError", "UnpicklingError"} & class_names and not in_loading)
        or (not message and "EOFError" not in class_names)
        or (ambiguous and error.frames and not in_loading)
    ):
        return None
    key = match["key"].strip("'") or (chr(match.number("number")) if 0 < match.number("number") < 128 else "")
    content_by_first_character = {
        "<": "the file begins like HTML: a web page was saved instead of the checkpoint",
        "v": "the file begins like a Git LFS pointer: the checkpoint itself was not fetched",
        "{": "the file begins like JSON: an error message or an index was saved instead of the checkpoint",
    }
    why = f" ({match['why'].strip()})" if match["why"].strip() else ""
    return Diagnosis(
        "the file is empty or ends at once"
        if match["empty"] or not message
        else content_by_first_character.get(key, f"the file is truncated or is not a torch checkpoint{why}"),
        f"ls -l checkpoint.pt; file checkpoint.pt; head -c 200 checkpoint.pt   # shows what the file is (git lfs pull)\n{ATOMIC_SAVE}",
    )


def _opens_an_archive(failure: FailureRecord) -> bool:
    """Whether torch was opening an archive. For a file that is too short it reports only a failed seek."""
    return any(error.frames and "PyTorchFileReader" in error.frames[-1].text for error in failure.chain)


writing_failed = pattern_kind(
    "FE096",
    "writing-failed",
    """The checkpoint could not be written completely.
    The disk, the quota or the file size limit is full. torch reports it as a position in the archive, not as a
    full disk. The file's previous content is lost.
    https://github.com/pytorch/pytorch/issues/112196""",
    Form(
        "the checkpoint could not be written completely: the disk, a quota or the file size limit is full; the old file is lost",
        f"df -h . ; df -i . ; ulimit -f   # free space, free files, largest file size\n{ATOMIC_SAVE}",
        r"\[enforce fail at inline_container\.cc:\d+\] ?\.? ?(?:PytorchStreamWriter failed|unexpected pos \d+ vs \d+)",
        r"PytorchStreamWriter failed (?:writing|closing|in)",
        r"(?P<disk>\[Errno (?:28|122|27)\] .+)",
    ),
    types=("RuntimeError", "OSError"),
    when=lambda failure, match: not match["disk"] or frame_matches(failure, "torch/serialization"),
)
