"""Replace characters of untrusted text that are unsafe in a terminal, a page or a file."""

import os
import re
from collections.abc import Sequence

# Control codes move the cursor of a terminal. Bidirectional ones reorder the text. A lone surrogate (from a
# file name that is not UTF-8) cannot be encoded. Each becomes a visible character; line breaks and tabs stay.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
REPLACEMENT = "\ufffd"


def sanitize(text: str) -> str:
    return UNSAFE.sub(REPLACEMENT, text)


# Secrets of a command line that is stored and shown.

MASK = "***"
ALWAYS_SECRET = r"password|passwd|passphrase|pwd|pin|secret|credentials?"  # a number may be one
USUALLY_SECRET = (
    r"token|(?:api|access|private)?key|(?:api|access|private)[_-]?keys|passwords|secrets|pass|auth|bearer"
)
NAMES = rf"(?:[\w.-]*(?:[._-]|[a-z\d](?=[A-Z])))?(?i:{ALWAYS_SECRET}|{USUALLY_SECRET})"  # whole words: tokens, monkey are none
OPTION = re.compile(rf"(-{{1,2}}{NAMES})(?:=(.*))?", re.DOTALL)
SETTING = re.compile(rf"(\+{{0,2}}{NAMES})=(.+)", re.DOTALL)  # hydra's name=value, and a shell's
IN_URL = re.compile(r"(?<=://)[^/?#\s@]+@")  # user:password@
IN_QUERY = re.compile(rf"(?<=[?&])({NAMES})=([^&#\s]+)")
PLAIN_VALUE = re.compile(
    r"(?i:true|false|none|null)|[-+]?(?=\.?\d)\d{0,9}(?:\.\d{0,9})?(?:[eE][-+]?\d{1,3})?"
)
SECRET_IF_PLAIN = re.compile(rf"(?i:{ALWAYS_SECRET})\Z")
KNOWN_KEYS = re.compile(  # key formats of well-known services
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,})"
)


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets masked.

    Masked are values after ``--token``, in ``--password=...`` and in ``https://user:pw@host``, and keys of
    well-known services. A plain number is masked only after a name such as ``password``."""
    result: list[str] = []
    name = ""  # of an option whose value comes next
    for word in words:
        option = OPTION.fullmatch(word)
        if name and not word.startswith("-"):
            result.append(_value(name, word))
        elif option is None:
            result.append(_masked_word(word))
        else:
            result.append(word if option[2] is None else _setting(option))
        name = option[1] if option is not None and option[2] is None else ""
    return result


def portable(text: str) -> str:
    """The text with paths relative to the working directory or to ``~``; all others outside are masked."""
    for path, short in ((os.getcwd() + "/", ""), (os.path.expanduser("~") + "/", "~/")):
        text = text.replace(path, short)
    return re.sub(r"(?:(?<![\w.~/])/|\.\./)[^\s,:;=\"']+", MASK, text)


def _value(name: str, value: str) -> str:
    return value if PLAIN_VALUE.fullmatch(value) and not SECRET_IF_PLAIN.search(name) else MASK


def _setting(match: re.Match[str]) -> str:
    return f"{match[1]}={_value(match[1], match[2])}"


def _masked_word(word: str) -> str:
    setting = SETTING.fullmatch(word)
    return KNOWN_KEYS.sub(
        MASK, IN_QUERY.sub(_setting, IN_URL.sub(f"{MASK}@", _setting(setting) if setting else word))
    )
