"""Chooses the checkpoint to resume from, and checks that it can be used."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from flatout.checkpoint.checkpoint import Checkpoint, verified
from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.environment import differences, environment
from flatout.checkpoint.metadata import CheckpointMeta, RankCounts
from flatout.checkpoint.resume.ranks import ResumeRanks
from flatout.schema.errors import CannotResume, SaveError

# Settings that a program makes, or devices that it begins to use, after torch was imported.
LATER = (
    "threads",
    "threads between operators",
    "devices",
    "deterministic algorithms",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "matmul precision",
)


def newest(ranks: ResumeRanks) -> tuple[Checkpoint | None, str]:
    """Return the newest checkpoint of this rank from which all ranks can be resumed exactly.

    If there is none, also return why the newest one cannot be resumed; "" if the program was not interrupted.
    """
    return newest_of_one(ranks.folder) if ranks.size == 1 else newest_of_all(ranks)


def newest_of_one(folder: Path) -> tuple[Checkpoint | None, str]:
    """Do it for a program of one process."""
    why_not = ""
    for save, meta in _of_this_program(folder):
        if meta.resumes:
            return save, ""
        why_not = why_not or (meta.exact.why_not if meta.exact is not None else "")
    return None, why_not


def newest_of_all(ranks: ResumeRanks) -> tuple[Checkpoint | None, str]:
    """Do it for checkpoints that all ranks wrote at one moment. Every rank finds the same step."""
    kept = [{save.step: (save, meta) for save, meta in _of_this_program(each)} for each in ranks.folders]
    why_not = ""
    for step in sorted(set.intersection(*map(set, kept)), reverse=True):
        exact = [meta.exact for _, meta in (of_rank[step] for of_rank in kept)]
        if not _are_of_one_moment([each.ranks if each is not None else None for each in exact]):
            continue
        reasons = [each.why_not for each in exact if each is not None]
        if not any(reasons):
            return kept[ranks.rank][step][0], ""
        why_not = why_not or next(filter(None, reasons))
    return None, why_not or ("its ranks have no checkpoints from the same moment" if any(kept) else "")


def _are_of_one_moment(counts: list[RankCounts | None]) -> bool:
    """Return whether all ranks ran equally many collectives per group and began to train at one place."""
    present = [each for each in counts if each is not None]
    if len(present) != len(counts) or {each.size for each in present} != {len(counts)}:
        return False
    if len({each.launch for each in present}) != 1:
        return False
    return all(
        len({of_rank[group] for of_rank in by_rank if group in of_rank}) == 1
        for by_rank in ([each.met for each in present], [each.begun for each in present])
        for group in {group for of_rank in by_rank for group in of_rank}
    )


def _of_this_program(folder: Path) -> Iterator[tuple[Checkpoint, CheckpointMeta]]:
    """Yield the valid checkpoints that have their journal, newest first, with their metadata."""
    for path in CheckpointFolder(folder).paths():
        try:
            save = verified(path)
        except SaveError:
            continue
        meta = CheckpointMeta.from_json(save.manifest.metadata)
        if (
            meta.exact is not None
            and meta.exact.program == tuple(sys.orig_argv[1:])
            and (folder / Path(meta.exact.journal).name).is_file()
        ):
            yield save, meta


def check(torch: ModuleType, save: Checkpoint, meta: CheckpointMeta) -> None:
    """Raise CannotResume if something that affects the bits has changed, before the program has begun."""
    sources = meta.exact.sources if meta.exact is not None else {}
    changed = [name for name, digest in sources.items() if digest_of(name) != digest]
    if changed:
        raise CannotResume(
            f"{', '.join(os.path.relpath(name) for name in changed[:4])} has changed since {save.path.name} was saved"
        )
    before = meta.surroundings
    now = {**environment(torch), **{name: before.get(name) for name in LATER}}
    if before.get("devices") and not torch.cuda.device_count():
        now["devices"] = []
    differs = differences(before, now)
    if differs:
        raise CannotResume(f"the environment differs from that of {save.path.name}: {'; '.join(differs)}")


def digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""
