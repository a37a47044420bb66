"""`flatout rescue`: list and export the checkpoints that `flatout run --rescue` keeps of any program."""

from pathlib import Path

import click

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, earlier_runs, step_of, verified
from flatout.checkpoint.metadata import CheckpointMeta
from flatout.checkpoint.rescue import KIND
from flatout.cli.options.output import json_option, print_json
from flatout.job.folder import FOLDER
from flatout.job.sanitize import sanitize
from flatout.render.formatting import count, duration, size
from flatout.schema.errors import CheckpointError, UsageError
from flatout.schema.outputs import CheckpointEntry, CheckpointsRecord, ExportRecord
from flatout.tune.plan_files import newest_file

RESCUE = "rescue"


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    help="Write the newest valid checkpoint into this new folder.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step of the checkpoint to write, instead of the newest; needs --to.",
)
@json_option
def command(folder: Path | None, target: Path | None, step: int | None, as_json: bool) -> int:
    """List the checkpoints of `flatout run --rescue`, or write one as ordinary state_dict files.

    DIR is a job's folder. The default is the newest folder below .flatout."""
    if step is not None and target is None:
        raise UsageError("--step selects the checkpoint to write, so it needs a folder: --to DIR.")
    checkpoints = CheckpointFolder(_folder(folder))
    if target is not None:
        _write(_select(checkpoints, step), target, as_json)
        return 0
    runs = (checkpoints, *map(CheckpointFolder, earlier_runs(checkpoints.folder)))
    if as_json:
        print_json(CheckpointsRecord([_entry(path) for run in runs for path in run.paths()]))
        return 0
    for run in runs:
        click.echo(run.folder if run is checkpoints else f"\nfrom an earlier run, {run.folder}")
        for path in run.paths():
            click.echo(_paragraph(path))
    return 0


def _folder(path: Path | None) -> Path:
    """Return the folder of checkpoints. Raises UsageError if there are none."""
    if path is None:
        manifest = newest_file(f"{RESCUE}/step-*/manifest.json")
        if manifest is None:
            raise UsageError(
                f"there are no checkpoints below {FOLDER} here. `flatout run --rescue COMMAND...` keeps checkpoints while a program trains."
            )
        return manifest.parent.parent
    for folder in (path, path / RESCUE):
        if CheckpointFolder(folder).paths():
            return folder
    raise UsageError(
        f"there are no checkpoints in {path}. `flatout rescue` without a folder reads the newest job; `ls {FOLDER}` lists the jobs."
    )


def _select(checkpoints: CheckpointFolder, step: int | None) -> Checkpoint:
    if step is None:
        checkpoint, invalid = checkpoints.newest()
        for skipped in invalid:
            click.echo(f"flatout: skipped {skipped.path}: {skipped.why}", err=True)
    else:
        path = next((path for path in checkpoints.paths() if step_of(path) == step), None)
        if path is None:
            raise UsageError(
                f"there is no checkpoint of step {step} in {checkpoints.folder}. Available: {', '.join(path.name for path in checkpoints.paths())}."
            )
        try:
            checkpoint = verified(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is not valid: {error}. `flatout rescue` lists the valid checkpoints."
            ) from None
    assert checkpoint is not None
    if checkpoint.manifest.kind != KIND:
        raise CheckpointError(
            f"{checkpoint.path} was written by {sanitize(checkpoint.manifest.kind)!r}, not by `flatout run --rescue`. Read it with the program that wrote it."
        )
    return checkpoint


def _entry(path: Path) -> CheckpointEntry:
    try:
        checkpoint = verified(path)
    except CheckpointError as error:
        return CheckpointEntry(str(path), step_of(path), valid=False, why_not=str(error))
    manifest, meta = checkpoint.manifest, CheckpointMeta.from_json(checkpoint.manifest.metadata)
    return CheckpointEntry(
        str(path),
        manifest.step,
        valid=True,
        mid_step=meta.inside,
        updated=meta.updated,
        process_age_s=meta.ran_s,
        created=meta.at,
        trigger=meta.why,
        total_bytes=sum(stored.bytes for stored in manifest.files.values()),
        contents=[vars(item) for item in meta.holds],
        left_out=dict(manifest.left_out),
    )


def _paragraph(path: Path) -> str:
    entry = _entry(path)
    if not entry.valid:
        return f"  {path.name}  not valid: {sanitize(entry.why_not)}"
    position = f"step {entry.step + 1} (in progress)" if entry.mid_step else f"step {entry.step}"
    why = f" (at {_one_line(entry.trigger)})" if entry.trigger not in ("", "interval") else ""
    lines = [
        f"  {position}, {duration(entry.process_age_s)} into the run, {_one_line(entry.created)}, {size(entry.total_bytes)}, verified{why}"
    ]
    lines += [
        f"    {_one_line(item['name'])}  {_one_line(item['kind']).removesuffix('s')} {_one_line(item['type'])}"
        + (f", {count(item['values'])} values" if item["values"] else "")
        for item in entry.contents
    ]
    if entry.mid_step:
        weights = f"weights and optimizers are those of step {entry.step}"
        if entry.updated:
            weights = "an optimizer had already updated some weights"
        lines.append(
            f"    taken inside a step: {weights}; running statistics and random numbers may be ahead"
        )
    lines += [
        f"    not kept: {_one_line(name)} ({_one_line(reason)})" for name, reason in entry.left_out.items()
    ]
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(sanitize(text)[:200].split())


def _write(checkpoint: Checkpoint, target: Path, as_json: bool) -> None:
    import torch

    from flatout.checkpoint.exported import export

    state = checkpoint.read(torch)
    meta = CheckpointMeta.from_json(checkpoint.manifest.metadata)
    code_by_name = {item.name: item.code for item in meta.holds}
    exported = export(torch, state, code_by_name, target)
    click.echo(
        f"{meta.position(checkpoint.step)} of {checkpoint.path} is in {target}: {', '.join(exported.files)}\n",
        err=True,
    )
    if as_json:
        print_json(
            ExportRecord(str(checkpoint.path), checkpoint.step, str(target), exported.files, exported.lines)
        )
    else:
        click.echo("\n".join(exported.lines))
