"""A command whose `--help` lists its options in groups, so that common ones come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

RANKS = {
    "Several ranks on this machine": (
        "procs",
        "gpus",
        "sync_batchnorm",
        "whole_batches",
        "split_evaluation",
        "shard",
        "rehearse",
    )
}
MACHINES = {
    "Several machines": (
        "nodes",
        "node_rank",
        "rendezvous",
        "ray",
        "slurm",
        "slurm_options",
        "k8s",
        "image",
        "limits",
        "kind",
        "job_name",
    ),
}
SURVIVAL = {
    "Crashes, hangs and kills": (
        "rescue",
        "resume",
        "from_scratch",
        "replay_output",
        "supervise",
        "restarts",
        "grace",
        "hang_after",
        "on_nan",
    )
}


class Grouped(click.Command):
    """``groups`` maps a heading to names of parameters. Options in no group stay under "Options"."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        rows = {option.name: row for option in options if (row := option.get_help_record(ctx)) is not None}
        grouped = {name for names in self.groups.values() for name in names}
        for heading, names in {
            "Options": [name for name in rows if name not in grouped],
            **self.groups,
        }.items():
            shown = [rows[name] for name in names if name in rows]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)
