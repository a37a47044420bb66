"""The command-line options for ranks: their number and how the program is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from flatout.cli.options.arguments import add_options, ranks_option
from flatout.schema.errors import UsageError

add_rank_options = add_options(
    ranks_option(
        "--procs",
        type=click.IntRange(1),
        help="Number of ranks on this machine, for a single-process script.  [default: 1]",
    ),
    ranks_option(
        "--gpus",
        default=0,
        type=click.IntRange(0),
        help="Number of ranks on this machine, each with its own CUDA device.",
    ),
    ranks_option(
        "--sync-batchnorm",
        is_flag=True,
        help="Normalise over the whole batch of all ranks; costs one exchange per layer.",
    ),
    ranks_option(
        "--whole-batches",
        is_flag=True,
        help="Show the script whole batches on each rank, so that its counts cover all ranks.",
    ),
    ranks_option(
        "--shard",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "always", "never"]),
        help="Shard weights, gradients and optimizer state over the ranks; auto: if they do not fit.",
    ),
    ranks_option(
        "--rehearse",
        is_flag=True,
        help="Compare the ranks with one process again, even if an earlier rehearsal exists.",
    ),
)


@dataclass(frozen=True)
class RankOptions:
    """The rank options of a command line.

    ``procs`` is the number of ranks; ``gpus`` gives each its own CUDA device. ``explicit``: the command line
    has a number of ranks, perhaps 1. ``sync_batchnorm`` normalises over all ranks. ``whole_batches`` shows the script
    whole batches. ``shard`` says whether weights, gradients and optimizer state are sharded. ``rehearse_again``
    ignores an earlier rehearsal."""

    procs: int
    gpus: bool = False
    sync_batchnorm: bool = False
    whole_batches: bool = False
    shard: str = "auto"
    rehearse_again: bool = False
    explicit: bool = False

    @property
    def lever_options(self) -> dict[str, str]:
        """The user's choices in the value of the lever `data_parallel`."""
        return {"batchnorm": "all"} if self.sync_batchnorm else {}

    @property
    def several(self) -> bool:
        return self.procs > 1

    @property
    def at_least_two(self) -> RankOptions:
        """The same with at least two ranks, to rehearse on one machine when each node has one rank."""
        return self if self.several else replace(self, procs=2)

    @property
    def title(self) -> str:
        """The ranks that a plan is made for; "" for one process."""
        return f"{self.procs} {'GPUs' if self.gpus else 'processes'}" if self.several else ""


def read_rank_options(options: dict[str, Any]) -> RankOptions:
    """Remove the rank options from ``options`` and return them. Raises UsageError."""
    procs, gpus = options.pop("procs"), options.pop("gpus")
    explicit = procs is not None or gpus > 0
    procs = procs or 1
    if gpus and procs > 1 and gpus != procs:
        raise UsageError(
            f"--procs {procs} and --gpus {gpus} disagree; --gpus {gpus} alone starts {gpus} ranks with one GPU each."
        )
    return RankOptions(
        max(procs, gpus),
        bool(gpus),
        rehearse_again=options.pop("rehearse"),
        explicit=explicit,
        **{name: options.pop(name) for name in ("sync_batchnorm", "whole_batches", "shard")},
    )
