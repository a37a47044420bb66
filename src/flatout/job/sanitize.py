"""Replace characters of untrusted text that are unsafe in a terminal, a page or a file."""

import re

# Control codes move the cursor of a terminal. Bidirectional ones reorder the text. A lone surrogate (from a
# file name that is not UTF-8) cannot be encoded. Each becomes a visible character; line breaks and tabs stay.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
REPLACEMENT = "\ufffd"


def sanitize(text: str) -> str:
    return UNSAFE.sub(REPLACEMENT, text)
