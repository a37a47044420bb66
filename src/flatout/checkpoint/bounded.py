"""Read untrusted JSON safely: count the values it can turn into before creating any."""

from __future__ import annotations

import json
from typing import Any

from flatout.job.folder import count_json_values
from flatout.schema.errors import SaveError

MOST_BYTES = 1 << 27
MOST_VALUES = 1 << 22  # a value of three characters takes up to 100 bytes


def to_json(content: object) -> bytes:
    """Raises SaveError for content that `from_json` would reject: at once rather than when it is needed."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if why := _too_much(data):
        raise SaveError(f"its plain values are {why}; keep large ones in tensors or arrays.")
    return data


def from_json(data: bytes | bytearray) -> Any:
    """Raises ValueError for invalid or oversized JSON, including nesting that is too deep."""
    if why := _too_much(data):
        raise ValueError(why)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None


def _too_much(data: bytes | bytearray) -> str:
    if len(data) > MOST_BYTES:
        return f"{len(data):,} bytes long, and the maximum is {MOST_BYTES:,}"
    values = count_json_values(data)
    return f"too many: {values:,}, and the maximum is {MOST_VALUES:,}" if values > MOST_VALUES else ""


def _no_number(spelled: str) -> Any:
    raise ValueError(f"{spelled} is not a valid number")
