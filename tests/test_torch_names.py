"""The private names of torch that the source leans on stand in one table, and exist in the installed torch.

`private_torch_names.txt` lists them. After a change: `python tests/test_torch_names.py` writes it again.
"""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from test_arrows import spelled_out

TABLE = Path(__file__).with_name("private_torch_names.txt")
SOURCE = Path(__file__).parents[1] / "src" / "flatout"
# Only in builds with CUDA, or with torch.distributed.
OF_SOME_BUILDS = ("torch._C._cuda", "torch._C._host", "torch._C._distributed", "torch.distributed.")


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_in(source):
    """The private names of torch in a source text, imported or spelled in full; the longest of a chain."""
    tree = ast.parse(source)
    local = {"torch": "torch"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                local[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    local[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found.add(alias.name)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            _, held, after = spelled_out(node).rpartition(".torch.")  # context.torch, self.torch
            first, _, rest = (f"torch.{after}" if held else spelled_out(node)).partition(".")
            if first in local and rest:
                found.add(_without_dunders(f"{local[first]}.{rest}"))
    return {name for name in found if is_private(name)}


def _without_dunders(name):
    return name.partition(".__")[0]


def in_source():
    return sorted(set().union(*(names_in(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py"))))


def exists(name):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


def test_the_table_lists_every_private_name():
    assert TABLE.read_text(encoding="utf-8").split() == in_source()


def test_every_name_exists_in_this_torch():
    pytest.importorskip("torch")
    missing = [
        name
        for name in TABLE.read_text(encoding="utf-8").split()
        if not name.startswith(OF_SOME_BUILDS) and not exists(name)
    ]
    assert missing == []


def test_names_are_found_where_they_are_imported_and_spelled():
    source = (
        "import torch\nfrom torch._dynamo import config as c\nfrom torch.utils import _pytree as tree\n"
        "def f(self):\n    torch._C._x.y(c.disable, tree.tree_map, torch.nn.Linear, torch.__version__)\n"
        "    return self.torch._VF.lstm\n"
    )
    assert names_in(source) == {
        "torch._C._x.y",
        "torch._VF.lstm",
        "torch._dynamo.config",
        "torch._dynamo.config.disable",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_map",
    }
    assert not exists("torch._C._no_such_name")


if __name__ == "__main__":
    TABLE.write_text("\n".join(in_source()) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(in_source())} names\n")
