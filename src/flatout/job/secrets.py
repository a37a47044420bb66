"""Mask the secrets of a command line that is stored and shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
NAMES = r"(?:[\w.-]*[._-])?(?:tokens?|keys?|api_?key|apikey|passwords?|passwd|pass|pwd|secrets?|auth|credentials?|bearer)"
OPTION = re.compile(rf"(-{{1,2}}{NAMES})(=.*)?", re.IGNORECASE | re.DOTALL)
SETTING = re.compile(
    rf"(\+{{0,2}}{NAMES}=).+", re.IGNORECASE | re.DOTALL
)  # hydra's name=value, and a shell's
IN_URL = re.compile(r"(?<=://)[^/?#\s@]+@")  # user:password@
IN_QUERY = re.compile(rf"([?&]{NAMES}=)[^&#\s]+", re.IGNORECASE)
KNOWN = re.compile(  # key formats of well-known services
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,})"
)


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets masked.

    Masked are values after ``--token``, in ``--password=...`` and in ``https://user:pw@host``, and keys of
    well-known services.
    """
    found: list[str] = []
    hide = False
    for word in words:
        option = OPTION.fullmatch(word)
        if hide and not word.startswith("-"):
            found.append(MASK)
        elif option is not None:
            found.append(f"{option[1]}={MASK}" if option[2] else word)
        else:
            found.append(_within(word))
        hide = option is not None and not option[2]
    return found


def _within(word: str) -> str:
    word = SETTING.sub(rf"\g<1>{MASK}", word) if SETTING.fullmatch(word) else word
    return KNOWN.sub(MASK, IN_QUERY.sub(rf"\g<1>{MASK}", IN_URL.sub(f"{MASK}@", word)))
