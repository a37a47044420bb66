"""What the user calls things: the names of live objects in the script's globals and in the functions that run at the moment."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from flatout.capture.frames import is_users

# A function that asks for its own variables may keep the dictionary that Python hands out for it, the same one that we would get.
ASKS_FOR_ITS_VARIABLES = {"locals", "vars", "dir", "eval", "exec"}
LIVE_VIEWS = sys.version_info >= (3, 13)  # of the variables of a function (PEP 667); before, reading them keeps them alive
OWNERS = ("self", "trainer")


def visible(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Names and objects: of the main program first, then of the user's functions from ``frame`` outwards and of their modules; attributes of `self` too."""
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
    """Of a function that runs. Nothing that it holds lives any longer because we have looked; ``always``: where that cannot be had, look all the same."""
    if LIVE_VIEWS:
        return dict(frame.f_locals)
    if sys.gettrace() is not None or sys.getprofile() is not None or _asks_for_its_variables(frame.f_code):
        return dict(frame.f_locals) if always else {}
    held = frame.f_locals
    found = dict(held)
    held.clear()  # Python 3.11 and 3.12 keep this dictionary, and all that is in it, until the function ends
    return found


@lru_cache(maxsize=4096)
def _asks_for_its_variables(code: CodeType) -> bool:
    """``model.eval()`` is a method of that name, and asks for nothing."""
    asks = ASKS_FOR_ITS_VARIABLES & set(code.co_names)
    if asks != {"eval"}:
        return bool(asks)
    return any(each.argval == "eval" and each.opname in ("LOAD_GLOBAL", "LOAD_NAME") for each in dis.get_instructions(code))


def names_of(things: Iterable[Any], seen: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """By id, the first name that each of these things has; also in a list or a dictionary that has one: ``nets[0]``."""
    wanted = {id(thing) for thing in things}
    found: dict[int, str] = {}
    for name, value in seen:
        if name.startswith("__") or name == "_":
            continue
        for inner, thing in ((name, value), *_inside(name, value)):
            if id(thing) in wanted:
                found.setdefault(id(thing), inner)
        if len(found) == len(wanted):
            break
    return found


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple) and len(value) <= 64:
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(value))
    elif type(value) is dict and len(value) <= 64:
        yield from ((f"{name}[{key!r}]", each) for key, each in list(value.items()) if type(key) in (str, int))


def spelled(kind: str) -> str:
    """A class as a variable would be called: ``LitAutoEncoder`` is ``lit_auto_encoder``, ``VAE`` is ``vae``."""
    found = ""
    for at, letter in enumerate(kind):
        after_small = at and (kind[at - 1].islower() or kind[at - 1].isdigit())
        before_small = at and at + 1 < len(kind) and kind[at + 1].islower() and kind[at - 1].isupper()
        found += ("_" if letter.isupper() and (after_small or before_small) else "") + letter.lower()
    return found.strip("_") or "object"
