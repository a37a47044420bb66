"""Failures of ranks: missing gradients, no connection, waits for each other, the launcher's summary."""

import re

from flatout.diagnose.kind import (
    DISTRIBUTED_ERRORS,
    MESSAGE_END,
    Diagnosis,
    Form,
    MessageMatch,
    frame_matches,
    kind,
    match_message,
    pattern_kind,
)
from flatout.schema.failure import FailureRecord

unused_parameters = pattern_kind(
    "FE080",
    "unused-parameters",
    """Some parameters have no gradient under DistributedDataParallel.
    A part of the model is not used (a head, a branch that depends on the data), or outputs of `forward` do not
    enter the loss. The ranks wait for the gradient of every parameter before the all-reduce.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html""",
    Form(
        "parameters without a gradient in the last step[[ on rank {rank}]]: {who|some parameters}",
        "for p in unused.parameters(): p.requires_grad_(False)            # for parts that are never used\n"
        "DistributedDataParallel(model, find_unused_parameters=True)      # for parts used in some steps; costs a traversal of the graph\n"
        "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ... train.py             # names them",
        r"Expected to have finished reduction in the prior iteration before starting a new one\.(?:.*?did not receive grad for rank "
        r"(?P<rank>\d+): ?(?P<which>[\d ,]+))?"
        r"(?:.*?Parameters which did not receive grad for rank \d+: (?P<names>[\w., ]+))?",
    ),
    values=lambda _, match: {
        "who": match["names"]
        or (
            match["which"]
            and f"number {', '.join(re.findall(r'[0-9]+', match['which']))} of `list(model.named_parameters())`"
        )
    },
)

ready_twice = pattern_kind(
    "FE081",
    "ready-twice",
    """A parameter was used twice under DistributedDataParallel.
    Reentrant activation checkpointing covers a layer that is used twice, several backward passes go through
    one forward pass, or a parameter is used inside and outside the wrapped model.
    https://docs.pytorch.org/docs/stable/checkpoint.html""",
    Form(
        "parameter {index|}[[ ({name})]] of `list(model.named_parameters())` was used again after its gradient had been marked as complete",
        "checkpoint(block, x, use_reentrant=False)\n(loss_a + loss_b).backward()                             # one backward pass for one forward pass\n"
        "DistributedDataParallel(model, static_graph=True)        # if every step uses the same parameters",
        r"Expected to mark a variable ready only once\..*?Parameter at index (?P<index>\d+)(?: with name (?P<name>[\w.]+))? has been marked as ready twice",
    ),
    Form(
        "a parameter was used again after its gradient had been marked as complete",
        "checkpoint(block, x, use_reentrant=False)",
        r"Expected to mark a variable ready only once\.",
        r"Your training graph has changed in this iteration",
    ),
)

TORCHRUN = "torchrun --standalone --nproc-per-node=N train.py"
port_in_use = pattern_kind(
    "FE082",
    "port-in-use",
    """The rendezvous port is in use.
    Another training run on this machine uses the default port (29500), or an earlier run has left a process
    behind. The ranks connect to a port on rank 0's machine.
    https://docs.pytorch.org/docs/stable/elastic/run.html""",
    Form(
        "port {port} is in use by another process",
        f"{TORCHRUN}     # on one machine: finds a free port; or choose another with --master-port\n"
        "ss -ltnp 'sport = :{port|29500}'                        # shows the process that listens, perhaps left by an earlier run",
        r"The server socket has failed to (?:listen on any local network address|bind)\..*?(?:port: |\[::\]:|0\.0\.0\.0:)(?P<port>\d+)",
    ),
    Form(
        "the rendezvous port is in use by another process",
        f"{TORCHRUN}     # on one machine: finds a free port; or choose another with --master-port",
        r"The server socket has failed to listen on any local network address\.",
        r"(?:\[Errno 98\] )?Address already in use",
        r".{0,300}?EADDRINUSE",
    ),
    types=(*DISTRIBUTED_ERRORS, "OSError"),
    when=lambda failure, match: match.error.type != "OSError" or frame_matches(failure, "distributed"),
)

rank_without_address = pattern_kind(
    "FE083",
    "rank-without-address",
    """A rank has no rendezvous address.
    The script was started with `python` and needs `torchrun`, which sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT.
    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization""",
    Form(
        "{name} is not set: start the script with torchrun",
        TORCHRUN,
        r"Error initializing torch\.distributed using env:// rendezvous: environment variable (?P<name>\w+) expected, but not set",
        r"'(?P<name>LOCAL_RANK|WORLD_SIZE|RANK|MASTER_ADDR|MASTER_PORT)'$",
    ),
    types=("ValueError", "KeyError"),
    when=lambda failure, match: (
        "KeyError" not in match.error.class_names
        or any(frame.file.endswith(("os.py", "<frozen os>")) for frame in match.error.frames)
    ),
)

# Messages shared by many libraries.
COMMON_MESSAGES = ("Socket Timeout", "connect() timed out", "failed to connect to", "wait timeout after")
FIRST_ERROR = "look at the FIRST error of the other ranks: usually one died before it could connect\n"


def _is_from_torch(failure: FailureRecord, match: MessageMatch) -> bool:
    error = match.error
    return (
        not error.message.startswith(COMMON_MESSAGES)
        or error.type.startswith(("torch.", "Dist"))
        or frame_matches(failure, "distributed")
    )


rendezvous_timeout = pattern_kind(
    "FE084",
    "rendezvous-timeout",
    """The ranks did not connect to each other.
    A rank died earlier, fewer ranks were started than WORLD_SIZE says, other machines cannot reach MASTER_ADDR,
    or a firewall blocks the connection.
    https://docs.pytorch.org/docs/stable/elastic/rendezvous.html""",
    Form(
        "{came} of {wanted} ranks joined within {seconds} seconds",
        FIRST_ERROR + "nc -vz $MASTER_ADDR $MASTER_PORT   # on each machine: can it reach rank 0?",
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<wanted>\d+) clients joined",
    ),
    Form(
        "no answer from {host}:{port}[[ within {ms} ms]]",
        FIRST_ERROR
        + "nc -vz {host|$MASTER_ADDR} {port|$MASTER_PORT}   # on each machine: can it reach rank 0?",
        r"The client socket has timed out after (?P<ms>\d+)\s?ms while trying to connect to \((?P<host>[^,()]+), (?P<port>\d+)\)",
        r"The client socket has failed to connect to any network address of \((?P<host>[^,()]+), (?P<port>\d+)\)",
        r"failed to connect to (?P<host>\S+?):(?P<port>\d+)",
        r"The IPv[46] network addresses of \((?P<host>[^,()]+), (?P<port>\d+)\) cannot be retrieved",
    ),
    Form(
        "this rank timed out waiting for the other ranks",
        FIRST_ERROR + "nc -vz $MASTER_ADDR $MASTER_PORT   # on each machine: can it reach rank 0?",
        r"The connection to the C10d store has failed",
        r"wait timeout after \d+ms, keys:",
        r"Timed out waiting for clients",
        r"Socket Timeout",
        r"connect\(\) timed out",
        r"Gloo connectFullMesh failed with",
    ),
    types=(*DISTRIBUTED_ERRORS, "TimeoutError", "RendezvousTimeoutError", "RendezvousConnectionError"),
    when=_is_from_torch,
)


NCCL_TIMEOUT = (
    r"(?:\[PG[^\]]*\])?\s?\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<what>\w+)"
    r"(?:, NumelIn=(?P<numel>\d+))?.*?Timeout\(ms\)=(?P<limit>\d+)\) ran for (?P<ms>\d+) milliseconds before timing out"
)
PROGRESS = r"[Rr]ank (?P<rank>\d+)\]? .{0,200}?last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+), last completed(?: NCCL)? work: (?P<completed>-?\d+)"


@kind("FE086", "nccl-timeout")
def nccl_timeout(failure: FailureRecord) -> Diagnosis | None:
    """A collective operation timed out.

    Why it happens:
        One rank died, hangs or is far behind (validation or checkpointing on rank 0 only, a slow data set).
        Or the ranks do not call the same operations in the same order (an `if rank == 0` around one, a
        different number of batches on each rank).
    How to fix it:
        Look at the rank that is missing from the time-outs, or whose last completed number is the smallest. A
        longer `timeout=` helps only if a rank is slow on purpose.
    Sources:
        https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
        https://docs.pytorch.org/docs/stable/torch.distributed.html#debugging-torch-distributed-applications"""
    raised = match_message(
        failure,
        NCCL_TIMEOUT,
        rf"(?:NCCL (?:collective (?:operation )?)?time-?out|Watchdog caught collective operation timeout){MESSAGE_END}",
    )
    lines = [*failure.log_lines, *(line for error in failure.chain for line in error.message.split("\n"))]
    timeouts = {int(match["rank"]): match for line in lines if (match := re.search(NCCL_TIMEOUT, line))}
    if raised is None and not (
        timeouts
        and all(not error.frames or "Dist" in error.type or "Child" in error.type for error in failure.chain)
    ):
        return None
    timeout = next(iter(timeouts.values()), None)
    seen = timeout or raised
    what = seen["what"] if seen else ""
    completed = {
        int(match["rank"]): int(match["completed"]) for line in lines if (match := re.search(PROGRESS, line))
    }
    numbers = {rank: int(one["number"]) for rank, one in timeouts.items()}

    evidence = []
    if completed:
        dones = ", ".join(f"{rank}: {done}" for rank, done in sorted(completed.items()))
        evidence.append(f"last completed operation of each rank: {dones}")
    cause = f"a collective operation{f' ({what})' if what else ''} timed out"
    if timeout:
        ranks, waited = ", ".join(map(str, sorted(timeouts))), f"{int(timeout['ms']) / 1000:.0f} s"
        cause = f"rank{'s' if len(timeouts) > 1 else ''} {ranks} waited {waited} in {what} number {timeout['number']}"
    others = _other_operation(timeouts)
    return Diagnosis(
        f"{cause}, {others or _late_rank(numbers, completed, failure.world_size)}",
        "py-spy dump --pid PID_OF_THE_LATE_RANK          # shows what it is doing\n"
        "every rank must call the same operations in the same order: look for `if rank == 0:` around one, and for loaders of unequal length\n"
        "init_process_group(..., timeout=timedelta(hours=1))   # only if a rank is slow on purpose (checkpointing, validation)",
        evidence,
    )


def _other_operation(timeouts: dict[int, re.Match[str]]) -> str:
    """The ranks that wait under one number in operations of different types or sizes; "" if none do."""
    operations: dict[str, dict[str, list[int]]] = {}
    for rank, match in sorted(timeouts.items()):
        size = f" of {int(match['numel']):,} elements" if match["numel"] else ""
        operations.setdefault(match["number"], {}).setdefault(f"{match['what']}{size}", []).append(rank)
    for number, by_operation in operations.items():
        if len(by_operation) > 1:
            waits = " and ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} in {operation}"
                for operation, ranks in by_operation.items()
            )
            return f"but the ranks do not call the same operations: as number {number}, {waits}"
    return ""


def _late_rank(waiting_in: dict[int, int], completed: dict[int, int], world: int | None) -> str:
    """The rank that was behind, as far as the log shows."""
    ranks = set(waiting_in) | set(completed)
    size = world or (max(ranks) + 1 if ranks else 0)
    absent = sorted(set(range(size)) - set(waiting_in))
    if len(completed) > 1 and min(completed.values()) < max(completed.values()):
        late = min(completed, key=lambda rank: completed[rank])
        return (
            f"and rank {late} is behind: it had completed {completed[late]}, others {max(completed.values())}"
        )
    if len(set(waiting_in.values())) > 1:
        late = min(waiting_in, key=lambda rank: waiting_in[rank])
        return f"and rank {late} waited in another operation ({waiting_in[late]}): the ranks do not call the same operations"
    if absent:
        return f"and rank {', '.join(map(str, absent))} never called it"
    return "and this text does not show which rank was behind: see the log of the rank that is missing here"


CONSEQUENCE = "look at the FIRST error of the other ranks; this one is a consequence"
NCCL_PREFIX = r"(?:\[\d+\] is setting up NCCL communicator.{0,200}?)?NCCL (?:error in: |Error )"
OWN_GPU = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))   # before init_process_group'
nccl_error = pattern_kind(
    "FE087",
    "nccl-error",
    """NCCL reported an error.
    "unhandled system error": no network interface reaches the other ranks, /dev/shm is too small, or a rank
    died. "unhandled cuda error": out of memory, or two ranks on one GPU. "invalid usage": two ranks on one GPU.
    "remote process exited": another rank died first.
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html""",
    Form(
        "the nccl backend was requested, and this process sees no GPU",
        'init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
        r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
    ),
    Form(
        "two ranks use the same GPU[[ (ranks {one} and {other})]]",
        OWN_GPU,
        NCCL_PREFIX + r".*?Duplicate GPU detected ?:? ?(?:rank (?P<one>\d+) and rank (?P<other>\d+))?",
    ),
    Form(
        "NCCL could not allocate its buffers: the GPU's memory is full",
        f"free some memory: use a smaller batch, or NCCL_BUFFSIZE=2097152\n{OWN_GPU}; do several ranks use one GPU?",
        NCCL_PREFIX + r".*?(?:out of memory|Failed to CUDA (?:c|m)alloc)",
    ),
    Form(
        "another rank ended first",
        CONSEQUENCE,
        NCCL_PREFIX + r".*?(?:remote process|remote error|Connection closed by)",
        r"NCCL communicator was aborted",
    ),
    Form(
        "NCCL reports {why|an error}[[ ({last})]]",
        "NCCL_DEBUG=INFO torchrun ... train.py        # prints the reason\n"
        "NCCL_SOCKET_IFNAME=eth0 torchrun ...         # selects the interface that reaches the other machines (ip addr)\n"
        "df -h /dev/shm                               # NCCL needs shared memory, too",
        NCCL_PREFIX
        + r"[^,\n]*?(?:, |: )(?P<why>(?:unhandled|internal|invalid)[\w ]*?(?:error|usage|argument|failed))(?:.*?Last error:\s*(?P<last>[^\n]+))?",
        r"\[Rank \d+\] NCCL (?:watchdog thread|error)",
    ),
    types=DISTRIBUTED_ERRORS,
)

gloo_error = pattern_kind(
    "FE088",
    "gloo-error",
    """A gloo operation failed because of another rank.
    The other rank died (its own log has the error), hangs, or does not call the same operations.
    https://docs.pytorch.org/docs/stable/distributed.html""",
    Form(
        "rank {missing} did not reach the barrier within {ms} ms",
        "see what that rank is doing: py-spy dump --pid PID",
        r"Ranks? (?P<missing>[\d, ]+) failed to pass monitoredBarrier in (?P<ms>\d+) ms",
    ),
    Form(
        "an operation did not finish within {ms} ms: another rank hangs, died, or does not call it",
        "every rank must call the same operations in the same order: look for `if rank == 0:` around one\npy-spy dump --pid PID_OF_THE_OTHER_RANK",
        r"(?:\[[^\]]*gloo[^\]]*\] |.{0,80}?gloo.{0,200}?)?Timed out waiting (?P<ms>\d+)ms",
        r"Rank \d+ (?:failed to pass monitoredBarrier|timed out) in (?P<ms>\d+)\s*ms",
    ),
    Form(
        "another rank ended first, and its connection was closed",
        CONSEQUENCE,
        r"\[[^\]]*gloo[^\]]*\] (?:Connection closed by peer|Connection reset by peer|Read error|Application timeout caused pair closure|Socket closed)",
        r".{0,80}?gloo.{0,200}?Connection closed by peer",
    ),
    types=DISTRIBUTED_ERRORS,
    secondary=True,
)


@kind("FE089", "a-rank-failed", secondary=True)
def a_rank_failed(failure: FailureRecord) -> Diagnosis | None:
    """torchrun reports that a rank failed.

    Why it happens:
        The traceback of that rank, further up in the log, has the cause. For a signal: SIGKILL usually comes
        from the OOM killer, SIGSEGV from native code.
    How to fix it:
        Look for `[rankN]:` of the named rank, or write a log file for each rank: `torchrun --log-dir logs
        --redirects 3`.
    Sources:
        https://docs.pytorch.org/docs/stable/elastic/errors.html"""
    match = match_message(
        failure,
        r"\s*=*\s*(?P<name>\S[^\n]*?) FAILED.*?Root Cause \(first observed failure\):.*?rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)"
        r"\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)(?:.*?traceback\s*: (?P<trace>[^\n]*))?",
        types=("ChildFailedError", "Exception"),
    )
    if match is None:
        return None
    signal = re.search(r"Signal (?P<number>\d+) \((?P<name>SIG\w+)\)", match["trace"])
    how = f"was ended by {signal['name']}" if signal else f"exited with code {match['code']}"
    kill = signal is not None and signal["name"] == "SIGKILL"
    return Diagnosis(
        f"rank {match['rank']} was the first to fail: it {how} (process {match['pid']})"
        + ("; the OOM killer is the most likely cause" if kill else ""),
        'dmesg -T | grep -i -E "oom|killed process"; cat /sys/fs/cgroup/memory.events'
        if kill
        else f"grep -n -A30 '^\\[rank{match['rank']}\\]: Traceback' LOG       # shows its own traceback\n"
        "torchrun --log-dir logs --redirects 3 ... train.py     # writes a file for each rank",
    )
