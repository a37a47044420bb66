"""Limits of this process's control groups, version 1 and 2, as set by a container, a scheduler or systemd.

The effective limit is the lowest of a group and all groups above it. Sources: cgroups(7); the kernel's
documentation of cgroup v1 (CFS bandwidth, memory) and v2.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flatout.probe.proc import Mount, mounts

Read = Callable[[str], str | None]
UNLIMITED = 2**60  # version 1 writes "no limit" as the largest page-aligned number


@dataclass(frozen=True)
class CgroupLimits:
    """The effective limits. None is "no limit". ``version`` is 0 if no group of this process was found."""

    version: int
    cores: float | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    where: tuple[str, ...] = ()  # the files with the limits

    def files(self, kind: str) -> list[str]:
        """Return the files of one kind of limit: cpu or memory."""
        return [path for path in self.where if path.rpartition("/")[2].startswith(kind)]


def group(read: Read) -> CgroupLimits:
    """Return the limits of this process. ``read`` returns the text of a file, or None."""
    all_mounts, paths = mounts(read("/proc/self/mountinfo")), _paths(read("/proc/self/cgroup"))
    where: list[str] = []
    unified = next((m for m in all_mounts if m.kind == "cgroup2"), None)
    controllers = read(f"{unified.point}/cgroup.controllers") if unified else None
    if unified and "" in paths and "memory" in (controllers or "").split():
        folders = list(_folders(unified, paths[""]))
        cores = _narrowest(_quota_v2(read, folder, where) for folder in folders)
        files = [f"{folder}/{name}" for folder in folders for name in ("memory.max", "memory.high")]
        memory = _narrowest(_number(read, file, where) for file in files)
        used = _used(read, folders[0], "memory.current")
        return CgroupLimits(2, cores, _whole(memory), used, tuple(where))
    found: dict[str, list[str]] = {}
    for name in ("cpu", "memory"):
        mount = next((m for m in all_mounts if m.kind == "cgroup" and name in m.options), None)
        if mount and name in paths:
            found[name] = list(_folders(mount, paths[name]))
    if not found:
        return CgroupLimits(0)
    cores = _narrowest(_quota_v1(read, folder, where) for folder in found.get("cpu", ()))
    memory = _narrowest(
        _number(read, f"{folder}/memory.limit_in_bytes", where) for folder in found.get("memory", ())
    )
    used = _used(read, found["memory"][0], "memory.usage_in_bytes") if "memory" in found else None
    return CgroupLimits(1, cores, _whole(memory), used, tuple(where))


def _paths(text: str | None) -> dict[str, str]:
    """Parse /proc/self/cgroup: the path of the group by controller. The key "" is version 2."""
    found = {}
    for line in (text or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                found[name] = parts[2]
    return found


def _folders(mount: Mount, path: str) -> Iterator[str]:
    """Yield the group's folder and all above it, as far as this mount shows them.

    In a container the path may be the host's, while only the own group is mounted. Then the mount point is
    the group."""
    if mount.root != "/":
        path = path[len(mount.root) :] if path == mount.root or path.startswith(mount.root + "/") else ""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield "/".join([mount.point.rstrip("/"), *parts[:count]])


def _number(read: Read, path: str, where: list[str]) -> float | None:
    """Return the limit in a file, or None. The path of an actual limit is appended to ``where``."""
    words = (read(path) or "").split()
    if not words or not words[0].isdigit() or int(words[0]) >= UNLIMITED:
        return None
    where.append(path)
    return int(words[0])


def _used(read: Read, folder: str, name: str) -> int | None:
    """Return the memory of a group without droppable page cache.

    After reading data, most of the page cache is droppable."""
    used = _number(read, f"{folder}/{name}", [])
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read(f"{folder}/memory.stat") or "", re.MULTILINE)
    return None if used is None else max(int(used) - (int(cached[1]) if cached else 0), 0)


def _quota_v2(read: Read, folder: str, where: list[str]) -> float | None:
    words = (read(f"{folder}/cpu.max") or "").split()
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    where.append(f"{folder}/cpu.max")
    return int(words[0]) / int(words[1])


def _quota_v1(read: Read, folder: str, where: list[str]) -> float | None:
    quota, period = ((read(f"{folder}/cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:  # "-1" is no limit
        return None
    where.append(f"{folder}/cpu.cfs_quota_us")
    return int(quota) / int(period)


def _narrowest(found: Iterator[float | None]) -> float | None:
    # The list reads every file, so that all of them are recorded.
    return min((limit for limit in list(found) if limit is not None), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
