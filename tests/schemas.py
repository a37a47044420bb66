"""The JSON Schemas that the site publishes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "docs"))

from record_schemas import PUBLISHED, json_schema

__all__ = ["PUBLISHED", "json_schema"]
