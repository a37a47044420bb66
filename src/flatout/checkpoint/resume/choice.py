"""Chooses the checkpoint to resume from, and checks that it can be used."""

import os
import sys
from pathlib import Path
from types import ModuleType

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, verified
from flatout.checkpoint.metadata import CheckpointMeta, differences, environment
from flatout.job.trust import file_digest
from flatout.schema.errors import CannotResume, CheckpointError

# Settings that a program makes, or devices that it begins to use, after torch was imported.
SET_BY_PROGRAM = (
    "threads",
    "threads between operators",
    "devices",
    "deterministic algorithms",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "matmul precision",
)


def newest(folder: Path) -> tuple[Checkpoint | None, str]:
    """Return the newest valid checkpoint of this program, with its journal, from which it can be resumed exactly.

    If there is none, also return why the newest one cannot be resumed; "" if the program was not interrupted."""
    why_not = ""
    for path in CheckpointFolder(folder).paths():
        try:
            checkpoint = verified(path)
        except CheckpointError:
            continue
        exact = CheckpointMeta.from_json(checkpoint.manifest.metadata).exact
        if (
            exact is not None
            and exact.program == tuple(sys.orig_argv[1:])
            and (folder / Path(exact.journal).name).is_file()
        ):
            if not exact.why_not:
                return checkpoint, ""
            why_not = why_not or exact.why_not
    return None, why_not


def check(torch: ModuleType, checkpoint: Checkpoint, meta: CheckpointMeta) -> None:
    """Raise CannotResume if something that affects the bits has changed, before the program has begun."""
    sources = meta.exact.sources if meta.exact is not None else {}
    changed = [name for name, digest in sources.items() if file_digest(name) != digest]
    if changed:
        raise CannotResume(
            f"{', '.join(os.path.relpath(name) for name in changed[:4])} has changed since {checkpoint.path.name} was saved"
        )
    before = meta.surroundings
    now = {**environment(torch), **{name: before.get(name) for name in SET_BY_PROGRAM}}
    if before.get("devices") and not torch.cuda.device_count():
        now["devices"] = []
    differs = differences(before, now)
    if differs:
        raise CannotResume(
            f"the environment differs from that of {checkpoint.path.name}: {'; '.join(differs)}"
        )
