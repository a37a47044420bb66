"""The rank of this process, read from its environment. Does not need torch.

FLATOUT_RANK, FLATOUT_LOCAL_RANK, FLATOUT_WORLD_SIZE, FLATOUT_LOCAL_WORLD_SIZE    numbers
FLATOUT_RENDEZVOUS    rendezvous of the ranks: ``file:///folder/rendezvous`` (a torch FileStore), or
                   ``tcp://host:port/round`` (a torch TCPStore with an external server: all ranks are clients).
                   The server may outlive a restart of the ranks, so each round has its own keys
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLES = {
    "rank": "FLATOUT_RANK",
    "local_rank": "FLATOUT_LOCAL_RANK",
    "world_size": "FLATOUT_WORLD_SIZE",
    "local_world_size": "FLATOUT_LOCAL_WORLD_SIZE",
}
RENDEZVOUS = "FLATOUT_RENDEZVOUS"
# Variables by which a distributed program finds other ranks: those of torchrun, Slurm's steps and MPI's
# launchers (Lightning, Accelerate, DeepSpeed and Transformers read them all).
RANK_VARIABLES = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "PMI_RANK",
        "PMI_SIZE",
        "PMIX_RANK",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
    )
)
RANK_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")


@dataclass(frozen=True)
class RankEnvironment:
    """A rank among ``world_size`` ranks.

    On its machine it is ``local_rank`` among ``local_world_size`` ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    rendezvous: str

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give a process this rank."""
        return {name: str(getattr(self, field)) for field, name in VARIABLES.items()} | {
            RENDEZVOUS: self.rendezvous
        }


def this_rank(environment: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return the rank of this process, or None if it is the only one."""
    variables = os.environ if environment is None else environment
    if RENDEZVOUS not in variables or not all(name in variables for name in VARIABLES.values()):
        return None
    return RankEnvironment(
        **{field: int(variables[name]) for field, name in VARIABLES.items()}, rendezvous=variables[RENDEZVOUS]
    )


def rank_number() -> int:
    """Return the rank of this process, given by flatout or by another launcher (RANK); 0 if it is the only one."""
    rank = this_rank()
    return rank.rank if rank is not None else int(os.environ.get("RANK") or 0)


def first_on_node() -> bool:
    """Return whether this is the first rank of its machine; True if it is the only one."""
    rank = this_rank()
    return not (rank.local_rank if rank is not None else int(os.environ.get("LOCAL_RANK") or rank_number()))


def launcher_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that would reveal other ranks to a single-process program."""
    return [name for name in environment if name in RANK_VARIABLES or name.startswith(RANK_PREFIXES)]
