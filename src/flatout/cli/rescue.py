"""`flatout rescue`: list and export the checkpoints that `flatout run --rescue` keeps of any program."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.checkpoint.checkpoint import Checkpoint, verified
from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.metadata import CheckpointMeta
from flatout.checkpoint.rescue_writer import KIND
from flatout.checkpoint.runs import earlier_runs
from flatout.cli.options.json_output import json_option, print_json
from flatout.job.folder import FOLDER
from flatout.job.sanitize import sanitize
from flatout.render.formatting import count, duration, size
from flatout.schema.errors import SaveError, UsageError
from flatout.schema.outputs import CheckpointEntry, CheckpointsRecord, ExportRecord
from flatout.tune.plan_files import newest

RESCUE = "rescue"
MANY = {
    "modules": "module",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "scalers": "scaler",
    "tensors": "tensor",
}


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    default=None,
    type=click.Path(path_type=Path),
    help="Write the newest valid checkpoint into this new folder.",
)
@click.option(
    "--step",
    default=None,
    type=click.IntRange(min=0),
    help="Step of the checkpoint to write, instead of the newest; needs --to.",
)
@json_option
def command(folder: Path | None, target: Path | None, step: int | None, as_json: bool) -> int:
    """List the checkpoints of `flatout run --rescue`, or write one as ordinary state_dict files.

    DIR is a job's folder. The default is the newest folder below .flatout.
    """
    if step is not None and target is None:
        raise UsageError("--step selects the checkpoint to write, so it needs a folder: --to DIR.")
    saves = CheckpointFolder(_folder(folder))
    if target is not None:
        _write(_chosen(saves, step), target, as_json)
        return 0
    runs = (saves, *map(CheckpointFolder, earlier_runs(saves.folder)))
    if as_json:
        print_json(CheckpointsRecord([_seen(path) for run in runs for path in run.paths()]))
        return 0
    for run in runs:
        if run is not saves:
            click.echo(f"\nfrom an earlier run, {run.folder}")
        else:
            click.echo(str(run.folder))
        for path in run.paths():
            click.echo(_paragraph(path))
    return 0


def _folder(given: Path | None) -> Path:
    """Return the folder of checkpoints. Raises UsageError if there are none."""
    if given is None:
        found = newest(f"{RESCUE}/step-*/manifest.json")
        if found is None:
            raise UsageError(
                f"there are no checkpoints below {FOLDER} here. `flatout run --rescue COMMAND...` keeps checkpoints while a program trains."
            )
        return found.parent.parent
    for folder in (given, given / RESCUE):
        if CheckpointFolder(folder).paths():
            return folder
    raise UsageError(
        f"there are no checkpoints in {given}. `flatout rescue` without a folder reads the newest job; `ls {FOLDER}` lists the jobs."
    )


def _chosen(saves: CheckpointFolder, step: int | None) -> Checkpoint:
    if step is None:
        save, bad = saves.newest()
        for each in bad:
            click.echo(f"flatout: skipped {each.path}: {each.why}", err=True)
    else:
        path = next((path for path in saves.paths() if int(path.name.split("-")[1]) == step), None)
        if path is None:
            raise UsageError(
                f"there is no checkpoint of step {step} in {saves.folder}. Available: {', '.join(path.name for path in saves.paths())}."
            )
        try:
            save = verified(path)
        except SaveError as error:
            raise SaveError(
                f"{path} is not valid: {error}. `flatout rescue` lists the valid checkpoints."
            ) from None
    assert save is not None
    if save.manifest.kind != KIND:
        raise SaveError(
            f"{save.path} was written by {sanitize(save.manifest.kind)!r}, not by `flatout run --rescue`. Read it with the program that wrote it."
        )
    return save


def _seen(path: Path) -> CheckpointEntry:
    step = int(path.name.split("-")[1])
    try:
        save = verified(path)
    except SaveError as error:
        return CheckpointEntry(str(path), step, valid=False, why_not=str(error))
    manifest, meta = save.manifest, CheckpointMeta.from_json(save.manifest.metadata)
    return CheckpointEntry(
        str(path),
        manifest.step,
        valid=True,
        inside=meta.inside,
        updated=meta.updated,
        ran_s=meta.ran_s,
        at=meta.at,
        why=meta.why,
        total_bytes=sum(stored.bytes for stored in manifest.files.values()),
        holds=[vars(kept) for kept in meta.holds],
        left_out=dict(manifest.left_out),
    )


def _paragraph(path: Path) -> str:
    seen = _seen(path)
    if not seen.valid:
        return f"  {path.name}  not valid: {sanitize(seen.why_not)}"
    position = f"step {seen.step + 1} (in progress)" if seen.inside else f"step {seen.step}"
    why = f" (at {_word(seen.why)})" if seen.why not in ("", "interval") else ""
    lines = [
        f"  {position}, {duration(seen.ran_s)} into the run, {_word(seen.at)}, {size(seen.total_bytes)}, verified{why}"
    ]
    lines += [
        f"    {_word(kept['name'])}  {MANY.get(kept['kind'], '')} {_word(kept['type'])}"
        + (f", {count(kept['values'])} values" if kept["values"] else "")
        for kept in seen.holds
    ]
    if seen.inside:
        moved = (
            "an optimizer had already updated some weights"
            if seen.updated
            else f"weights and optimizers are those of step {seen.step}"
        )
        lines.append(f"    taken inside a step: {moved}; running statistics and random numbers may be ahead")
    lines += [f"    not kept: {_word(where)} ({_word(what)})" for where, what in seen.left_out.items()]
    return "\n".join(lines)


def _word(text: str) -> str:
    return " ".join(sanitize(text)[:200].split())


def _write(save: Checkpoint, target: Path, as_json: bool) -> None:
    import torch

    from flatout.checkpoint.exported import export

    state = save.read(torch)
    meta = CheckpointMeta.from_json(save.manifest.metadata)
    spelled = {kept.name: kept.code for kept in meta.holds}
    found = export(torch, state, spelled, target)
    click.echo(
        f"{meta.position(save.step)} of {save.path} is in {target}: {', '.join(found.files)}\n",
        err=True,
    )
    if as_json:
        print_json(ExportRecord(str(save.path), save.step, str(target), found.files, found.lines))
    else:
        click.echo("\n".join(found.lines))
