"""The manifest of a checkpoint: the files in its folder, byte for byte.

Written last, read first. Pure: no disk access.

The manifest carries its own digest. A digest detects accidents. It does not authenticate a checkpoint:
whoever can change the files can change the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.checkpoint.disk import FileDigest, from_json
from flatout.schema.errors import MALFORMED, CheckpointError

SCHEMA = 1
MAX_BYTES = 1 << 24
MAX_FILES = 100_000
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """``kind``: the program that wrote the checkpoint and can read it. ``step``: optimizer steps done.

    ``left_out``: places in the state whose values cannot be stored, with their types. ``metadata``: metadata of
    the writer, as JSON."""

    kind: str
    step: int
    files: Mapping[str, FileDigest]
    left_out: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        content = {
            "flatout_save": SCHEMA,
            "kind": self.kind,
            "step": self.step,
            "files": {
                name: {"bytes": stored.bytes, "sha256": stored.sha256}
                for name, stored in sorted(self.files.items())
            },
            "left_out": dict(self.left_out),
            "metadata": dict(self.metadata),
        }
        digest = hashlib.sha256(
            json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        ).hexdigest()
        return json.dumps({**content, "sha256": digest}, indent=1) + "\n"

    @classmethod
    def from_text(cls, data: bytes) -> Manifest:
        """Raises CheckpointError for anything that is not exactly the output of `to_text`."""
        try:
            content = from_json(data)
        except ValueError:
            raise CheckpointError("its manifest is not JSON") from None
        if type(content) is not dict or "flatout_save" not in content:
            raise CheckpointError("its manifest is not that of a flatout checkpoint")
        if type(content["flatout_save"]) is int and content["flatout_save"] > SCHEMA:
            raise CheckpointError(
                f"its manifest has format {content['flatout_save']}, and this flatout supports formats up to {SCHEMA}. Install a newer flatout"
            )
        try:
            manifest = cls(
                _text(content["kind"]),
                _count(content["step"]),
                _files(content["files"]),
                {_text(where): _text(what) for where, what in content["left_out"].items()},
                dict(content["metadata"]),
            )
            if manifest.to_text().encode() != data:  # exact to the last space
                raise ValueError
        except MALFORMED:
            raise CheckpointError("its manifest was changed after it was written") from None
        return manifest


def _files(content: Mapping[str, Any]) -> dict[str, FileDigest]:
    if len(content) > MAX_FILES:
        raise ValueError
    files = {}
    for name, entry in content.items():
        if (
            not FILE_NAME.fullmatch(name)
            or set(entry) != {"bytes", "sha256"}
            or not DIGEST.fullmatch(entry["sha256"])
        ):
            raise ValueError
        files[name] = FileDigest(_count(entry["bytes"]), entry["sha256"])
    return files


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError
    return value
