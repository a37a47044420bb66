"""List the machine, the software and the program of a session or a profile as lines of text.

The record holds them as free mappings. All entries are shown, known or not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flatout.render.formatting import MISSING, count, finite, one_line, plural, rounded, size
from flatout.schema.profile import ProfileRecord
from flatout.schema.session import SessionRecord


def device(session: SessionRecord | ProfileRecord) -> str:
    """Return the machine in one line."""
    machine = session.machine
    gpus = [
        gpu.get("name", "a GPU") if isinstance(gpu, Mapping) else gpu for gpu in machine.get("gpus") or ()
    ]
    cores = f"{plural(machine.get('cores'), 'core')}" if finite(machine.get("cores")) else ""
    names = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(map(str, gpus))]
    return ", ".join(part for part in (*names, str(machine.get("cpu") or ""), cores) if part)


# Shown by ``device``, shown elsewhere on the page, or too long to be useful.
_HIDDEN = {"cpu", "cores", "gpus", "memory bytes", "cpu flags", "how", "versions"}
_HIDDEN_KEYS = {"command", "machine", "versions", "python", "device"}
MAX_FACTS = 60


def facts(session: SessionRecord | ProfileRecord) -> list[tuple[str, str]]:
    """Return (name, text) rows about the machine, the software and the program."""
    rows = [("machine", device(session)), ("memory", size(session.machine.get("memory_bytes") or None))]
    rows += [(name, text) for name, text in _rows(session.machine) if name not in _HIDDEN]
    software = {**({"flatout": session.flatout} if session.flatout else {}), **session.versions}
    rows.append(("software", ", ".join(f"{name} {version}" for name, version in list(software.items())[:40])))
    rows.append(("folder", session.cwd))
    rows += [(f"program: {name}", text) for name, text in _rows(session.context)]
    if isinstance(session, SessionRecord):
        key = [(name, text) for name, text in _rows(session.key) if name not in _HIDDEN_KEYS]
        rows += [(f"digest of the {name}", text) for name, text in key]
    return [(name, text) for name, text in rows if text and text != MISSING][:MAX_FACTS]


def _rows(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield one_line(name, 60).replace("_", " "), one_line(_text(value), 300)


def _text(value: object) -> str:
    """Format a value of a free mapping. Empty values, False and None give ""."""
    if isinstance(value, Mapping):
        texts = {key: _text(item) for key, item in list(value.items())[:24]}
        return ", ".join(f"{key} {text}" for key, text in texts.items() if text)
    if isinstance(value, (list, tuple)):
        return "; ".join(text for item in value[:24] if (text := _text(item)))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, (int, float)):
        return count(value) if value == finite(value) and value == int(value) else rounded(value)
    return "" if value is None else str(value)
