"""The folders from which compilers load what they once compiled: code that runs in the program.

torch's own lies in a folder whose name everybody can guess, below the one for temporary files, and torch does not look whose it is (codecache.py). Where
such a folder is somebody else's, or others may write to it, the program gets a private one. Where it is the person's own it stays: what is warm there is
worth minutes. What the person has named in the environment is left alone.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flatout.plan.errors import StorageError
from flatout.plan.trust import distrusted, private_folder


def private_caches(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that a program is to be started with, and a sentence for each."""
    found, said = {}, []
    for variable, folder in _usual(environment).items():
        why = "" if variable in environment else distrusted(folder, group=True)
        if why:
            found[variable] = str(_own(variable.lower().removesuffix("_dir"), environment))
            said.append(f"compiled code is not taken from {folder}: {why}. It goes to {found[variable]}")
    return found, said


def _usual(environment: Mapping[str, str]) -> dict[str, str]:
    """Where each lies if nobody says otherwise (torch/_inductor/runtime/cache_dir_utils.py, triton/knobs.py, torch/utils/cpp_extension.py)."""
    home = os.path.expanduser("~")
    return {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", _user())),
            "TRITON_CACHE_DIR": os.path.join(environment.get("TRITON_HOME", home), ".triton", "cache"),
            "TORCH_EXTENSIONS_DIR": os.path.join(environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "torch_extensions")}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def _own(name: str, environment: Mapping[str, str]) -> Path:
    try:
        return private_folder(Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "flatout" / name)
    except StorageError:  # no home that can be written
        return Path(tempfile.mkdtemp(prefix="flatout-"))
