"""How many ranks a command line asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from flatout.plan.errors import UsageError

OPTIONS = (
    click.option("--procs", default=1, show_default=True, type=click.IntRange(1), help="As so many ranks on this machine what was written for one process."),
    click.option("--gpus", default=0, type=click.IntRange(0), help="The same with one CUDA device each."),
    click.option("--sync-batchnorm", is_flag=True, help="With several ranks: batch normalisation over the whole batch, for an exchange a layer."),
    click.option("--whole", is_flag=True, help="With several ranks: the script sees whole batches on each; all that it counts is of the whole."),
    click.option("--divide-evaluation", is_flag=True, help="With several ranks: each computes its share of what is evaluated; else all of it on every rank."),
    click.option("--shard", default="auto", show_default=True, type=click.Choice(["auto", "always", "never"]),
                 help="With several ranks: each keeps a part of weights, gradients and optimizer state; auto where they do not fit."),
    click.option("--rehearse", is_flag=True, help="With several ranks: compare them with one process once more, though it was done before."),
)


@dataclass(frozen=True)
class RanksAsked:
    """``procs`` ranks; ``gpus``: with a CUDA device each. ``sync_batchnorm``: batch normalisation looks at all ranks. ``whole``: the script sees whole
    batches. ``divide_evaluation``: each rank computes its share. ``shard``: whether each keeps a part of weights, gradients and optimizer state.
    ``again``: rehearse though it was done before.
    """

    procs: int
    gpus: bool = False
    sync_batchnorm: bool = False
    whole: bool = False
    divide_evaluation: bool = False
    shard: str = "auto"
    again: bool = False

    @property
    def words(self) -> dict[str, str]:
        """Of the value of `data_parallel`, those that a person decides."""
        return {**({"batchnorm": "all"} if self.sync_batchnorm else {}), **({"evaluation": "divided"} if self.divide_evaluation else {})}

    @property
    def several(self) -> bool:
        return self.procs > 1

    @property
    def at_least_two(self) -> RanksAsked:
        """Where nodes have one rank each, two of them are rehearsed here."""
        return self if self.several else replace(self, procs=2)

    @property
    def title(self) -> str:
        """What a plan is made for; "" for one process."""
        return f"{self.procs} {'GPUs' if self.gpus else 'processes'}" if self.several else ""


def options(command: Callable) -> Callable:
    """The options that say how many ranks; ``ranks_asked`` reads them."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def ranks_asked(given: dict[str, Any]) -> RanksAsked:
    """Takes the values of the options out of ``given``. Raises UsageError."""
    procs, gpus = given.pop("procs"), given.pop("gpus")
    if gpus and procs > 1 and gpus != procs:
        raise UsageError(f"--procs {procs} and --gpus {gpus} do not agree; --gpus {gpus} alone starts {gpus} ranks with a GPU each.")
    return RanksAsked(max(procs, gpus), bool(gpus), again=given.pop("rehearse"),
                      **{name: given.pop(name) for name in ("sync_batchnorm", "whole", "divide_evaluation", "shard")})
