"""Checks of the disks of the program, its data and torch's caches: free space, file system, write access."""

from __future__ import annotations

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    machine_check,
    not_seen,
    note,
    ok,
    problem,
    size,
    warning,
)
from flatout.probe.proc import Mount, mount_of, mounts
from flatout.schema.machine_snapshot import Disk, MachineSnapshot

THEME = "disks"
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
    "fuse.rclone",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "fuse.glusterfs",
    "afs",
    "virtiofs",
    "drvfs",
)
IN_MEMORY = ("tmpfs", "ramfs")
FULL_BYTES, LITTLE_BYTES = 2**30, 10 * 2**30


def _room(disk: Disk, what: str, fix: str) -> CheckOutcome | None:
    """A problem with the free space, or None."""
    if disk.writable is False:
        return problem(f"{what} {disk.path} cannot be written", fix)
    if disk.free_files is not None and disk.free_files < 1000:
        return problem(f"{what} {disk.path} can hold only {disk.free_files} more files (inodes)", fix)
    if disk.free_bytes < FULL_BYTES:
        return problem(f"{what} {disk.path} has {size(disk.free_bytes)} left", fix)
    if disk.free_bytes < LITTLE_BYTES:
        return warning(
            f"{what} {disk.path} has {size(disk.free_bytes)} of {size(disk.total_bytes)} left", fix
        )
    return None


def _mount(snapshot: MachineSnapshot, path: str) -> Mount | None:
    return mount_of(path, mounts(snapshot.text("/proc/self/mountinfo"))) if path else None


@machine_check("FD090", THEME, ["disk working folder"])
def working_folder(snapshot: MachineSnapshot) -> CheckOutcome:
    """The working folder has space for checkpoints.

    Why it matters:
        A checkpoint with the optimizer's state is three times as large as the model. If the disk fills up
        while a checkpoint is written, the new checkpoint is lost, and an overwritten old one, too.
    How to fix it:
        `du -xh . | sort -h | tail` shows the largest folders.
    """
    disk = snapshot.disks["working folder"]
    return _room(disk, "the working folder", "du -xh . | sort -h | tail") or ok(
        f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free in {disk.path}"
    )


@machine_check("FD091", THEME, ["file /proc/self/mountinfo", "working_folder"])
def kind_of_disk(snapshot: MachineSnapshot) -> CheckOutcome:
    """Data is on a local disk.

    Why it matters:
        Each small file on a network file system costs a round trip, so loaders of single images are slow.
        Files in memory (tmpfs) take memory from training.
    How to fix it:
        Copy the data to a local disk first (`rsync -a DATA /local/`), or store it in a few large files.
    """
    mount = _mount(snapshot, snapshot.working_folder)
    if mount is None:
        return not_seen(f"/proc/self/mountinfo does not list the file system of {snapshot.working_folder}")
    if mount.kind in NETWORK:
        return warning(
            f"{snapshot.working_folder} is on a network file system ({mount.kind}, {mount.source})",
            f"rsync -a {snapshot.working_folder}/ /local/data/",
        )
    if mount.kind in IN_MEMORY:
        return note(f"{snapshot.working_folder} is in memory ({mount.kind})")
    if mount.kind == "overlay":
        return note(
            f"{snapshot.working_folder} is on the container's own layer (overlay): writing is slow, and the files are lost with the container",
            'docker run -v "$PWD":/work -w /work ...',
        )
    return ok(f"{mount.kind}, a local disk")


@machine_check("FD092", THEME, ["disk temporary folder"])
def temporary_folder(snapshot: MachineSnapshot) -> CheckOutcome:
    """The temporary folder is writable and has space.

    Why it matters:
        torch.compile, the sockets of loader workers and unfinished checkpoints use it.
    How to fix it:
        `export TMPDIR=/somewhere/else`.
    """
    disk = snapshot.disks["temporary folder"]
    return _room(disk, "the temporary folder", "export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR") or ok(
        f"{size(disk.free_bytes)} free in {disk.path}"
    )


@machine_check("FD093", THEME, ["disk cache", "file /proc/self/mountinfo"])
def cache_folder(snapshot: MachineSnapshot) -> CheckOutcome:
    """The cache folder is writable and on a local disk.

    Why it matters:
        triton, torch.compile and downloads keep their results in the cache folder. On a network file system
        ranks wait for each other's locks. If the folder is not writable, every run compiles again.
    How to fix it:
        `export XDG_CACHE_HOME=/local/cache TORCHINDUCTOR_CACHE_DIR=/local/cache/inductor
        TRITON_CACHE_DIR=/local/cache/triton`.
    """
    disk, mount = snapshot.disks["cache"], _mount(snapshot, snapshot.home_cache)
    wrong = _room(disk, "the cache folder", "export XDG_CACHE_HOME=/tmp/cache")
    if wrong:
        return wrong
    if mount is None:
        return not_seen(f"/proc/self/mountinfo does not list the file system of {snapshot.home_cache}")
    if mount.kind in NETWORK:
        return note(
            f"{disk.path} is on a network file system ({mount.kind})", "export XDG_CACHE_HOME=/tmp/cache"
        )
    return ok(f"{size(disk.free_bytes)} free below {disk.path}")


QUESTIONS = (working_folder, kind_of_disk, temporary_folder, cache_folder)
