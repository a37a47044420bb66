"""Reads TOML of others, which may be hostile."""

import re
import sys
from typing import Any

DOTTED = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){33}""")


def read_toml(text: str) -> dict[str, Any]:
    """Raises ValueError, also for a number of thousands of digits."""
    if DOTTED.search(text):  # tomllib needs quadratic memory for dotted keys: a gigabyte for 60 kB
        raise ValueError("a key has too many parts")
    if sys.version_info >= (3, 11):
        import tomllib  # novm: guarded, which vermin does not see
    else:
        import tomli as tomllib  # the same parser
    try:
        return dict(tomllib.loads(text))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
