"""explanation/packages.md, made from the source: which process runs which package, and which imports which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import flatout

HOME = Path(flatout.__file__).parent
# Words of a package's "Runs in:" line, by the process that they mean.
PROCESSES = {
    "Terminal": (
        "the flatout command, with the launcher and the supervisor that it becomes",
        r"every process|flatout command|terminal|`flatout \w+`|supervisor|gate in a child",
    ),
    "Program": ("your program, in each of its Python processes and ranks", r"every process|user's program"),
    "Library": (
        "a script of yours that imports flatout",
        r"every process|flatout\.Loop|a script that imports",
    ),
    "Nodes": ("other machines of a job or a search", r"every process|other nodes|each node"),
}
BOX_W, BOX_H, GAP_X, GAP_Y = 104, 28, 22, 46
HEAD = """# Packages

Made from the source while the site is built. [Architecture](architecture.md) says how the packages work together.
"""


def packages() -> list[str]:
    return sorted(path.parent.name for path in HOME.glob("*/__init__.py"))


def docstring(package: str) -> str:
    return ast.get_docstring(ast.parse((HOME / package / "__init__.py").read_text(encoding="utf-8"))) or ""


def runs_in(package: str) -> list[str]:
    """The processes that run a package, from the first lines of its `__init__.py`."""
    line = docstring(package).partition("Runs in:")[2].partition("Imports:")[0]
    return [name for name, (_, words) in PROCESSES.items() if re.search(words, line)]


def first_sentence(package: str) -> str:
    return " ".join(docstring(package).partition("\n\n")[0].split())


def imports() -> dict[str, set[str]]:
    """The packages that each package imports, type checking apart."""
    names, found = set(packages()), {name: set[str]() for name in packages()}
    for package in found:
        for path in (HOME / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatout."):
                    found[package].add((node.module or "").split(".")[1])
        found[package] = (found[package] & names) - {package}
    return found


def levels(arrows: dict[str, set[str]]) -> dict[str, int]:
    """How high a package stands: one more than the highest that it imports."""
    found: dict[str, int] = {}
    while len(found) < len(arrows):
        for name, others in arrows.items():
            if name not in found and others <= set(found):
                found[name] = 1 + max((found[other] for other in others), default=-1)
    return found


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no path of others replaces."""

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(other) for other in arrows[name]))

    return {
        name: {
            other for other in others if not any(other in reached(between) for between in others - {other})
        }
        for name, others in arrows.items()
    }


def picture_of_packages() -> str:
    arrows = imports()
    level = levels(arrows)
    rows = [[name for name in sorted(level) if level[name] == n] for n in range(max(level.values()) + 1)]
    width = max(len(row) for row in rows) * (BOX_W + GAP_X) + GAP_X
    height = len(rows) * (BOX_H + GAP_Y)
    at = {
        name: (
            (width - len(row) * (BOX_W + GAP_X) + GAP_X) / 2 + place * (BOX_W + GAP_X),
            height - (n + 1) * (BOX_H + GAP_Y) + GAP_Y / 2,
        )
        for n, row in enumerate(rows)
        for place, name in enumerate(row)
    }
    shapes = []
    for name, others in reduced(arrows).items():
        for other in sorted(others):
            between = [rows[n] for n in range(level[name] - 1, level[other], -1)]
            shapes.append(
                f'<path d="{_way(at[name], at[other], [[at[box] for box in row] for row in between])}" '
                f'fill="none" stroke="currentColor" stroke-opacity=".45"><title>{name} imports {other}</title></path>'
            )
    for name, (x, y) in at.items():
        shapes.append(_box(name, x, y))
    return _svg(width, height, "Which package imports which", shapes)


def _way(start: tuple[float, float], end: tuple[float, float], rows: list[list[tuple[float, float]]]) -> str:
    """A line down from one box to another, through the gaps between the boxes of the rows on its way."""
    x, y = start[0] + BOX_W / 2, start[1] + BOX_H
    path, goal = f"M{x:.0f},{y:.0f}", end[0] + BOX_W / 2
    for row in rows:
        left = [box[0] - GAP_X / 2 for box in row]
        gap = min([*left, left[-1] + BOX_W + GAP_X], key=lambda gap: abs(gap - (x + goal) / 2))
        top, bottom = row[0][1], row[0][1] + BOX_H
        path += (
            f" C{x:.0f},{(y + top) / 2:.0f} {gap:.0f},{(y + top) / 2:.0f} {gap:.0f},{top:.0f} V{bottom:.0f}"
        )
        x, y = gap, bottom
    middle = (y + end[1]) / 2
    return path + f" C{x:.0f},{middle:.0f} {goal:.0f},{middle:.0f} {goal:.0f},{end[1]:.0f}"


def picture_of_processes() -> str:
    columns = {process: [name for name in packages() if process in runs_in(name)] for process in PROCESSES}
    width = len(columns) * (BOX_W + 2 * GAP_X)
    height = 40 + max(map(len, columns.values())) * (BOX_H + 8)
    shapes = []
    for n, (process, names) in enumerate(columns.items()):
        x = n * (BOX_W + 2 * GAP_X) + GAP_X
        shapes.append(
            f'<text x="{x + BOX_W / 2}" y="22" text-anchor="middle" font-weight="600" fill="currentColor">{process}</text>'
        )
        shapes += [_box(name, x, 36 + row * (BOX_H + 8)) for row, name in enumerate(names)]
    return _svg(width, height, "Which process runs which package", shapes)


def _box(name: str, x: float, y: float) -> str:
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_W}" height="{BOX_H}" rx="5" fill="var(--md-code-bg-color, #f5f5f5)" '
        f'stroke="currentColor" stroke-opacity=".6"/><text x="{x + BOX_W / 2:.0f}" y="{y + BOX_H / 2 + 4:.0f}" '
        f'text-anchor="middle" font-size="13" fill="currentColor">{name}</text>'
    )


def _svg(width: float, height: float, label: str, shapes: list[str]) -> str:
    return (
        f'<div style="overflow-x: auto"><svg viewBox="0 0 {width:.0f} {height:.0f}" style="width: 100%; min-width: 560px; max-width: 760px" '
        f'role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg></div>'
    )


def page() -> str:
    meaning = "\n".join(f"* **{name}**: {what}" for name, (what, _) in PROCESSES.items())
    rows = "\n".join(
        f"| `{name}` | {first_sentence(name)} | {', '.join(runs_in(name))} |" for name in packages()
    )
    return (
        "\n\n".join(
            [
                HEAD.strip(),
                "## Which process runs what",
                meaning,
                picture_of_processes(),
                "The terminal starts the program and measures it over a socket (`trial`), replaces itself with it (`flatout run`), "
                "or stays as its launcher or supervisor (`launch`). Inside the program, `agent` is entered first.",
                "## What imports what",
                "A package imports only packages below it. A line that follows from others is left out.",
                picture_of_packages(),
                f"| package | what it is | run by |\n|---|---|---|\n{rows}",
            ]
        )
        + "\n"
    )
