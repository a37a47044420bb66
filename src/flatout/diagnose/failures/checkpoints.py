"""Failures of saving and loading."""

from __future__ import annotations

import re

from flatout.diagnose.kind import RUNTIME, Answer, hit, kind
from flatout.plan.failure import FailureRecord

WRAPPERS = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "model.": "a wrapper called `model`",
}
STATE = r"Error\(s\) in loading state_dict for (?P<model>\w+):(?P<rest>.*)"
LISTED = 3


def _keys(text: str, what: str) -> list[str]:
    found = re.search(rf"{what} key\(s\) in state_dict: (.*?)\.(?:\s*$|\s*\n|\s+(?=Unexpected|size mismatch))", text + "\n", re.DOTALL)
    return re.findall(r'"([^"]+)"', found[1]) if found else []


def _some(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys[:LISTED]) + (f" and {len(keys) - LISTED} more" if len(keys) > LISTED else "")


@kind("FE090", "checkpoint-keys")
def checkpoint_keys(failure: FailureRecord) -> Answer | None:
    """A checkpoint whose names are not those of the model.

    What:
        `load_state_dict` wants exactly the names that the model has.
    Why it happens:
        The model was saved inside a wrapper (DataParallel and DDP put `module.` before each name, torch.compile `_orig_mod.`), the file holds
        more than the weights (`checkpoint["model"]`), or the model has changed since.
    How to mend it:
        Take the prefix away as it is loaded, and save `model.module.state_dict()` next time; `strict=False` where parts are meant to be new.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict
    """
    found = hit(failure, RUNTIME, STATE)
    if found is None:
        return None
    missing, unexpected = _keys(found["rest"], "Missing"), _keys(found["rest"], "Unexpected")
    if not missing and not unexpected:
        return None
    for saved, wanted, verb in ((unexpected, missing, "has"), (missing, unexpected, "lacks")):
        for prefix, origin in WRAPPERS.items():
            stripped = {key.replace(prefix, "", 1) for key in saved if prefix in key}
            if saved and len(stripped) == len(saved) and (stripped & set(wanted)):
                if verb == "has":
                    return Answer(
                        f"every name in the checkpoint has `{prefix}`, and the model's have not: it was saved inside {origin}",
                        f'state = {{name.replace("{prefix}", "", 1): value for name, value in state.items()}}\n'
                        f"torch.save(model.{prefix.rstrip('.')}.state_dict(), path)   # next time",
                    )
                return Answer(
                    f"every name of the model has `{prefix}`, and the checkpoint's have not: the model is inside {origin}",
                    f"model.{prefix.rstrip('.')}.load_state_dict(state)   # the model inside the wrapper",
                )
    nested = [key for key in unexpected if key in ("state_dict", "model", "model_state_dict", "net", "weights", "epoch", "optimizer")]
    if nested and missing:
        inner = next((key for key in nested if key not in ("epoch", "optimizer")), nested[0])
        return Answer(f"the checkpoint is not the weights themselves: they lie in it under `{inner}`", f'model.load_state_dict(checkpoint["{inner}"])')
    said = "; ".join(filter(None, (f"the checkpoint lacks {_some(missing)}" if missing else "", f"the model lacks {_some(unexpected)}" if unexpected else "")))
    return Answer(
        f"{said} ({found['model']})",
        "model.load_state_dict(state, strict=False)   # where these are meant to be new; it returns what did not fit\n"
        "print(sorted(state)[:10], [name for name, _ in model.named_parameters()][:10])",
    )


@kind("FE091", "checkpoint-sizes")
def checkpoint_sizes(failure: FailureRecord) -> Answer | None:
    """A checkpoint of a model of another size.

    What:
        A parameter has one size in the file and another in the model. `strict=False` does not help against it.
    Why it happens:
        Another number of classes, another vocabulary, another width than at the time of saving.
    How to mend it:
        Make the model with the settings it was saved with; for a new head leave its entries out: `state.pop("fc.weight")`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict
    """
    found = hit(failure, RUNTIME, STATE)
    if found is None:
        return None
    sizes = re.findall(
        r"size mismatch for ([\w.]+): copying a param with shape (?:torch\.Size\()?\[?([\d, ]*)\]?\)? from checkpoint, the shape in current model is "
        r"(?:torch\.Size\()?\[?([\d, ]*)\]?\)?",
        found["rest"],
    )
    if not sizes:
        return None
    name, saved, now = sizes[0]
    more = f" (and {len(sizes) - 1} more)" if len(sizes) > 1 else ""
    return Answer(
        f"`{name}` is {saved.replace(', ', 'x')} in the checkpoint and {now.replace(', ', 'x')} in the model{more}",
        "state = {name: value for name, value in state.items() if value.shape == model.state_dict()[name].shape}\n"
        "model.load_state_dict(state, strict=False)   # what has another size stays new",
    )


@kind("FE092", "refused-by-weights-only")
def refused_by_weights_only(failure: FailureRecord) -> Answer | None:
    """A checkpoint with more in it than weights.

    What:
        `torch.load` reads only tensors and plain containers (`weights_only=True`, the default since torch 2.6); the file holds something else,
        and unpickling that could run any code.
    Why it happens:
        The settings, a whole model (`torch.save(model)`), NumPy numbers or an optimizer of one's own were saved together with the weights.
    How to mend it:
        Where you trust the file's author: allow the class that is named, or `weights_only=False`. Save `model.state_dict()` and plain values.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
    """
    found = hit(
        failure,
        ("UnpicklingError", "RuntimeError"),
        r"Weights only load failed\..*?(?:GLOBAL (?P<name>[\w.<>]+) was not an allowed global|Unsupported class (?P<kind>[\w.]+)"
        r"|(?P<blocked>whose module [\w.]+ is blocked)|but got <class '(?P<got>[\w.]+)'>)",
        r"Weights only load failed\.(?!.*(?:Unsupported operand|persistent_load)).*?WeightsUnpickler error:\s+(?!Check the documentation)\S(?P<other>)",
    )
    if found is None:
        return None
    name = found["name"] or found["kind"] or found["got"]
    if not name:
        return Answer(
            "the checkpoint holds something that `weights_only=True` does not load",
            "torch.load(path, weights_only=False)   # ONLY for a file whose author you trust: it can run any code\n"
            "torch.save(model.state_dict(), path)   # next time: weights and plain values alone",
        )
    module, _, short = name.rpartition(".")
    imported = f"from {module} import {short}\n" if module not in ("", "__main__") else ""
    return Answer(
        f"the checkpoint holds `{name}`, which `weights_only=True` does not load",
        f"{imported}torch.serialization.add_safe_globals([{short}])   # if you trust this class\n"
        "torch.load(path, weights_only=False)                     # ONLY for a file whose author you trust: it can run any code",
    )


@kind("FE093", "broken-checkpoint")
def broken_checkpoint(failure: FailureRecord) -> Answer | None:
    """A file that is no whole checkpoint.

    What:
        The file cannot be read as one of torch's: it is cut off, empty, or something else.
    Why it happens:
        The program was killed while it wrote, the disk was full, a download was broken off or brought a page of HTML or a pointer of Git LFS.
    How to mend it:
        `ls -l` and `file` show what it is. Take the checkpoint before it; download again (`git lfs pull`). Write beside and rename, so that a
        kill leaves the old file whole.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/serialization.html
    """
    found = hit(
        failure,
        ("RuntimeError", "UnpicklingError", "EOFError", "BadZipFile", "OSError", "ValueError"),
        r"PytorchStreamReader failed (?:reading (?:zip archive|file (?P<part>\S+?))|locating file (?P<part2>\S+?)):? ?(?P<why>[\w .]+)",
        r"invalid load key, (?P<key>'.{1,6}?')\.",
        r"Ran out of input",
        r"(?:negative seek value -\d+|\[Errno 22\] Invalid argument)$" if _opens_an_archive(failure) else r"(?!)",
        r"(?P<empty>)$",
        r"unexpected EOF, expected (?P<bytes>\d+) more bytes\. The file might be corrupted",
        r"Weights only load failed\..*?(?P<operand>Unsupported operand (?P<number>\d+)|persistent_load)",
        r"unpickling stack underflow",
        r"pickle data was truncated",
        r"File is not a zip file",
        r"(?P<magic>Invalid magic number; corrupt file\?)",
        r".{0,60}(?P<header>Error while deserializing header: (?P<why>\w+))",
    )
    if found is None:
        return None
    if found.thrown.names and not {"RuntimeError", "UnpicklingError"} & set(found.thrown.names) and not _loads(failure):
        return None
    if not found.thrown.message and "EOFError" not in found.thrown.names:
        return None
    if (
        found.thrown.message.startswith(("Ran out of input", "unpickling stack", "pickle data", "invalid load key", "File is not"))
        and found.thrown.frames
        and not _loads(failure)
    ):
        return None
    key = found["key"] or (repr(chr(int(found["number"]))) if found["number"] and int(found["number"]) < 128 else "")
    if found.thrown.message.startswith("Ran out of input") or not found.thrown.message:
        said = "the file is empty, or ends at once"
    elif key in ("'<'", "'v'", "'{'"):
        said = {
            "'<'": "the file begins like HTML: a page was saved in place of the checkpoint",
            "'v'": "the file begins like a pointer of Git LFS: the checkpoint itself was not fetched",
            "'{'": "the file begins like JSON: an error message or an index was saved in place of the checkpoint",
        }[key]
    else:
        said = "the file is cut off or is no checkpoint of torch's" + (f" ({found['why'].strip()})" if found["why"].strip() else "")
    return Answer(
        said,
        "ls -l checkpoint.pt; file checkpoint.pt; head -c 200 checkpoint.pt   # what is it? (git lfs pull)\n"
        'torch.save(state, path + ".part"); os.replace(path + ".part", path)   # next time: a kill leaves the old file whole',
    )


def _opens_an_archive(failure: FailureRecord) -> bool:
    """Of a file that is shorter than the end of an archive, torch only sees that it cannot go so far back."""
    return any(thrown.frames and "PyTorchFileReader" in thrown.frames[-1].text for thrown in failure.chain)


def _loads(failure: FailureRecord) -> bool:
    """Whether torch (or safetensors) was reading a file."""
    return any(
        re.search(r"torch[/\\](?:serialization|_weights_only_unpickler|hub|jit)|safetensors", frame.file) for thrown in failure.chain for frame in thrown.frames
    )


@kind("FE094", "checkpoint-of-a-gpu")
def checkpoint_of_a_gpu(failure: FailureRecord) -> Answer | None:
    """A checkpoint from a GPU, loaded where there is none.

    What:
        `torch.load` puts each tensor where it was saved, and that device is not here.
    Why it happens:
        Tensors remember their device; the file was written on a machine with a GPU.
    How to mend it:
        `torch.load(path, map_location="cpu")`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.load.html
    """
    found = hit(
        failure,
        RUNTIME,
        r"Attempting to deserialize object on a (?P<device>\w+) device but torch\.(?:cuda|\w+)\.is_available\(\) is False",
        r"don't know how to restore data location of (?:torch\.storage\.)?\w+ \(tagged with (?P<device>[\w:]+)\)",
    )
    if found is None:
        return None
    return Answer(
        f"the checkpoint was saved on {found['device']}, and there is no such device here", 'torch.load(path, map_location="cpu")   # then model.to(device)'
    )


@kind("FE095", "optimizer-of-another-model")
def optimizer_of_another_model(failure: FailureRecord) -> Answer | None:
    """An optimizer's state for other parameters.

    What:
        An optimizer's state belongs to the parameters in their order and groups, and these are others.
    Why it happens:
        Layers were added or frozen since, or the groups are made in another way (weight decay for some).
    How to mend it:
        Make the optimizer as it was made then; or begin it anew and load only the model.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html
    """
    found = hit(
        failure,
        ("ValueError",),
        r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group(?P<size>)",
        r"loaded state dict has a different number of parameter groups(?P<groups>)",
    )
    if found is None:
        return None
    what = "other groups of parameters" if "different number" in found.thrown.message else "another number of parameters in a group"
    return Answer(
        f"the saved optimizer has {what} than this one",
        "build the optimizer as it was built when it was saved (same layers, same frozen ones, same groups)\n"
        "model.load_state_dict(checkpoint['model'])   # and begin the optimizer anew",
    )


@kind("FE096", "writing-failed")
def writing_failed(failure: FailureRecord) -> Answer | None:
    """A checkpoint that could not be written to its end.

    What:
        `torch.save` wrote less than it wanted. What was in the file before is gone.
    Why it happens:
        The disk, the quota or the limit on a file's size is full; torch reports it as a position in the archive, not as a full disk.
    How to mend it:
        `df -h . ; df -i . ; ulimit -f`, remove old checkpoints, write beside and rename.
    Sources:
        https://github.com/pytorch/pytorch/issues/112196
    """
    found = hit(
        failure,
        ("RuntimeError", "OSError"),
        r"\[enforce fail at inline_container\.cc:\d+\] ?\.? ?(?:PytorchStreamWriter failed|unexpected pos (?P<at>\d+) vs (?P<wanted>\d+))",
        r"PytorchStreamWriter failed (?:writing|closing|in)",
        r"(?P<disk>\[Errno (?:28|122|27)\] .+)",
    )
    if found is None or (found["disk"] and not any("torch/serialization" in frame.file.replace("\\", "/") for frame in found.thrown.frames)):
        return None
    return Answer(
        "the checkpoint could not be written to its end: the disk, a quota or a limit of a file's size is full; the old file is gone",
        "df -h . ; df -i . ; ulimit -f   # room, files, largest file\n"
        'torch.save(state, path + ".part"); os.replace(path + ".part", path)   # next time: the old file stays until the new one is whole',
    )


@kind("FE097", "no-such-folder")
def no_such_folder(failure: FailureRecord) -> Answer | None:
    """A checkpoint for a folder that is not there.

    What:
        `torch.save` makes files, not folders.
    Why it happens:
        The folder was never made, or the program runs in another working directory than was thought.
    How to mend it:
        `os.makedirs(os.path.dirname(path), exist_ok=True)` before saving, best before training.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.save.html
    """
    found = hit(failure, RUNTIME, r"Parent directory (?P<folder>.{1,300}?) does not exist\.", r"File (?P<path>.{1,300}?) cannot be opened\.")
    if found is None:
        return None
    what = f"the folder {found['folder']} is not there" if found["folder"] else f"{found['path']} cannot be written"
    return Answer(what, "os.makedirs(os.path.dirname(path), exist_ok=True)   # before the training, so that it fails early")
