"""Where the program, its data and torch's caches lie: room, kind of file system, whether it can be written."""

from __future__ import annotations

from flatout.diagnose.doctor.check import Answer, note, ok, problem, question, size, unseen, warning
from flatout.plan.sight import Disk, Sight
from flatout.probe.proc import Mount, mount_of, mounts

THEME = "disks"
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.rclone", "lustre", "gpfs", "beegfs", "ceph",
           "glusterfs",
           "fuse.glusterfs", "afs", "virtiofs", "drvfs")
IN_MEMORY = ("tmpfs", "ramfs")
FULL_BYTES, LITTLE_BYTES = 2**30, 10 * 2**30


def _room(disk: Disk, what: str, mend: str) -> Answer | None:
    """What is wrong with the room that is left, or None."""
    if disk.writable is False:
        return problem(f"{what} {disk.path} cannot be written", mend)
    if disk.free_files is not None and disk.free_files < 1000:
        return problem(f"{what} {disk.path} has room for {disk.free_files} more files (inodes)", mend)
    if disk.free_bytes < FULL_BYTES:
        return problem(f"{what} {disk.path} has {size(disk.free_bytes)} left", mend)
    if disk.free_bytes < LITTLE_BYTES:
        return warning(f"{what} {disk.path} has {size(disk.free_bytes)} of {size(disk.total_bytes)} left", mend)
    return None


def _mount(sight: Sight, path: str) -> Mount | None:
    return mount_of(path, mounts(sight.text("/proc/self/mountinfo"))) if path else None


@question("FD090", THEME, ["disk working folder"])
def working_folder(sight: Sight) -> Answer:
    """There is room for checkpoints where the program runs.

    Why it matters:
        A checkpoint with the state of its optimizer is three times as large as the model. A disk that fills up in the middle of writing one
        loses both the new and, where it is overwritten, the old.
    How to mend it:
        `du -xh . | sort -h | tail` shows what takes the room.
    """
    disk = sight.disks["working folder"]
    return _room(disk, "the working folder", "du -xh . | sort -h | tail") or ok(f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free in {disk.path}")


@question("FD091", THEME, ["file /proc/self/mountinfo", "working_folder"])
def kind_of_disk(sight: Sight) -> Answer:
    """Data is read from a local disk.

    Why it matters:
        Over a network each small file costs a journey: loaders of single images wait for it. What lies in memory (tmpfs) takes memory away
        from training.
    How to mend it:
        Copy the data to a local disk first: `rsync -a DATA /local/`, or read it from a few large files.
    """
    mount = _mount(sight, sight.working_folder)
    if mount is None:
        return unseen(f"/proc/self/mountinfo does not name what {sight.working_folder} lies on")
    if mount.kind in NETWORK:
        return warning(f"{sight.working_folder} lies on a network file system ({mount.kind}, {mount.source})", f"rsync -a {sight.working_folder}/ /local/data/")
    if mount.kind in IN_MEMORY:
        return note(f"{sight.working_folder} lies in memory ({mount.kind})")
    if mount.kind == "overlay":
        return note(f"{sight.working_folder} lies on the container's own layer (overlay): what is written there is slow, and lost with the container",
                    'docker run -v "$PWD":/work -w /work ...')
    return ok(f"{mount.kind}, a local disk")


@question("FD092", THEME, ["disk temporary folder"])
def temporary_folder(sight: Sight) -> Answer:
    """The temporary folder can be written and has room.

    Why it matters:
        torch.compile, loader workers' sockets and checkpoints in the making lie there.
    How to mend it:
        `export TMPDIR=/somewhere/else`.
    """
    disk = sight.disks["temporary folder"]
    return _room(disk, "the temporary folder", "export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR") or ok(f"{size(disk.free_bytes)} free in {disk.path}")


@question("FD093", THEME, ["disk cache", "file /proc/self/mountinfo"])
def cache_folder(sight: Sight) -> Answer:
    """Caches can be written, on a local disk.

    Why it matters:
        triton, torch.compile and downloads keep what they made in the cache folder. On a network file system ranks wait for each other's
        locks; where it cannot be written, every run compiles anew.
    How to mend it:
        `export XDG_CACHE_HOME=/local/cache TORCHINDUCTOR_CACHE_DIR=/local/cache/inductor TRITON_CACHE_DIR=/local/cache/triton`.
    """
    disk, mount = sight.disks["cache"], _mount(sight, sight.home_cache)
    wrong = _room(disk, "the cache folder", "export XDG_CACHE_HOME=/tmp/cache")
    if wrong:
        return wrong
    if mount is None:
        return unseen(f"/proc/self/mountinfo does not name what {sight.home_cache} lies on")
    if mount.kind in NETWORK:
        return note(f"{disk.path} lies on a network file system ({mount.kind})", "export XDG_CACHE_HOME=/tmp/cache")
    return ok(f"{size(disk.free_bytes)} free below {disk.path}")


QUESTIONS = (working_folder, kind_of_disk, temporary_folder, cache_folder)
