"""`flatout kernel new`: create a folder with a working example kernel."""

from pathlib import Path

import click

import flatout.kernels
from flatout.schema.errors import StorageError, UsageError

TEMPLATE = Path(flatout.kernels.__file__).parent / "template"
EXAMPLE = "silu_mul"


def write(name: str) -> None:
    """Write the folder ``name`` here.

    Raises UsageError if Python cannot import the name, StorageError if the folder exists."""
    folder = Path(name)
    stem = folder.name
    if not stem.isidentifier() or stem != stem.lower() or stem in ("torch", "triton", "flatout", "aten"):
        raise UsageError(
            f"{stem!r} cannot be a kernel's name: the name becomes a Python package. Use lower-case letters, digits and _, as in `my_kernel`."
        )
    if folder.exists():
        raise StorageError(f"{name} already exists. Choose another name, or remove it first.")
    try:
        folder.mkdir(parents=True)
        for source in sorted(TEMPLATE.iterdir()):
            if source.is_file() and source.suffix in (".py", ".cu"):
                text = source.read_text(encoding="utf-8").replace(EXAMPLE, stem)
                (folder / source.name.replace(EXAMPLE, stem)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{name} cannot be written: {error.strerror}. Choose another folder.") from None
    click.echo(
        f"{name}: a working kernel (silu(a) * b) with its reference, cases and known-wrong variants. Edit it and run:\n"
        f"    flatout kernel check {name}\n    flatout kernel bench {name}\n    python -m pytest {name}"
    )
