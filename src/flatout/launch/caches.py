"""Protect the compiler caches, whose contents run in the program.

torch's cache is a folder with a predictable name in the temporary folder, and torch does not check its owner
(codecache.py). If such a folder belongs to another user, or others can write to it, the program gets a
private one. The user's own folder stays: its warm cache is worth minutes. Folders named in the environment
are left unchanged.
"""

import getpass
import os
import re
import tempfile
from collections.abc import Mapping

from flatout.job.trust import distrusted, user_cache


def private_caches(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment variables for the program, and a sentence about each."""
    variables, messages = {}, []
    for variable, folder in _default_folders(environment).items():
        why = "" if variable in environment else distrusted(folder, group=True)
        if why:
            variables[variable] = str(user_cache(variable.lower().removesuffix("_dir"), environment))
            messages.append(f"ignoring the compiler cache in {folder}: {why}. Using {variables[variable]}")
    return variables, messages


def compiler_cache() -> str:
    """The folder of torch's compiler, which by default follows TMPDIR."""
    return _default_folders(os.environ)["TORCHINDUCTOR_CACHE_DIR"]


def _default_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """The default folders.

    Sources: torch/_inductor/runtime/cache_dir_utils.py, triton/knobs.py, torch/utils/cpp_extension.py."""
    home = os.path.expanduser("~")
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(
            tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", _user())
        ),
        "TRITON_CACHE_DIR": os.path.join(environment.get("TRITON_HOME", home), ".triton", "cache"),
        "TORCH_EXTENSIONS_DIR": os.path.join(
            environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "torch_extensions"
        ),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"
