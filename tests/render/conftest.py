"""Three sessions as stored on disk. Their figures are invented: they are for display and are no results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.schema.session import SessionRecord

FOLDER = Path(__file__).parent


@pytest.fixture
def recorded() -> Callable[[str], SessionRecord]:
    """``recorded("session")``: one that found a Plan; also "failed", and "empty" (just started)."""

    def read(name: str) -> SessionRecord:
        return SessionRecord.from_json(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))

    return read
