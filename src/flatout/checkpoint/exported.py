"""Export a rescued state as ordinary files: one ``state_dict`` each.

torch loads them with ``weights_only=True``.

    model.pt, netD.pt, ...         of a module; the same tensors in model.safetensors
    optimizer.pt, scheduler.pt     for their load_state_dict
    tensors.pt                     weights of the script that are in no module, by their names
    random.pt                      the states of the random generators
"""

from __future__ import annotations

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

from flatout.checkpoint.random_states import as_set
from flatout.checkpoint.tensors import write_tensors
from flatout.schema.errors import StorageError, UsageError, first_line

LOADED = ("modules", "optimizers", "schedulers", "scalers")  # in loading order


@dataclass(frozen=True)
class Exported:
    """The ``files`` written, and the ``lines`` of Python that load them."""

    files: list[str]
    lines: list[str]


def export(torch: ModuleType, state: Mapping[str, Any], spelled: Mapping[str, str], folder: Path) -> Exported:
    """Write ``state`` into a new folder. ``spelled``: the script's name of each object.

    Raises UsageError if the folder exists and is not empty, and StorageError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists. Name a new folder: --to {folder}2.")
    made = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    try:
        made.mkdir(parents=True)
        found = _write(torch, state, spelled, made, folder)
        os.rename(made, folder)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a disk is full
        why = getattr(error, "strerror", None) or first_line(error)
        raise StorageError(
            f"cannot write {folder}: {why}. Free some space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return found


def _write(
    torch: ModuleType, state: Mapping[str, Any], spelled: Mapping[str, str], made: Path, folder: Path
) -> Exported:
    files: list[str] = []
    lines = ["import torch"]

    def write(name: str, thing: object) -> str:
        file = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.pt"
        torch.save(thing, made / file)
        files.append(file)
        return f"torch.load({str(folder / file)!r}, weights_only=True)"

    for kind in LOADED:
        for name, held in state.get(kind, {}).items():
            if kind == "modules":
                tensors = {
                    key: value for key, value in held["state"].items() if isinstance(value, torch.Tensor)
                }
                loaded = write(name, _module_state(held))
                files.append(f"{files[-1].removesuffix('.pt')}.safetensors")
                write_tensors(made / files[-1], tensors)
            else:
                loaded = write(name, _plain(torch, held))
            lines.append(f"{spelled.get(name, name)}.load_state_dict({loaded})")
    if state.get("tensors"):
        loaded = write("tensors", _plain(torch, state["tensors"]))
        lines.append(f"weights = {loaded}  # by name: {', '.join(list(state['tensors'])[:6])}")
    if state.get("random"):
        lines.append(
            f"torch.set_rng_state({write('random', _plain(torch, as_set(torch, state['random'])))}['torch'])"
        )
    return Exported(files, lines)


def _module_state(held: Mapping[str, Any]) -> Any:
    found: Any = OrderedDict(held["state"])
    vars(found)["_metadata"] = OrderedDict(
        (prefix, {"version": version}) for prefix, version in held["versions"].items()
    )
    return found


def _plain(torch: ModuleType, value: Any) -> Any:
    """Convert to the types that torch loads with weights_only.

    Arrays become tensors, sequences become lists.
    """
    if isinstance(value, dict):
        return {_plain(torch, key): _plain(torch, each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(torch, each) for each in value)
    if isinstance(value, (deque, range)):
        return [_plain(torch, each) for each in value]
    if isinstance(value, frozenset):
        return set(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value
