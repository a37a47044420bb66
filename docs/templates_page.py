"""docs/templates.md, made from the examples themselves: each template in plain PyTorch beside the same with the Loop; docs/generate.py writes it."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

EXAMPLES = Path(__file__).parent.parent / "examples"
ADDRESS = "https://github.com/flatout-dev/flatout/blob/main/examples"  # pages of the site cannot link files outside docs/
ALONE = ("tensors",)
PAIRS = ("linear", "cnn", "resnet18", "gpt")
HEAD = """# Templates

Made by `docs/generate.py` from the examples themselves. Each is a program to start from: in plain PyTorch, for `flatout run python examples/gpt.py`, and
[with the Loop](../howto/loop.md). Both print the same numbers, to the last digit. What is shown is where they differ; data and model are the same, in
[examples/](https://github.com/flatout-dev/flatout/tree/main/examples).
"""


def page() -> str:
    return "\n".join([HEAD, *map(_alone, ALONE), *map(_pair, PAIRS)])


def _alone(name: str) -> str:
    return f"## {_title(name)}\n\n[{name}.py]({ADDRESS}/{name}.py)\n\n{_fenced(_main(name))}\n"


def _pair(name: str) -> str:
    plain, loop = _differing(_main(name), _main(f"{name}_loop"))
    cells = f"<tr><td>\n\n{_fenced(plain)}\n\n</td><td>\n\n{_fenced(loop)}\n\n</td></tr>"
    heads = f'<tr><th><a href="{ADDRESS}/{name}.py">{name}.py</a></th><th><a href="{ADDRESS}/{name}_loop.py">{name}_loop.py</a></th></tr>'
    return f"## {_title(name)}\n\n<table>\n{heads}\n{cells}\n</table>\n"


def _title(name: str) -> str:
    return str(ast.get_docstring(_parsed(name)) or name).splitlines()[0].rstrip(".")


def _parsed(name: str) -> ast.Module:
    return ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))


def _main(name: str) -> list[str]:
    """The lines of ``main`` behind the one that reads the arguments."""
    main = next(
        node for node in _parsed(name).body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    arguments = next(
        node for node in main.body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("args =")
    )
    lines = (
        (EXAMPLES / f"{name}.py")
        .read_text(encoding="utf-8")
        .splitlines()[arguments.end_lineno : main.end_lineno]
    )
    return dedent("\n".join(lines)).strip("\n").splitlines()


def _differing(plain: list[str], loop: list[str]) -> tuple[list[str], list[str]]:
    """Without the lines that both end with."""
    same = 0
    while same < min(len(plain), len(loop)) - 1 and plain[-1 - same] == loop[-1 - same]:
        same += 1
    return plain[: len(plain) - same], loop[: len(loop) - same]


def _fenced(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])
