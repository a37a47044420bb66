"""The front of all benchmarks, from the root of the repository.

python -m bench                 lists them, with what each one measures
python -m bench NAME [ARGS]     runs one; --help shows its options
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benchmarks() -> dict[str, str]:
    """The scripts of this folder that can be run, with the first line of their docstrings."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path != Path(__file__).resolve() and '__name__ == "__main__"' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return {**found, "gpu/all": "Runs every benchmark of a GPU in one call."}


def main() -> int:
    known = benchmarks()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {what}" for name, what in known.items()))
        return 0
    name = sys.argv[1]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        print(
            f"there is no benchmark {name!r}{f'; did you mean {near[0]}?' if near else ''} `python -m bench` lists all.",
            file=sys.stderr,
        )
        return 2
    script = HERE / f"{name}.py"
    sys.argv[:2] = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
