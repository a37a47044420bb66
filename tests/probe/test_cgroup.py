"""Control groups of both versions, from texts as the kernel writes them: the tightest limit of all groups
above this process applies.
"""

import pytest

from flatout.probe.cgroup import CgroupLimits, group
from flatout.probe.proc import mount_of, mounts, numbers

V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = """35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
ON_V2 = {
    "/proc/self/mountinfo": V2,
    "/proc/self/cgroup": "0::/a/b\n",
    "/sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
}
ON_V1 = {
    "/proc/self/mountinfo": V1,
    "/proc/self/cgroup": "9:name=systemd:/\n4:memory:/job/7\n1:cpu:/\n0::/\n",
}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (ON_V2, CgroupLimits(2)),
        (
            {
                **ON_V2,
                "/sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "/sys/fs/cgroup/a/cpu.max": "150000 100000",
            },
            CgroupLimits(2, 1.5, where=("/sys/fs/cgroup/a/b/cpu.max", "/sys/fs/cgroup/a/cpu.max")),
        ),
        (
            {
                **ON_V2,
                "/sys/fs/cgroup/a/b/memory.max": "1000",
                "/sys/fs/cgroup/a/b/memory.current": "10",
                "/sys/fs/cgroup/a/memory.high": "900",
            },
            CgroupLimits(
                2, None, 900, 10, where=("/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.high")
            ),
        ),
        (
            {
                **ON_V1,
                "/sys/fs/cgroup/memory/job/7/memory.limit_in_bytes": "9223372036854771712",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648",
                "/sys/fs/cgroup/memory/job/7/memory.usage_in_bytes": "5",
            },
            CgroupLimits(1, None, 2**31, 5, where=("/sys/fs/cgroup/memory/job/memory.limit_in_bytes",)),
        ),
        (
            {
                **ON_V1,
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            CgroupLimits(1, 0.5, where=("/sys/fs/cgroup/cpu/cpu.cfs_quota_us",)),
        ),
        ({}, CgroupLimits(0)),
        ({"/proc/self/mountinfo": "garbage\n" * 3, "/proc/self/cgroup": "x"}, CgroupLimits(0)),
    ],
)
def test_the_tightest_limit_applies(files, found):
    assert group(files.get) == found


@pytest.mark.parametrize(
    ("files", "folder", "current", "line"),
    [
        (ON_V2, "/sys/fs/cgroup/a/b", "memory.current", "inactive_file"),
        (ON_V1, "/sys/fs/cgroup/memory/job/7", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_page_cache_is_not_in_use(files, folder, current, line):
    """A container that has only read its data is not full."""
    assert (
        group(
            {
                **files,
                f"{folder}/{current}": "1000",
                f"{folder}/memory.stat": f"anon 90\n{line} 900\nslab 10\n",
            }.get
        ).used_bytes
        == 100
    )


def test_only_the_own_group_is_mounted():
    """A container under cgroups v1: the path is the host's, and the mount point is the group."""
    files = {
        "/proc/self/cgroup": "4:memory:/docker/ab\n",
        "/proc/self/mountinfo": "1 2 0:33 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1024",
    }
    assert group(files.get).memory_bytes == 1024


def test_mounts_hide_each_other():
    found = mounts(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /data rw - tmpfs a rw,size=64k\n"
        "3 1 0:6 / /data rw - nfs4 srv:/x rw\n4 1 0:7 / /data\\040two rw - xfs b rw\n"
    )
    assert mount_of("/data/x", found).kind == "nfs4"
    assert mount_of("/data two/x", found).kind == "xfs"
    assert mount_of("/database", found).kind == "ext4"
    assert found[1].size_bytes() == 64 * 1024
    assert mount_of("/x", []) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-3,8\n", [0, 1, 2, 3, 8]), ("0", [0]), ("", None), ("a-b", None), ("0-99999999", None)],
)
def test_lists_of_the_kernel(text, found):
    assert numbers(text) == found
