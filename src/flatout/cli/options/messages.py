"""Messages of a command on standard error."""

import sys
from functools import cache

from flatout.job.sanitize import sanitize
from flatout.schema.facts import Facts, untested_torch


def notify(sentence: str) -> None:
    sys.stderr.write(f"flatout: {sanitize(sentence)}\n")


notify_once = cache(notify)


def warn_untested(facts: Facts) -> Facts:
    """Return the facts; a torch that is newer than the tested ones is named once."""
    if sentence := untested_torch(facts.versions.get("torch", "")):
        notify_once(sentence)
    return facts
