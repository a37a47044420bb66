"""Finds the user's names for live objects, in the script's globals and in running functions."""

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from flatout.agent.frames import is_user_file

# A function that asks for its own variables may keep the dictionary that Python returns, and Python returns
# the same one here.
READS_LOCALS = {"locals", "vars", "dir", "eval", "exec"}
# of local variables (PEP 667); in older versions, reading them keeps them alive
LOCALS_ARE_VIEWS = sys.version_info >= (3, 13)
OWNER_NAMES = ("self", "trainer")


def visible_objects(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield names and objects of the main module, then of the user's functions and their modules.

    Attributes of `self` are included.
    """
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    seen = {id(main)}
    yield from list(main.items())
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables = variables_of(frame)
                yield from variables.items()
                for owner in (variables[name] for name in OWNER_NAMES if name in variables):
                    yield from list(getattr(owner, "__dict__", {}).items())
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield from list(frame.f_globals.items())
        frame = frame.f_back


def variables_of(frame: FrameType, always: bool = False) -> dict[str, Any]:
    """Return the variables of a running function without keeping them alive.

    ``always``: if this is impossible, return them all the same.
    """
    if LOCALS_ARE_VIEWS:
        return dict(frame.f_locals)
    if sys.gettrace() is not None or sys.getprofile() is not None or _reads_locals(frame.f_code):
        return dict(frame.f_locals) if always else {}
    frame_locals = frame.f_locals
    variables = dict(frame_locals)
    frame_locals.clear()  # Python up to 3.12 keeps this dictionary and its contents until the function ends
    return variables


@lru_cache(maxsize=4096)
def _reads_locals(code: CodeType) -> bool:
    readers = READS_LOCALS & set(code.co_names)
    if readers != {"eval"}:
        return bool(readers)
    return any(
        instruction.argval == "eval" and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for instruction in dis.get_instructions(code)
    )


def names_of(objects: Iterable[Any], candidates: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return by id the first name of each object, also in a list or dictionary with a name: ``nets[0]``."""
    wanted = {id(item) for item in objects}
    names: dict[int, str] = {}
    for name, value in candidates:
        if name.startswith("__") or name == "_":
            continue
        for item_name, item in ((name, value), *named_items(name, value)):
            if id(item) in wanted:
                names.setdefault(id(item), item_name)
        if len(names) == len(wanted):
            break
    return names


def named_items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a short list or dictionary holds, as ``name[0]``."""
    if type(value) in (list, tuple) and len(value) <= 64:
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    elif type(value) is dict and len(value) <= 64:
        yield from (
            (f"{name}[{key!r}]", item) for key, item in list(value.items()) if type(key) in (str, int)
        )


def snake_case(class_name: str) -> str:
    """Spell a class as a variable: ``LitAutoEncoder`` is ``lit_auto_encoder``, ``VAE`` is ``vae``."""
    spelling = ""
    for i, letter in enumerate(class_name):
        after_small = i and (class_name[i - 1].islower() or class_name[i - 1].isdigit())
        before_small = (
            i and i + 1 < len(class_name) and class_name[i + 1].islower() and class_name[i - 1].isupper()
        )
        spelling += ("_" if letter.isupper() and (after_small or before_small) else "") + letter.lower()
    return spelling.strip("_") or "object"
