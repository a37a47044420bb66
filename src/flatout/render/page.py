"""What every page of ours has in common: no script, no request, one style sheet named by its digest, every value escaped.

A page can be mailed, printed and opened from disk. Its security policy forbids everything but the sheet that it carries.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flatout.plan.records import CONFIDENCE
from flatout.render import wording


@cache
def environment(*sheets: str) -> Environment:
    """Templates that carry these style sheets, in this order."""
    made = Environment(loader=PackageLoader("flatout.render"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                       finalize=_clean)
    style = Markup("\n").join(Markup(made.get_template(sheet).render()) for sheet in sheets)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made.globals.update(style=style, style_digest=digest, confidence=f"{CONFIDENCE:.0%}")
    return made


def _clean(value: Any) -> Any:
    """Every value on its way into the page. What is Markup was cleaned when it was made. Pages are passed on: whose home something lies in stays out."""
    if not isinstance(value, str):
        return value
    home = os.path.expanduser("~").rstrip("/")
    shown = value if isinstance(value, Markup) else wording.legible(value, 4000)
    return shown.replace(f"{home}/", "~/") if home.startswith("/") else shown
