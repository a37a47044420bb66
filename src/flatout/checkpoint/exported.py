"""Export a rescued state as ordinary files: one ``state_dict`` each.

torch loads them with ``weights_only=True``.

    model.pt, netD.pt, ...         of a module; the same tensors in model.safetensors
    optimizer.pt, scheduler.pt     for their load_state_dict
    tensors.pt                     weights of the script that are in no module, by their names
    random.pt                      the states of the random generators
"""

import os
import re
import shutil
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.checkpoint.random_states import setter_arguments
from flatout.checkpoint.tensors import write_tensors
from flatout.schema.errors import StorageError, UsageError, first_line

LOAD_ORDER = ("modules", "optimizers", "schedulers", "scalers")


@dataclass(frozen=True)
class Exported:
    """The ``files`` written, and the ``lines`` of Python that load them."""

    files: list[str]
    lines: list[str]


def export(
    torch: ModuleType, state: Mapping[str, Any], code_names: Mapping[str, str], folder: Path
) -> Exported:
    """Write ``state`` into a new folder. ``code_names``: the script's name of each object.

    Raises UsageError if the folder exists and is not empty, and StorageError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists. Name a new folder: --to {folder}2.")
    unfinished = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        exported = _write(torch, state, code_names, unfinished, folder)
        os.rename(unfinished, folder)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a disk is full
        why = getattr(error, "strerror", None) or first_line(error)
        raise StorageError(
            f"cannot write {folder}: {why}. Free some space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return exported


def _write(
    torch: ModuleType, state: Mapping[str, Any], code_names: Mapping[str, str], unfinished: Path, folder: Path
) -> Exported:
    files: list[str] = []
    lines = ["import torch"]

    def write(name: str, thing: object) -> str:
        file = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.pt"
        torch.save(thing, unfinished / file)
        files.append(file)
        return f"torch.load({str(folder / file)!r}, weights_only=True)"

    for kind in LOAD_ORDER:
        for name, object_state in state.get(kind, {}).items():
            if kind == "modules":
                tensors = {
                    key: value
                    for key, value in object_state["state"].items()
                    if isinstance(value, torch.Tensor)
                }
                loaded = write(name, _module_state(object_state))
                files.append(f"{files[-1].removesuffix('.pt')}.safetensors")
                write_tensors(unfinished / files[-1], tensors)
            else:
                loaded = write(name, _plain(torch, object_state))
            lines.append(f"{code_names.get(name, name)}.load_state_dict({loaded})")
    if state.get("tensors"):
        loaded = write("tensors", _plain(torch, state["tensors"]))
        lines.append(f"weights = {loaded}  # by name: {', '.join(list(state['tensors'])[:6])}")
    if state.get("random"):
        lines.append(
            f"torch.set_rng_state({write('random', _plain(torch, setter_arguments(torch, state['random'])))}['torch'])"
        )
    return Exported(files, lines)


def _module_state(module_state: Mapping[str, Any]) -> Any:
    state: Any = OrderedDict(module_state["state"])
    vars(state)["_metadata"] = OrderedDict(
        (prefix, {"version": version}) for prefix, version in module_state["versions"].items()
    )
    return state


def _plain(torch: ModuleType, value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(torch, key): _plain(torch, part) for key, part in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(torch, part) for part in value)
    if isinstance(value, (deque, range)):
        return [_plain(torch, part) for part in value]
    if isinstance(value, frozenset):
        return set(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value
