"""A training script as text: its syntax tree, and the questions that rules ask of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One file of the user's. ``tree`` is what ``ast`` makes of ``text``."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Source:
        """Raises OSError, SyntaxError (which holds the line) or UnicodeDecodeError."""
        text = path.read_text(encoding="utf-8")
        return cls(str(path), text, ast.parse(text, filename=str(path)))
