"""Failures of ranks that cannot connect to each other."""

from __future__ import annotations

import re

from flatout.diagnose.kind import DIST, Diagnosis, kind, match_message
from flatout.schema.failure import FailureRecord


@kind("FE082", "port-in-use")
def port_in_use(failure: FailureRecord) -> Diagnosis | None:
    """The rendezvous port is in use.

    What:
        The ranks connect to a port on rank 0's machine, and another process already listens on it.
    Why it happens:
        Another training run on this machine uses the default port (29500), or an earlier run has left a
        process behind.
    How to fix it:
        `torchrun --standalone` (one machine) finds a free port. Otherwise use `--master-port` with another
        number. `ss -ltnp` shows the process that listens.
    Sources:
        https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    found = match_message(
        failure,
        (*DIST, "OSError"),
        r"The server socket has failed to (?:listen on any local network address|bind)\.(?:.*?port: (?P<port>\d+))?.*?(?:EADDRINUSE|address already in use)",
        r"The server socket has failed to listen on any local network address\.(?:.*?(?:port: |\[::\]:|0\.0\.0\.0:)(?P<port>\d+))?",
        r"(?:\[Errno 98\] )?Address already in use",
        r".{0,300}?EADDRINUSE",
    )
    if found is None or (found.thrown.type == "OSError" and not _meets(failure)):
        return None
    port = found["port"] or next(
        (match[1] for match in [re.search(r"(?:port: ?|:)(\d{4,5})\b", found.thrown.message)] if match), ""
    )
    return Diagnosis(
        f"port {port} is in use by another process"
        if port
        else "the rendezvous port is in use by another process",
        "torchrun --standalone --nproc-per-node=N train.py     # on one machine: finds a free port\n"
        f"ss -ltnp 'sport = :{port or 29500}'                        # shows the process that listens, perhaps left by an earlier run",
    )


def _meets(failure: FailureRecord) -> bool:
    return any("distributed" in frame.file for thrown in failure.chain for frame in thrown.frames)


@kind("FE083", "rank-without-address")
def rank_without_address(failure: FailureRecord) -> Diagnosis | None:
    """A rank has no rendezvous address.

    What:
        `init_process_group` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and one of them is not set.
    Why it happens:
        The script was started with `python` and needs `torchrun`.
    How to fix it:
        `torchrun --standalone --nproc-per-node=N train.py`, which sets all of them.
    Sources:
        https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
    """
    found = match_message(
        failure,
        ("ValueError", "KeyError"),
        r"Error initializing torch\.distributed using env:// rendezvous: environment variable (?P<name>\w+) expected, but not set",
        r"'(?P<name>LOCAL_RANK|WORLD_SIZE|RANK|MASTER_ADDR|MASTER_PORT)'$",
    )
    if found is None or (
        "KeyError" in found.thrown.names
        and not any(frame.file.endswith(("os.py", "<frozen os>")) for frame in found.thrown.frames)
    ):
        return None
    return Diagnosis(
        f"{found['name']} is not set: start the script with torchrun",
        "torchrun --standalone --nproc-per-node=N train.py",
    )


COMMON = (
    "Socket Timeout",
    "connect() timed out",
    "failed to connect to",
    "wait timeout after",
)  # messages shared by many libraries


@kind("FE084", "rendezvous-timeout")
def rendezvous_timeout(failure: FailureRecord) -> Diagnosis | None:
    """The ranks did not connect to each other.

    What:
        A rank waited at the rendezvous, or tried to connect to it, and not all other ranks joined in time.
    Why it happens:
        A rank died earlier, fewer ranks were started than WORLD_SIZE says, other machines cannot reach
        MASTER_ADDR, or a firewall blocks the connection.
    How to fix it:
        Look at the first error of the other ranks. Between machines, run `nc -vz $MASTER_ADDR $MASTER_PORT`
        on each of them.
    Sources:
        https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
    """
    found = match_message(
        failure,
        (*DIST, "TimeoutError", "RendezvousTimeoutError", "RendezvousConnectionError"),
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<wanted>\d+) clients joined",
        r"The client socket has timed out after (?P<ms>\d+)\s?ms while trying to connect to \((?P<host>[^,()]+), (?P<port>\d+)\)",
        r"The client socket has failed to connect to any network address of \((?P<host>[^,()]+), (?P<port>\d+)\)",
        r"The connection to the C10d store has failed",
        r"wait timeout after (?P<ms>\d+)ms, keys:",
        r"Timed out waiting for clients",
        r"Socket Timeout",
        r"connect\(\) timed out",
        r"Gloo connectFullMesh failed with",
        r"failed to connect to (?P<host>\S+?):(?P<port>\d+)",
        r"The IPv[46] network addresses of \((?P<host>[^,()]+), (?P<port>\d+)\) cannot be retrieved",
    )
    if found is None or (
        found.thrown.message.startswith(COMMON)
        and not found.thrown.type.startswith(("torch.", "Dist"))
        and not _meets(failure)
    ):
        return None
    if found["came"]:
        said = f"{found['came']} of {found['wanted']} ranks joined within {found['seconds']} seconds"
    elif found["host"]:
        said = f"no answer from {found['host']}:{found['port']}" + (
            f" within {found.number('ms') / 1000:g} seconds" if found["ms"] else ""
        )
    else:
        said = "this rank timed out waiting for the other ranks"
    return Diagnosis(
        said,
        "look at the FIRST error of the other ranks: usually one died before it could connect\n"
        f"nc -vz {found['host'] or '$MASTER_ADDR'} {found['port'] or '$MASTER_PORT'}   # on each machine: can it reach rank 0?",
    )


@kind("FE085", "no-process-group")
def no_process_group(failure: FailureRecord) -> Diagnosis | None:
    """The process group is not initialised.

    What:
        A function of `torch.distributed` was called before `init_process_group`.
    Why it happens:
        A script for several ranks was started as a single process. Or a DistributedSampler, `barrier` or
        `get_rank` call comes before the initialisation.
    How to fix it:
        Check `dist.is_initialized()` first, or start the script with torchrun and call `init_process_group`
        at its beginning.
    Sources:
        https://docs.pytorch.org/docs/stable/distributed.html#initialization
    """
    found = match_message(
        failure,
        ("ValueError", "RuntimeError"),
        r"Default process group has not been initialized, please make sure to call init_process_group",
    )
    if found is None:
        return None
    return Diagnosis(
        "a function of torch.distributed was called before init_process_group",
        "rank = dist.get_rank() if dist.is_initialized() else 0\ntorchrun --standalone --nproc-per-node=N train.py   # and call init_process_group() first",
    )
