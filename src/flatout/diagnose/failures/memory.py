"""Failures of memory and other limits (GPU, host, /dev/shm, open files), and processes ended by a signal."""

from __future__ import annotations

import re
import signal as signals

from flatout.diagnose.kind import (
    RUNTIME,
    SHORT,
    Diagnosis,
    MessageMatch,
    kind,
    layer,
    match_message,
    search_log,
)
from flatout.plan.failure import FailureRecord

UNITS = {
    "bytes": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 1 << 10,
    "MB": 1 << 20,
    "GB": 1 << 30,
}
AMOUNT = r"[\d.]+ (?:bytes|[KMGT]i?B)"


def in_bytes(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        return None


def spelled(count: float | None) -> str:
    if count is None:
        return "an unknown amount"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}" if unit == "GiB" else f"{count / size:.0f} {unit}"
    return f"{count:.0f} bytes"


@kind("FE040", "gpu-out-of-memory")
def gpu_out_of_memory(failure: FailureRecord) -> Diagnosis | None:
    """The GPU's memory is full.

    What:
        torch requested a block of GPU memory, and no free block was large enough.
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
        https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    found = match_message(
        failure,
        RUNTIME,
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
        rf"(?:CUDA|HIP|MPS backend) out of memory{SHORT}",
    )
    if found is None:
        return None
    needed, free, total, allocated = (
        in_bytes(found[name]) for name in ("needed", "free", "total", "allocated")
    )
    memory = failure.memory
    free, total, allocated = (
        free if free is not None else memory.get("free"),
        total or memory.get("total"),
        allocated or memory.get("allocated"),
    )
    idle = in_bytes(found["reserved"])
    if idle is None and found["pool"] and allocated is not None:
        idle = max(0, (in_bytes(found["pool"]) or 0) - allocated)
    if idle is None and memory:
        idle = max(0, memory["reserved"] - memory["allocated"])
    where = f" in {layer(failure)}" if layer(failure) else ""
    what = (
        f"{spelled(needed)} more were requested{where}"
        if needed
        else f"more was requested{where} than is available"
    )
    has = f", and {spelled(free)} of {spelled(total)} are free" if total and free is not None else ""
    evidence = _evidence(failure, found, total, free, allocated, idle)
    ways = _ways(needed, free, idle)
    return Diagnosis(
        f"the GPU's memory is full: {what}{has}",
        "\n".join(ways),
        [*evidence, *_fits(failure, needed, free, idle)],
        levers=("allocator", "autocast"),
    )


def _evidence(
    failure: FailureRecord,
    found: MessageMatch,
    total: int | None,
    free: int | None,
    allocated: int | None,
    idle: int | None,
) -> list[str]:
    lines = []
    if allocated is not None:
        lines.append(
            f"torch holds {spelled(allocated)} in tensors"
            + (f" and {spelled(idle)} reserved but unallocated" if idle is not None else "")
        )
    process = in_bytes(found["process"])
    if process is not None and total and free is not None and total - free - process > total // 20:
        lines.append(
            f"other processes hold {spelled(total - free - process)} of this GPU: `nvidia-smi` names them"
        )
    kept = {name: failure.memory.get(name, 0) for name in ("parameters", "gradients", "optimizer state")}
    if sum(kept.values()) and allocated:
        rest = max(0, allocated - sum(kept.values()))
        lines.append(
            ", ".join(f"{name} {spelled(size)}" for name, size in kept.items() if size)
            + f", activations and the rest {spelled(rest)}"
        )
    return lines


def _ways(needed: int | None, free: int | None, idle: int | None) -> list[str]:
    fragments = (
        "PYTORCH_ALLOC_CONF=expandable_segments:True python train.py   # returns fragments; the same result"
    )
    ways = [
        'with torch.autocast("cuda", torch.bfloat16): ...   # halves the activations; different rounding, often faster',
        "batch_size // 2, and optimizer.step() every 2nd batch   # halves the activations at the same effective batch size; slower if the GPU is not full",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)   # recomputes activations; about a third more time, the same result",
    ]
    if idle is not None and needed is not None and idle + (free or 0) >= needed:
        return [fragments, *ways[:2]]
    return ways


def _fits(failure: FailureRecord, needed: int | None, free: int | None, idle: int | None) -> list[str]:
    """An upper bound on the samples that fit, as a line of evidence.

    The fixed part is known, and the real peak was higher than the observed one.
    """
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
    growing = memory["allocated"] - fixed
    room = growing + free + (idle or 0)
    if growing <= 0 or growing + needed <= room:
        return []
    most = int(batch * room / (growing + needed))
    return (
        [f"at most {most} of {batch} samples fit at once, fewer if the step's peak comes later"]
        if 0 < most < batch
        else []
    )


@kind("FE041", "host-out-of-memory")
def host_out_of_memory(failure: FailureRecord) -> Diagnosis | None:
    """The host's memory is full or limited.

    What:
        The program requested memory for a CPU tensor or an array, and the system had none to give.
    Why it happens:
        The whole data set is read into memory. A list of tensors grows (losses kept with their graphs). A
        shape is wrong (a product of two large sizes). Or the limit of a container or shell (`ulimit -v`) is
        below the machine's memory.
    How to fix it:
        Read the data as it is used (`numpy.load(..., mmap_mode="r")`), keep numbers instead of tensors
        (`loss.item()`), use fewer workers, and check the requested shape.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
    """
    found = match_message(
        failure,
        ("RuntimeError", "MemoryError", "_ArrayMemoryError"),
        r"\[enforce fail at alloc_cpu\.cpp:\d+\] .{0,80}?DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to "
        r"allocate (?P<needed>\d+) bytes",
        r"(?:\$ Torch: )?not enough memory: you tried to allocate (?P<needed>\d+)\s*[GM]?B",
        r"Unable to allocate (?P<amount>[\d.]+ [KMGTP]?iB) for an array with shape (?P<shape>\([^)]*\))",
        r"\[Errno 12\] Cannot allocate memory",
        r"(?P<bare>)$" if failure.chain and "MemoryError" in failure.chain[0].names else r"(?!)",
    )
    if found is None:
        return None
    needed = found.number("needed") if found["needed"] else in_bytes(found["amount"])
    asks = f"{spelled(needed)} were requested" if needed else "more was requested than the system can give"
    shape = f" for an array of {found['shape']}" if found["shape"] else ""
    return Diagnosis(
        f"the host's memory is full or limited: {asks}{shape}{' in ' + layer(failure) if layer(failure) else ''}",
        "free -g; cat /sys/fs/cgroup/memory.max; ulimit -v   # the machine's memory and the limits of this process\n"
        'numpy.load(path, mmap_mode="r")                     # reads the data as it is used\n'
        "losses.append(loss.item())                          # keeps numbers instead of tensors with their graphs",
    )


@kind("FE042", "killed")
def killed(failure: FailureRecord) -> Diagnosis | None:
    """The process was killed with SIGKILL.

    What:
        A signal ended the process that no process can catch or handle.
    Why it happens:
        Usually the kernel's OOM killer, when the machine or the container is out of memory. A scheduler at
        its time limit, `docker stop` or a user can also send the signal.
    How to fix it:
        `dmesg -T | grep -i -E "oom|killed"` and `cat /sys/fs/cgroup/memory.events` (oom_kill) show whether
        memory was the cause. If so, use fewer loader workers, read data as it is used, and keep no lists of
        tensors.
    Sources:
        https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    oom = search_log(
        failure,
        r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+) \((?P<name>[^)]+)\)(?:.*?anon-rss:(?P<rss>\d+)kB)?",
        r"oom[-_]kill(?:er)? event|OOMKilled|oom_reaper|Detected \d+ oom[-_]kill event",
    )
    said = failure.signal == signals.SIGKILL or (
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
    if not said and not (oom and _wordless(failure)):
        return None
    events = failure.facts.get("oom_kills")
    held = (
        f", which held {spelled(int(oom['rss']) * 1024)}"
        if oom and "rss" in oom.groupdict() and oom["rss"]
        else ""
    )
    if oom or events:
        name = f" ({oom['name']}, process {oom['pid']}{held})" if oom and oom.groupdict().get("pid") else ""
        said_so = (
            f"the kernel's OOM killer ended the program{name}: the machine or its container is out of memory"
        )
    else:
        said_so = "the program was killed with SIGKILL and could not report why; the OOM killer is the most likely cause"
    ranks = [line for line in failure.around if re.search(r"local_rank: \d+", line)][:1]
    return Diagnosis(
        said_so,
        'dmesg -T | grep -i -E "oom|killed process"; cat /sys/fs/cgroup/memory.events   # was memory the cause?\n'
        "DataLoader(..., num_workers=2)        # each worker copies the memory that it touches\n"
        "losses.append(loss.item())            # keeps numbers instead of tensors with their graphs",
        ranks,
    )


def _wordless(failure: FailureRecord) -> bool:
    """Whether the text holds no Python exception of this process."""
    return all(not thrown.frames and not thrown.type for thrown in failure.chain)


def _ends_with(failure: FailureRecord, *families: str) -> bool:
    """Whether one of the last lines of a text without a traceback matches."""
    if not _wordless(failure):
        return False
    return any(re.search(family, line) for line in failure.around[-12:] for family in families)


@kind("FE043", "shared-memory-too-small")
def shared_memory_too_small(failure: FailureRecord) -> Diagnosis | None:
    """Shared memory in /dev/shm is full.

    What:
        A loader worker passes its batch through shared memory, and /dev/shm is full. The worker dies of a bus
        error or cannot write.
    Why it happens:
        Docker gives 64 MiB by default. Many workers, a large prefetch and large batches need more.
    How to fix it:
        `docker run --shm-size=8g` (or `--ipc=host`), or an emptyDir with medium Memory in Kubernetes. Without
        a new container, use fewer workers and `prefetch_factor=1`, or
        `torch.multiprocessing.set_sharing_strategy("file_system")` if the number of files is the limit.
    Sources:
        https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
        https://github.com/pytorch/pytorch/issues/5040
    """
    found = match_message(
        failure,
        ("RuntimeError", "OSError"),
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) is killed by signal: Bus error\.?",
        r"unable to (?:write to|mmap|resize|allocate|open).{0,120}?(?:shared memory|/torch_\w+).{0,160}?(?:No space left on device|Cannot "
        r"allocate memory|Bad address)",
        r"ERROR: Unexpected bus error encountered in worker\. This might be caused by insufficient shared memory \(shm\)",
    )
    info = search_log(
        failure,
        r"ERROR: Unexpected bus error encountered in worker\. This might be caused by insufficient shared memory",
    )
    wordless = failure.signal == signals.SIGBUS or (
        failure.signal is None and _ends_with(failure, r"\bBus error(?: \(core dumped\))?\s*$", r"\bSIGBUS\b")
    )
    if found is None and info is None and not wordless:
        return None
    who = (
        f"loader worker {found['pid']}"
        if found and found["pid"]
        else "a loader worker"
        if found or info
        else "the program"
    )
    return Diagnosis(
        f"{who} died of a bus error: /dev/shm is most likely too small"
        if found is None or "Bus error" in found.thrown.message
        else f"{who} could not write to shared memory: /dev/shm is full",
        "df -h /dev/shm                                  # shows its size\n"
        "docker run --shm-size=8g ...                    # or --ipc=host\n"
        "DataLoader(..., num_workers=2, prefetch_factor=1)   # needs less shared memory",
    )


@kind("FE044", "too-many-open-files")
def too_many_open_files(failure: FailureRecord) -> Diagnosis | None:
    """The process has too many open files.

    What:
        This process has reached its limit of open files (`ulimit -n`). Each tensor that a worker passes on
        counts as an open file.
    Why it happens:
        Batches of a loader with workers are kept in a list (each keeps its files), each sample has many small
        tensors, or files are opened and not closed.
    How to fix it:
        `ulimit -n 65536` in the shell, or `torch.multiprocessing.set_sharing_strategy("file_system")` at the
        start of the script. Copy the batches that you keep: `kept.append(batch.clone())`. Open files with
        `with open(...)`.
    Sources:
        https://docs.pytorch.org/docs/stable/multiprocessing.html#file-descriptor-file-descriptor
        https://github.com/pytorch/pytorch/issues/973
    """
    found = match_message(
        failure,
        ("OSError", "RuntimeError"),
        r"\[Errno 24\] Too many open files",
        r"received 0 items of ancdata",
        r".{0,200}?Too many open files \(24\)",
        r"Too many open files\. Communication with the workers is no longer possible",
    )
    if found is None:
        return None
    return Diagnosis(
        "this process has reached its limit of open files; each tensor that a loader worker passes on counts as one",
        "ulimit -n 65536                                                # in the shell, before the program starts\n"
        'torch.multiprocessing.set_sharing_strategy("file_system")     # at the start of the script\n'
        "kept.append(batch.clone())                                    # a kept batch keeps its files open",
    )


@kind("FE045", "crashed-below-python")
def crashed_below_python(failure: FailureRecord) -> Diagnosis | None:
    """Native code crashed (segmentation fault, abort, illegal instruction).

    What:
        Native code did something that the system does not allow, and Python could not report where.
    Why it happens:
        An extension was built for another torch, or two libraries load the same runtime (OpenMP, protobuf).
        The CPU lacks an instruction of the build (SIGILL), or the stack is too small for a deep recursion.
    How to fix it:
        `python -X faulthandler train.py` prints the Python line of the crash. Then reinstall the packages for
        one version of torch.
    Sources:
        https://docs.python.org/3/library/faulthandler.html
    """
    names = {
        signals.SIGSEGV: "a segmentation fault",
        signals.SIGABRT: "an abort",
        signals.SIGILL: "an instruction that this CPU does not have",
        signals.SIGFPE: "an arithmetic error",
    }
    words = {
        r"\b(?:Segmentation fault|signal.{0,20}SIGSEGV|exit ?code:? +(?:-11|139))\b": signals.SIGSEGV,
        r"(?:^|\s)Aborted \(core dumped\)|\bsignal.{0,20}SIGABRT\b|exit ?code:? +(?:-6|134)\b": signals.SIGABRT,
        r"\b(?:Illegal instruction|signal.{0,20}SIGILL|exit ?code:? +(?:-4|132))\b": signals.SIGILL,
    }
    number = failure.signal if failure.signal in names else None
    if number is None and failure.signal is None:
        number = next((number for family, number in words.items() if _ends_with(failure, family)), None)
    if number is None:
        return None
    last = search_log(failure, r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
    where = [f"innermost Python line: {last['file']}:{last['line']} in {last['function']}"] if last else []
    info = search_log(failure, r"what\(\):\s+(?P<words>.{1,300})")
    return Diagnosis(
        f"the program was ended by {names[signals.Signals(number)]} in native code",
        "python -X faulthandler train.py        # prints the Python line of the crash\n"
        "pip check; pip list | grep -i -E 'torch|cuda|nvidia'   # look for extensions built for another torch",
        [*where, *([f"its last message: {info['words']}"] if info else [])],
    )
