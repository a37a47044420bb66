"""Loads a saved profile."""

from __future__ import annotations

from flatout.job.folder import JobFolder, read_json
from flatout.schema.profile import PROFILE_SCHEMA, ProfileRecord


def load_profile(folder: JobFolder) -> ProfileRecord | None:
    """None if there is no profile or it is not readable."""
    data = read_json(folder.profile)
    if not isinstance(data, dict) or data.get("schema") != PROFILE_SCHEMA:
        return None
    try:
        return ProfileRecord.from_json(data)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
