"""Read untrusted JSON safely: count the values it can turn into before creating any."""

import json
from typing import Any

from flatout.job.folder import count_json_values
from flatout.schema.errors import CheckpointError

MAX_BYTES = 1 << 27
MAX_VALUES = 1 << 22  # a value of three characters takes up to 100 bytes


def to_json(content: object) -> bytes:
    """Raises CheckpointError for content that `from_json` would reject: at once rather than when it is needed."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if why := _why_too_large(data):
        raise CheckpointError(f"its plain values are {why}; keep large ones in tensors or arrays.")
    return data


def from_json(data: bytes | bytearray) -> Any:
    """Raises ValueError for invalid or oversized JSON, including nesting that is too deep."""
    if why := _why_too_large(data):
        raise ValueError(why)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None


def _why_too_large(data: bytes | bytearray) -> str:
    if len(data) > MAX_BYTES:
        return f"{len(data):,} bytes long, and the maximum is {MAX_BYTES:,}"
    values = count_json_values(data)
    return f"too many: {values:,}, and the maximum is {MAX_VALUES:,}" if values > MAX_VALUES else ""


def _reject_constant(spelled: str) -> Any:
    raise ValueError(f"{spelled} is not a valid number")
