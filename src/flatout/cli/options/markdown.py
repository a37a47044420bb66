"""Append the result of a comparison to a Markdown file, such as the summary of a GitHub job."""

from __future__ import annotations

from pathlib import Path

from flatout.schema.errors import StorageError


def append_markdown(text: str, path: Path) -> None:
    """Append to the file, which may hold the output of other steps. Raises StorageError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. Give --markdown a file in a folder that exists."
        ) from None
