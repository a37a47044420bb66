"""Failures of memory: the GPU's and the host's."""

import re
import signal as signals

from flatout.diagnose.kind import (
    MESSAGE_END,
    Diagnosis,
    Form,
    MessageMatch,
    kind,
    layer,
    match_message,
    pattern_kind,
    search_log,
)
from flatout.schema.failure import FailureRecord
from flatout.schema.sizes import size

UNITS = {"bytes": 1} | {f"{x}{i}B": 1024**n for n, x in enumerate("KMGT", start=1) for i in ("i", "")}
AMOUNT = r"[\d.]+ (?:bytes|[KMGT]i?B)"


def parse_bytes(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        return None


def amount(bytes_: float | None) -> str:
    return "an unknown amount" if bytes_ is None else size(bytes_)


@kind("FE040", "gpu-out-of-memory")
def gpu_out_of_memory(failure: FailureRecord) -> Diagnosis | None:
    """The GPU's memory is full.

    Why it happens:
        The peak of a step (weights, gradients, optimizer state, activations) exceeds the GPU's memory. Or
        another process uses part of it. Or torch's own pool has enough free memory, but in blocks that are
        too small (fragmentation).
    How to fix it:
        In the order of their cost: Return fragments with `PYTORCH_ALLOC_CONF=expandable_segments:True`; the
        result is the same. Halve the activations with `torch.autocast("cuda", torch.bfloat16)`; the rounding
        differs, and it is often faster. Use a smaller batch with gradient accumulation; the result is the
        same for models without BatchNorm, and it is slower if the GPU is not full. Recompute activations with
        `torch.utils.checkpoint`, which repeats the forward pass; it takes about a third more time, and the
        result is the same.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
        https://docs.pytorch.org/docs/stable/checkpoint.html"""
    match = match_message(
        failure,
        rf"CUDA out of memory\. Tried to allocate (?P<needed>{AMOUNT})\. GPU (?P<gpu>\d+) has a total capac\w+ of (?P<total>{AMOUNT}) of which "
        rf"(?P<free>{AMOUNT}) is free\.(?:.*?this process has (?P<process>{AMOUNT}) memory in use\.)?(?:.*?Of the allocated memory "
        rf"(?P<allocated>{AMOUNT}) is allocated "
        rf"by PyTorch,(?: with {AMOUNT} allocated in private pools(?: \([^)\n]*\))?,)? and (?P<reserved>{AMOUNT}) is reserved by PyTorch but unallocated)?",
        rf"CUDA out of memory\. Tried to allocate (?P<needed>{AMOUNT}) \(GPU (?P<gpu>\d+); (?P<total>{AMOUNT}) total capacity; (?P<allocated>{AMOUNT}) already "
        rf"allocated; (?P<free>{AMOUNT}) free;(?: (?P<pool>{AMOUNT}) (?:reserved in total by PyTorch|cached))?",
        rf"CUDA out of memory\.(?: Tried to allocate (?P<needed>{AMOUNT}))?",
        r"CUDA error: out of memory",
        r"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `?cublasCreate",
        rf"MPS backend out of memory \(MPS allocated: (?P<allocated>{AMOUNT}).*?Tried to allocate (?P<needed>{AMOUNT})",
        rf"HIP out of memory\. Tried to allocate (?P<needed>{AMOUNT})\. GPU (?P<gpu>\d+) has a total capac\w+ of (?P<total>{AMOUNT}) of "
        rf"which (?P<free>{AMOUNT}) is free",
        rf"(?:CUDA|HIP|MPS backend) out of memory{MESSAGE_END}",
    )
    if match is None:
        return None
    needed, free, total, allocated = (
        parse_bytes(match[name]) for name in ("needed", "free", "total", "allocated")
    )
    memory = failure.memory
    free, total, allocated = (
        free if free is not None else memory.get("free"),
        total or memory.get("total"),
        allocated or memory.get("allocated"),
    )
    unallocated = parse_bytes(match["reserved"])
    if unallocated is None and match["pool"] and allocated is not None:
        unallocated = max(0, (parse_bytes(match["pool"]) or 0) - allocated)
    if unallocated is None and memory:
        unallocated = max(0, memory["reserved"] - memory["allocated"])
    in_layer = f" in {layer(failure)}" if layer(failure) else ""
    request = (
        f"{amount(needed)} more were requested{in_layer}"
        if needed
        else f"more was requested{in_layer} than is available"
    )
    free_text = f", and {amount(free)} of {amount(total)} are free" if total and free is not None else ""
    return Diagnosis(
        f"the GPU's memory is full: {request}{free_text}",
        "\n".join(_fixes(needed, free, unallocated)),
        [
            *_evidence(failure, match, total, free, allocated, unallocated),
            *_fitting_samples(failure, needed, free, unallocated),
        ],
        levers=("allocator", "autocast"),
    )


def _evidence(
    failure: FailureRecord,
    match: MessageMatch,
    total: int | None,
    free: int | None,
    allocated: int | None,
    unallocated: int | None,
) -> list[str]:
    lines = []
    if allocated is not None:
        lines.append(
            f"torch holds {amount(allocated)} in tensors"
            + (f" and {amount(unallocated)} reserved but unallocated" if unallocated is not None else "")
        )
    process = parse_bytes(match["process"])
    if process is not None and total and free is not None and total - free - process > total // 20:
        lines.append(
            f"other processes hold {amount(total - free - process)} of this GPU: `nvidia-smi` names them"
        )
    known_bytes = {
        name: failure.memory.get(name, 0) for name in ("parameters", "gradients", "optimizer state")
    }
    if sum(known_bytes.values()) and allocated:
        other_bytes = max(0, allocated - sum(known_bytes.values()))
        lines.append(
            ", ".join(f"{name} {amount(size)}" for name, size in known_bytes.items() if size)
            + f", activations and the rest {amount(other_bytes)}"
        )
    return lines


def _fixes(needed: int | None, free: int | None, unallocated: int | None) -> list[str]:
    defragment = (
        "PYTORCH_ALLOC_CONF=expandable_segments:True python train.py   # returns fragments; the same result"
    )
    fixes = [
        'with torch.autocast("cuda", torch.bfloat16): ...   # halves the activations; different rounding, often faster',
        "batch_size // 2, and optimizer.step() every 2nd batch   # halves the activations at the same effective batch size; slower if the GPU is not full",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)   # recomputes activations; about a third more time, the same result",
    ]
    if unallocated is not None and needed is not None and unallocated + (free or 0) >= needed:
        return [defragment, *fixes[:2]]
    return fixes


def _fitting_samples(
    failure: FailureRecord, needed: int | None, free: int | None, unallocated: int | None
) -> list[str]:
    """An upper bound on the samples that fit, as a line of evidence.

    The fixed part is known, and the real peak was higher than the observed one."""
    memory = failure.memory
    fixed = sum(memory.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
    batch = next(
        (
            tensor.shape[0]
            for tensor in failure.tensors
            if tensor.shape and tensor.shape[0] > 1 and not tensor.requires_grad
        ),
        None,
    )
    if not memory or not needed or not batch or free is None:
        return []
    activations = memory["allocated"] - fixed
    available = activations + free + (unallocated or 0)
    if activations <= 0 or activations + needed <= available:
        return []
    max_samples = int(batch * available / (activations + needed))
    return (
        [f"at most {max_samples} of {batch} samples fit at once, fewer if the step's peak comes later"]
        if 0 < max_samples < batch
        else []
    )


def _requested(_: FailureRecord, match: MessageMatch) -> dict[str, str]:
    return {"needed": amount(match.number("bytes")) if match["bytes"] else match["amount"]}


EMPTY_MESSAGE = r"$"
host_out_of_memory = pattern_kind(
    "FE041",
    "host-out-of-memory",
    """The host's memory is full or limited.
    The whole data set is read into memory. A list of tensors grows (losses kept with their graphs). A shape is
    wrong (a product of two large sizes). Or the limit of a container or shell (`ulimit -v`) is below the
    machine's memory.
    https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory""",
    Form(
        "the host's memory is full or limited: {needed|more than the system can give} were requested[[ for an array of {form}]][[ in {layer}]]",
        "free -g; cat /sys/fs/cgroup/memory.max; ulimit -v   # the machine's memory and the limits of this process\n"
        'numpy.load(path, mmap_mode="r")                     # reads the data as it is used\n'
        "losses.append(loss.item())                          # keeps numbers instead of tensors with their graphs",
        r"\[enforce fail at alloc_cpu\.cpp:\d+\] .{0,80}?DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to "
        r"allocate (?P<bytes>\d+) bytes",
        r"(?:\$ Torch: )?not enough memory: you tried to allocate (?P<amount>\d+\s*[GM]?B)",
        r"Unable to allocate (?P<amount>[\d.]+ [KMGTP]?iB) for an array with shape (?P<form>\([^)]*\))",
        r"\[Errno 12\] Cannot allocate memory",
        EMPTY_MESSAGE,
    ),
    types=("RuntimeError", "MemoryError", "_ArrayMemoryError", "OSError"),
    when=lambda _, match: match.pattern != EMPTY_MESSAGE or "MemoryError" in match.error.class_names,
    values=_requested,
)


@kind("FE042", "killed")
def killed(failure: FailureRecord) -> Diagnosis | None:
    """The process was killed with SIGKILL.

    Why it happens:
        Usually the kernel's OOM killer, when the machine or the container is out of memory. A scheduler at
        its time limit, `docker stop` or a user can also send the signal.
    How to fix it:
        `dmesg -T | grep -i -E "oom|killed"` and `cat /sys/fs/cgroup/memory.events` (oom_kill) show whether
        memory was the cause. If so, use fewer loader workers, read data as it is used, and keep no lists of
        tensors.
    Sources:
        https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files"""
    oom = search_log(
        failure,
        r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+) \((?P<name>[^)]+)\)(?:.*?anon-rss:(?P<rss>\d+)kB)?",
        r"oom[-_]kill(?:er)? event|OOMKilled|oom_reaper|Detected \d+ oom[-_]kill event",
    )
    killed_by_signal = failure.signal == signals.SIGKILL or (
        failure.signal is None
        and _ends_with(
            failure,
            r"^Killed\s*$",
            r"^(?:.*: line \d+: +)?(?:\d+ )?Killed {2,}\S",
            r"\b(?:killed|terminated|died|ended|signal)\b.{0,40}\bSIGKILL\b",
            r"\bexit(?:ed)?(?: with)?(?: \w+)?[ -]?code:? +(?:-9|137)\b",
            r"\bSignal 9\b",
        )
    )
    if not killed_by_signal and not (oom and _has_no_exception(failure)):
        return None
    oom_kills = failure.facts.get("oom_kills")
    if oom or oom_kills:
        details = oom.groupdict() if oom else {}
        memory = f", which held {amount(int(details['rss']) * 1024)}" if details.get("rss") else ""
        name = f" ({details['name']}, process {details['pid']}{memory})" if details.get("pid") else ""
        cause = (
            f"the kernel's OOM killer ended the program{name}: the machine or its container is out of memory"
        )
    else:
        cause = "the program was killed with SIGKILL and could not report why; the OOM killer is the most likely cause"
    local_ranks = [line for line in failure.log_lines if re.search(r"local_rank: \d+", line)][:1]
    return Diagnosis(
        cause,
        'dmesg -T | grep -i -E "oom|killed process"; cat /sys/fs/cgroup/memory.events   # was memory the cause?\n'
        "DataLoader(..., num_workers=2)        # each worker copies the memory that it touches\n"
        "losses.append(loss.item())            # keeps numbers instead of tensors with their graphs",
        local_ranks,
    )


def _has_no_exception(failure: FailureRecord) -> bool:
    return all(not error.frames and not error.type for error in failure.chain)


def _ends_with(failure: FailureRecord, *patterns: str) -> bool:
    """Whether one of the last lines of a text without a traceback matches."""
    if not _has_no_exception(failure):
        return False
    return any(re.search(pattern, line) for line in failure.log_lines[-12:] for pattern in patterns)


@kind("FE043", "shared-memory-too-small")
def shared_memory_too_small(failure: FailureRecord) -> Diagnosis | None:
    """Shared memory in /dev/shm is full.

    Why it happens:
        A loader worker passes its batch through shared memory in /dev/shm. Docker gives 64 MiB by default. Many workers, a large prefetch and large batches need more.
    How to fix it:
        `docker run --shm-size=8g` (or `--ipc=host`), or an emptyDir with medium Memory in Kubernetes. Without
        a new container, use fewer workers and `prefetch_factor=1`, or
        `torch.multiprocessing.set_sharing_strategy("file_system")` if the number of files is the limit.
    Sources:
        https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
        https://github.com/pytorch/pytorch/issues/5040"""
    match = match_message(
        failure,
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) is killed by signal: Bus error\.?",
        r"unable to (?:write to|mmap|resize|allocate|open).{0,120}?(?:shared memory|/torch_\w+).{0,160}?(?:No space left on device|Cannot "
        r"allocate memory|Bad address)",
        r"ERROR: Unexpected bus error encountered in worker\. This might be caused by insufficient shared memory \(shm\)",
        types=("RuntimeError", "OSError"),
    )
    warning = search_log(
        failure,
        r"ERROR: Unexpected bus error encountered in worker\. This might be caused by insufficient shared memory",
    )
    by_signal = failure.signal == signals.SIGBUS or (
        failure.signal is None and _ends_with(failure, r"\bBus error(?: \(core dumped\))?\s*$", r"\bSIGBUS\b")
    )
    if match is None and warning is None and not by_signal:
        return None
    who = "a loader worker" if match or warning else "the program"
    if match and match["pid"]:
        who = f"loader worker {match['pid']}"
    return Diagnosis(
        f"{who} died of a bus error: /dev/shm is most likely too small"
        if match is None or "Bus error" in match.error.message
        else f"{who} could not write to shared memory: /dev/shm is full",
        "df -h /dev/shm                                  # shows its size\n"
        "docker run --shm-size=8g ...                    # or --ipc=host\n"
        "DataLoader(..., num_workers=2, prefetch_factor=1)   # needs less shared memory",
    )


@kind("FE045", "crashed-below-python")
def crashed_below_python(failure: FailureRecord) -> Diagnosis | None:
    """Native code crashed (segmentation fault, abort, illegal instruction).

    Why it happens:
        An extension was built for another torch, or two libraries load the same runtime (OpenMP, protobuf).
        The CPU lacks an instruction of the build (SIGILL), or the stack is too small for a deep recursion.
    How to fix it:
        `python -X faulthandler train.py` prints the Python line of the crash. Then reinstall the packages for
        one version of torch.
    Sources:
        https://docs.python.org/3/library/faulthandler.html"""
    names = {
        signals.SIGSEGV: "a segmentation fault",
        signals.SIGABRT: "an abort",
        signals.SIGILL: "an instruction that this CPU does not have",
        signals.SIGFPE: "an arithmetic error",
    }
    signal_of_pattern = {
        r"\b(?:Segmentation fault|signal.{0,20}SIGSEGV|exit ?code:? +(?:-11|139))\b": signals.SIGSEGV,
        r"(?:^|\s)Aborted \(core dumped\)|\bsignal.{0,20}SIGABRT\b|exit ?code:? +(?:-6|134)\b": signals.SIGABRT,
        r"\b(?:Illegal instruction|signal.{0,20}SIGILL|exit ?code:? +(?:-4|132))\b": signals.SIGILL,
    }
    signal_number = failure.signal if failure.signal in names else None
    if signal_number is None and failure.signal is None:
        signal_number = next(
            (number for pattern, number in signal_of_pattern.items() if _ends_with(failure, pattern)), None
        )
    if signal_number is None:
        return None
    evidence = []
    if frame := search_log(failure, r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)'):
        evidence.append(f"innermost Python line: {frame['file']}:{frame['line']} in {frame['function']}")
    if last_message := search_log(failure, r"what\(\):\s+(?P<words>.{1,300})"):
        evidence.append(f"its last message: {last_message['words']}")
    return Diagnosis(
        f"the program was ended by {names[signals.Signals(signal_number)]} in native code",
        "python -X faulthandler train.py        # prints the Python line of the crash\n"
        "pip check; pip list | grep -i -E 'torch|cuda|nvidia'   # look for extensions built for another torch",
        evidence,
    )
