"""Shared jinja2 environment of all pages: no scripts, no requests, one inline style sheet, escaped values.

A page can be mailed, printed and opened from disk. Its content security policy allows only its own style
sheet, identified by digest.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flatout.render import formatting
from flatout.schema.records import CONFIDENCE


@cache
def environment(*sheets: str) -> Environment:
    """Return an environment whose pages include these style sheets, in this order."""
    made = Environment(
        loader=PackageLoader("flatout.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    style = Markup("\n").join(Markup(made.get_template(sheet).render()) for sheet in sheets)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made.globals.update(style=style, style_digest=digest, confidence=f"{CONFIDENCE:.0%}")
    return made


def _clean(value: object) -> Any:
    """Clean a value for the page. Markup was cleaned when it was built.

    The home folder becomes ``~``, because pages are shared and must not reveal user names.
    """
    if not isinstance(value, str):
        return value
    home = os.path.expanduser("~").rstrip("/")
    shown = value if isinstance(value, Markup) else formatting.legible(value, 4000)
    return shown.replace(f"{home}/", "~/") if home.startswith("/") else shown
