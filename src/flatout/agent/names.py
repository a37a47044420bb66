"""Finds the user's names for live objects, in the script's globals and in running functions."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from flatout.agent.frames import is_users

# A function that asks for its own variables may keep the dictionary that Python returns, and Python returns
# the same one here.
ASKS_FOR_ITS_VARIABLES = {"locals", "vars", "dir", "eval", "exec"}
# of local variables (PEP 667); in older versions, reading them keeps them alive
LIVE_VIEWS = sys.version_info >= (3, 13)
OWNERS = ("self", "trainer")


def visible(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield names and objects of the main module, then of the user's functions and their modules.

    Attributes of `self` are included.
    """
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    seen = {id(main)}
    yield from list(main.items())
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables = variables_of(frame)
                yield from variables.items()
                for owner in (variables[name] for name in OWNERS if name in variables):
                    yield from list(getattr(owner, "__dict__", {}).items())
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield from list(frame.f_globals.items())
        frame = frame.f_back


def variables_of(frame: FrameType, always: bool = False) -> dict[str, Any]:
    """Return the variables of a running function without keeping them alive.

    ``always``: if this is impossible, return them all the same.
    """
    if LIVE_VIEWS:
        return dict(frame.f_locals)
    if sys.gettrace() is not None or sys.getprofile() is not None or _asks_for_its_variables(frame.f_code):
        return dict(frame.f_locals) if always else {}
    held = frame.f_locals
    found = dict(held)
    held.clear()  # Python up to 3.12 keeps this dictionary and its contents until the function ends
    return found


@lru_cache(maxsize=4096)
def _asks_for_its_variables(code: CodeType) -> bool:
    """Whether the code reads its local variables, as `locals()` and `eval()` do; ``model.eval()`` does not."""
    asks = ASKS_FOR_ITS_VARIABLES & set(code.co_names)
    if asks != {"eval"}:
        return bool(asks)
    return any(
        each.argval == "eval" and each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for each in dis.get_instructions(code)
    )


def names_of(things: Iterable[Any], seen: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return by id the first name of each object, also in a list or dictionary with a name: ``nets[0]``."""
    wanted = {id(thing) for thing in things}
    found: dict[int, str] = {}
    for name, value in seen:
        if name.startswith("__") or name == "_":
            continue
        for inner, thing in ((name, value), *inside(name, value)):
            if id(thing) in wanted:
                found.setdefault(id(thing), inner)
        if len(found) == len(wanted):
            break
    return found


def inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a short list or dictionary holds, as ``name[0]``."""
    if type(value) in (list, tuple) and len(value) <= 64:
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(value))
    elif type(value) is dict and len(value) <= 64:
        yield from (
            (f"{name}[{key!r}]", each) for key, each in list(value.items()) if type(key) in (str, int)
        )


def spelled(kind: str) -> str:
    """Spell a class as a variable: ``LitAutoEncoder`` is ``lit_auto_encoder``, ``VAE`` is ``vae``."""
    found = ""
    for at, letter in enumerate(kind):
        after_small = at and (kind[at - 1].islower() or kind[at - 1].isdigit())
        before_small = at and at + 1 < len(kind) and kind[at + 1].islower() and kind[at - 1].isupper()
        found += ("_" if letter.isupper() and (after_small or before_small) else "") + letter.lower()
    return found.strip("_") or "object"
