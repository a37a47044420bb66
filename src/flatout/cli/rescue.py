"""`flatout rescue`: what `flatout run --rescue` has kept of a program that was not written to be saved, and how to have it back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from flatout.engine.rescue import KIND, where_of
from flatout.plan.errors import SaveError, UsageError
from flatout.plan.legible import harmless
from flatout.render.wording import count, duration, size
from flatout.state.manifest import Manifest
from flatout.state.runs import earlier_runs
from flatout.state.saves import Save, Saves, believed
from flatout.tune.session import FOLDER

RESCUE = "rescue"
MANY = {"modules": "module", "optimizers": "optimizer", "schedulers": "scheduler", "scalers": "scaler", "tensors": "tensor"}


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--to", "target", default=None, type=click.Path(path_type=Path), help="Write the newest save that can be believed into this new folder.")
@click.option("--step", default=None, type=click.IntRange(min=0), help="With --to: not the newest save, but that of this step.")
def command(folder: Path | None, target: Path | None, step: int | None) -> int:
    """List what a run with --rescue has kept, or write it as ordinary state_dict files. DIR is a job's folder; without one, the newest below .flatout."""
    if step is not None and target is None:
        raise UsageError("--step says which save is to be written. Say where: --to DIR.")
    saves = Saves(_folder(folder))
    if target is not None:
        _write(_chosen(saves, step), target)
        return 0
    for run in (saves, *map(Saves, earlier_runs(saves.folder))):
        if run is not saves:
            click.echo(f"\nof an earlier run, {run.folder}")
        else:
            click.echo(str(run.folder))
        for path in run.paths():
            click.echo(_paragraph(path))
    return 0


def _folder(given: Path | None) -> Path:
    """The folder of saves. Raises UsageError where there are none."""
    if given is None:
        found = sorted(Path(FOLDER).glob(f"*/{RESCUE}/step-*/manifest.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UsageError(f"nothing was kept below {FOLDER} here. `flatout run --rescue COMMAND...` keeps saves while a program trains.")
        return found[-1].parent.parent
    for folder in (given, given / RESCUE):
        if Saves(folder).paths():
            return folder
    raise UsageError(f"there are no saves in {given}. `flatout rescue` without a folder takes the newest job's; `ls {FOLDER}` lists the jobs.")


def _chosen(saves: Saves, step: int | None) -> Save:
    if step is None:
        save, bad = saves.newest()
        for each in bad:
            click.echo(f"flatout: {each.path} is left out: {each.why}", err=True)
    else:
        path = next((path for path in saves.paths() if int(path.name.split("-")[1]) == step), None)
        if path is None:
            raise UsageError(f"there is no save of step {step} in {saves.folder}. There are: {', '.join(path.name for path in saves.paths())}.")
        try:
            save = believed(path)
        except SaveError as error:
            raise SaveError(f"{path} cannot be believed: {error}. `flatout rescue` shows what can.") from None
    assert save is not None
    if save.manifest.kind != KIND:
        raise SaveError(f"{save.path} was not made by `flatout run --rescue`, but by {harmless(save.manifest.kind)!r}. What made it reads it.")
    return save


def _paragraph(path: Path) -> str:
    try:
        save = believed(path)
    except SaveError as error:
        return f"  {path.name}  cannot be believed: {harmless(str(error))}"
    manifest, told = save.manifest, save.manifest.told
    epoch = f", epoch {count(told['epoch'])}" if told.get("epoch") else ""
    bytes_ = sum(stored.bytes for stored in manifest.files.values())
    lines = [f"  {where_of(told, manifest.step)}{epoch}, {duration(told.get('ran_s'))} into the run, {_word(told.get('at'))}, {size(bytes_)}, believed"
             + (f" (at {_word(told['why'])})" if told.get("why") not in (None, "interval") else "")]
    lines += [f"    {_word(held.get('name'))}  {MANY.get(str(held.get('kind')), '')} {_word(held.get('type'))}"
              + (f", {count(held['values'])} values" if held.get("values") else "") for held in _held(manifest)]
    if told.get("inside"):
        moved = "an optimizer had changed some weights" if told.get("updated") else f"weights and optimizers are those of step {manifest.step}"
        lines.append(f"    taken inside a step: {moved}, running statistics and random numbers may be further")
    lines += [f"    not kept: {_word(where)} ({_word(what)})" for where, what in manifest.left_out.items()]
    return "\n".join(lines)


def _held(manifest: Manifest) -> list[Mapping[str, Any]]:
    holds = manifest.told.get("holds")
    return [held for held in holds if isinstance(held, Mapping)] if isinstance(holds, list) else []


def _word(value: Any) -> str:
    return " ".join(harmless(str(value))[:200].split())


def _write(save: Save, target: Path) -> None:
    import torch

    from flatout.state.exported import export

    state = save.read(torch)
    spelled = {str(held.get("name")): str(held.get("code")) for held in _held(save.manifest)}
    found = export(torch, state, spelled, target)
    click.echo(f"{where_of(save.manifest.told, save.step)} of {save.path} is in {target}: {', '.join(found.files)}\n", err=True)
    click.echo("\n".join(found.lines))
