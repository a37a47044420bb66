"""What of a foreign text must never reach a terminal, a page or a file as it is."""

from __future__ import annotations

import re

# Control codes move the cursor of a terminal, bidirectional ones reorder what is read, and a lone surrogate (the name of a
# file that is not UTF-8) cannot be written to disk at all. Each becomes one visible sign. Line breaks and tabs stay.
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
SIGN = "\ufffd"


def harmless(text: str) -> str:
    return HARMFUL.sub(SIGN, text)
