"""JSON that somebody else may have written: how many values it can turn into is known before one is made."""

from __future__ import annotations

import json
from typing import Any

from flatout.plan.errors import SaveError
from flatout.plan.folder import values_in

MOST_BYTES = 1 << 27
MOST_VALUES = 1 << 22  # of 100 bytes each, the largest that a value of three characters can be


def to_json(content: Any) -> bytes:
    """Raises SaveError for what `from_json` would refuse: better now than when it is needed."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if why := _too_much(data):
        raise SaveError(f"its plain values are {why}; keep large ones in tensors or arrays")
    return data


def from_json(data: bytes | bytearray) -> Any:
    """Raises ValueError for what is no JSON of a sensible size; RecursionError is one of its reasons."""
    if why := _too_much(data):
        raise ValueError(why)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("lists in lists in lists, without end") from None


def _too_much(data: bytes | bytearray) -> str:
    if len(data) > MOST_BYTES:
        return f"{len(data):,} bytes long, and the most are {MOST_BYTES:,}"
    values = values_in(data)
    return f"too many: {values:,}, and the most are {MOST_VALUES:,}" if values > MOST_VALUES else ""


def _no_number(spelled: str) -> Any:
    raise ValueError(f"{spelled} is no number")
