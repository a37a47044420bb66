"""Parse files of /proc and /sys. Pure functions from text to a value, or None or empty for invalid text."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mount:
    """One line of /proc/<pid>/mountinfo (proc_pid_mountinfo(5)).

    ``root`` is the folder of the file system that is mounted at ``point``."""

    root: str
    point: str
    kind: str
    source: str
    options: tuple[str, ...]

    def size_bytes(self) -> int | None:
        """Return the size limit of a tmpfs, or None."""
        for option in self.options:
            found = re.fullmatch(r"size=(\d+)([kmg]?)", option)
            if found:
                return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[found[2]]
        return None


def mounts(mountinfo: str | None) -> list[Mount]:
    found = []
    for line in (mountinfo or "").splitlines():
        left, dash, right = line.partition(" - ")
        words, rest = left.split(), right.split()
        if dash and len(words) >= 6 and len(rest) >= 3:
            options = (*words[5].split(","), *rest[2].split(","))
            found.append(Mount(_unescaped(words[3]), _unescaped(words[4]), rest[0], rest[1], options))
    return found


def mount_of(path: str, all_mounts: list[Mount]) -> Mount | None:
    """Return the mount of a path: the longest mount point above it.

    Of equal ones the last, which hides the others."""
    above = [m for m in all_mounts if path == m.point or path.startswith(m.point.rstrip("/") + "/")]
    return max(enumerate(above), key=lambda pair: (len(pair[1].point), pair[0]))[1] if above else None


def _unescaped(word: str) -> str:
    """Decode the octal escapes of blanks in paths."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), word)


def meminfo(text: str | None) -> dict[str, int]:
    """Parse /proc/meminfo in bytes. Lines without a unit (HugePages_Total) are left out."""
    return {m[1]: int(m[2]) * 1024 for m in re.finditer(r"^([\w()]+):\s+(\d+) kB$", text or "", re.MULTILINE)}


@dataclass(frozen=True)
class Limit:
    """A soft and a hard limit. None is unlimited."""

    soft: int | None
    hard: int | None


def limits(text: str | None) -> dict[str, Limit]:
    """Parse /proc/<pid>/limits by name, without the word Max: "open files", "locked memory"."""
    found = {}
    for m in re.finditer(r"^Max ([a-z ]+?)\s{2,}(\d+|unlimited)\s+(\d+|unlimited)", text or "", re.MULTILINE):
        found[m[1]] = Limit(*(None if value == "unlimited" else int(value) for value in (m[2], m[3])))
    return found


def numbers(text: str | None) -> list[int] | None:
    """Parse a kernel list ("0-3,8"): [0, 1, 2, 3, 8]. None if it is invalid."""
    words = (text or "").strip()
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", words):
        return None
    found: list[int] = []
    for part in words.split(","):
        first, _, last = part.partition("-")
        if int(last or first) - int(first) > 1 << 16:
            return None
        found += range(int(first), int(last or first) + 1)
    return found


def status(text: str | None, name: str) -> str | None:
    """Return one line of /proc/<pid>/status."""
    found = re.search(rf"^{re.escape(name)}:\s*(.*)$", text or "", re.MULTILINE)
    return found[1].strip() if found else None


def os_release(text: str | None) -> dict[str, str]:
    return {m[1]: m[2].strip("\"'") for m in re.finditer(r"^([A-Z_]+)=(.*)$", text or "", re.MULTILINE)}
