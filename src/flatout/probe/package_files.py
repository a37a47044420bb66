"""The files that a script reaches through imports, those of the package that it lies in included.

``ScriptProgram`` reads what lies below the script's own folder. A trainer inside a package imports its models from
other folders of the package. These files are only searched as text, for a doubt that silences a rule.
"""

import re
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 600
MAX_BYTES = 1_000_000
MAX_LEVELS = 6  # of folders above the script
TOP = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # in the top folder of a project
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([^\n#]+))", re.MULTILINE
)


def reached_files(script: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files with their text, the script first. It yields nothing for a script without a file."""
    if script.suffix != ".py" or not script.is_file():
        return
    folders = _import_folders(script)
    waiting, seen = [script.resolve()], {script.resolve()}
    while waiting:
        file = waiting.pop(0)
        try:
            text = file.read_text(errors="replace") if file.stat().st_size <= MAX_BYTES else ""
        except OSError:
            continue
        yield file, text
        for parts, base in _imported(file, text, folders):
            found = _file(base.joinpath(*parts))
            if found is not None and found not in seen and len(seen) < MAX_FILES:
                seen.add(found)
                waiting.append(found)


def _import_folders(script: Path) -> list[Path]:
    """Return the folders that imports may start from: the script's own, and those above it in the project."""
    found = [script.resolve().parent]
    while len(found) < MAX_LEVELS and not any((found[-1] / each).exists() for each in TOP):
        if found[-1].parent == found[-1] or (len(found) > 1 and not (found[-2] / "__init__.py").is_file()):
            break
        found.append(found[-1].parent)
    return [*found, *(folder / "src" for folder in found)]


def _imported(file: Path, text: str, folders: list[Path]) -> Iterator[tuple[list[str], Path]]:
    """Yield the modules that a text may import, each as its parts and the folder to start from."""
    for match in IMPORT.finditer(text):
        module, names, plain = match.groups()
        if plain is not None:
            dotted = [re.split(r"\s+as\s+", each.strip())[0] for each in plain.split(",")]
        else:
            inside = [re.split(r"\s+as\s+", each.strip())[0] for each in names.strip("()").split(",")]
            stem = module.lstrip(".")
            dotted = [stem, *(f"{stem}.{each}".lstrip(".") for each in inside)]
        level = len(module) - len(module.lstrip(".")) if module else 0
        starts = [file.parents[min(level, len(file.parents)) - 1]] if level else folders
        for name in dotted:
            parts = name.split(".")
            if all(part.isidentifier() for part in parts):
                yield from ((parts, start) for start in starts)


def _file(path: Path) -> Path | None:
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
