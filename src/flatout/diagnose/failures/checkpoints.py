"""Failures of writing and loading checkpoints."""

from __future__ import annotations

import re

from flatout.diagnose.kind import RUNTIME, Diagnosis, kind, match_message
from flatout.schema.failure import FailureRecord

WRAPPERS = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "model.": "a wrapper called `model`",
}
STATE = r"Error\(s\) in loading state_dict for (?P<model>\w+):(?P<rest>.*)"
LISTED = 3


def _keys(text: str, what: str) -> list[str]:
    found = re.search(
        rf"{what} key\(s\) in state_dict: (.*?)\.(?:\s*$|\s*\n|\s+(?=Unexpected|size mismatch))",
        text + "\n",
        re.DOTALL,
    )
    return re.findall(r'"([^"]+)"', found[1]) if found else []


def _some(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys[:LISTED]) + (
        f" and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    )


@kind("FE090", "checkpoint-keys")
def checkpoint_keys(failure: FailureRecord) -> Diagnosis | None:
    """The names in the checkpoint do not match the model.

    What:
        `load_state_dict` needs exactly the names that the model has.
    Why it happens:
        The model was saved inside a wrapper: DataParallel and DDP prefix each name with `module.`,
        torch.compile with `_orig_mod.`. Or the file contains more than the weights (`checkpoint["model"]`),
        or the model has changed since.
    How to fix it:
        Remove the prefix when loading, and save `model.module.state_dict()` next time. Use `strict=False` if
        some parts are meant to be new.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict
    """
    found = match_message(failure, RUNTIME, STATE)
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
                    return Diagnosis(
                        f"every name in the checkpoint has `{prefix}`, and no name in the model does: it was saved inside {origin}",
                        f'state = {{name.replace("{prefix}", "", 1): value for name, value in state.items()}}\n'
                        f"torch.save(model.{prefix.rstrip('.')}.state_dict(), path)   # next time",
                    )
                return Diagnosis(
                    f"every name of the model has `{prefix}`, and no name in the checkpoint does: the model is inside {origin}",
                    f"model.{prefix.rstrip('.')}.load_state_dict(state)   # loads into the model inside the wrapper",
                )
    nested = [
        key
        for key in unexpected
        if key in ("state_dict", "model", "model_state_dict", "net", "weights", "epoch", "optimizer")
    ]
    if nested and missing:
        inner = next((key for key in nested if key not in ("epoch", "optimizer")), nested[0])
        return Diagnosis(
            f"the checkpoint holds more than the weights: they are under `{inner}`",
            f'model.load_state_dict(checkpoint["{inner}"])',
        )
    said = "; ".join(
        filter(
            None,
            (
                f"the checkpoint lacks {_some(missing)}" if missing else "",
                f"the model lacks {_some(unexpected)}" if unexpected else "",
            ),
        )
    )
    return Diagnosis(
        f"{said} ({found['model']})",
        "model.load_state_dict(state, strict=False)   # if these are meant to be new; it returns the names that did not match\n"
        "print(sorted(state)[:10], [name for name, _ in model.named_parameters()][:10])",
    )


@kind("FE091", "checkpoint-sizes")
def checkpoint_sizes(failure: FailureRecord) -> Diagnosis | None:
    """A parameter has a different size in the checkpoint.

    What:
        A parameter has one size in the file and another in the model. `strict=False` does not help.
    Why it happens:
        The number of classes, the vocabulary or the width differs from that of the saved model.
    How to fix it:
        Build the model with the settings it was saved with. For a new head, remove its entries:
        `state.pop("fc.weight")`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict
    """
    found = match_message(failure, RUNTIME, STATE)
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
    return Diagnosis(
        f"`{name}` is {saved.replace(', ', 'x')} in the checkpoint and {now.replace(', ', 'x')} in the model{more}",
        "state = {name: value for name, value in state.items() if value.shape == model.state_dict()[name].shape}\n"
        "model.load_state_dict(state, strict=False)   # parameters of another size keep their new values",
    )


@kind("FE092", "rejected-by-weights-only")
def rejected_by_weights_only(failure: FailureRecord) -> Diagnosis | None:
    """`weights_only=True` rejects the checkpoint.

    What:
        `torch.load` reads only tensors and plain containers (`weights_only=True`, the default since torch
        2.6). The file contains something else, and unpickling it could run arbitrary code.
    Why it happens:
        Settings, a whole model (`torch.save(model)`), NumPy numbers or a custom optimizer were saved together
        with the weights.
    How to fix it:
        If you trust the file's author, allow the named class or use `weights_only=False`. Save
        `model.state_dict()` and plain values.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
    """
    found = match_message(
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
        return Diagnosis(
            "the checkpoint contains something that `weights_only=True` does not load",
            "torch.load(path, weights_only=False)   # ONLY for a file whose author you trust: it can run arbitrary code\n"
            "torch.save(model.state_dict(), path)   # next time: only weights and plain values",
        )
    module, _, short = name.rpartition(".")
    imported = f"from {module} import {short}\n" if module not in ("", "__main__") else ""
    return Diagnosis(
        f"the checkpoint contains `{name}`, which `weights_only=True` does not load",
        f"{imported}torch.serialization.add_safe_globals([{short}])   # if you trust this class\n"
        "torch.load(path, weights_only=False)                     # ONLY for a file whose author you trust: it can run arbitrary code",
    )


@kind("FE094", "checkpoint-of-a-gpu")
def checkpoint_of_a_gpu(failure: FailureRecord) -> Diagnosis | None:
    """The checkpoint was saved on a device that is not available.

    What:
        `torch.load` puts each tensor on the device it was saved on, and that device is not available.
    Why it happens:
        Tensors record their device, and the file was written on a machine with a GPU.
    How to fix it:
        `torch.load(path, map_location="cpu")`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.load.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"Attempting to deserialize object on a (?P<device>\w+) device but torch\.(?:cuda|\w+)\.is_available\(\) is False",
        r"don't know how to restore data location of (?:torch\.storage\.)?\w+ \(tagged with (?P<device>[\w:]+)\)",
    )
    if found is None:
        return None
    return Diagnosis(
        f"the checkpoint was saved on {found['device']}, and this machine has no such device",
        'torch.load(path, map_location="cpu")   # then model.to(device)',
    )


@kind("FE095", "optimizer-of-another-model")
def optimizer_of_another_model(failure: FailureRecord) -> Diagnosis | None:
    """The optimizer's saved state belongs to other parameters.

    What:
        An optimizer's state follows the order and groups of its parameters, and these parameters differ.
    Why it happens:
        Layers were added or frozen since, or the parameter groups are built differently (weight decay for
        some).
    How to fix it:
        Build the optimizer as it was built when it was saved, or create a new one and load only the model.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html
    """
    found = match_message(
        failure,
        ("ValueError",),
        r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group(?P<size>)",
        r"loaded state dict has a different number of parameter groups(?P<groups>)",
    )
    if found is None:
        return None
    what = (
        "a different number of parameter groups"
        if "different number" in found.thrown.message
        else "a different number of parameters in a group"
    )
    return Diagnosis(
        f"the saved optimizer has {what} than this one",
        "build the optimizer as it was built when it was saved (same layers, same frozen parameters, same groups)\n"
        "model.load_state_dict(checkpoint['model'])   # and create a new optimizer",
    )
