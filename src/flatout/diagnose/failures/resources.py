"""Limits of the machine: /dev/shm, open files, processes ended by a signal."""

import re
import signal as signals

from flatout.diagnose.failures.memory import amount
from flatout.diagnose.kind import Diagnosis, kind, match_message, search_log
from flatout.schema.failure import FailureRecord


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
        https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
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
    memory = (
        f", which held {amount(int(oom['rss']) * 1024)}"
        if oom and "rss" in oom.groupdict() and oom["rss"]
        else ""
    )
    if oom or oom_kills:
        name = f" ({oom['name']}, process {oom['pid']}{memory})" if oom and oom.groupdict().get("pid") else ""
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
        https://github.com/pytorch/pytorch/issues/5040
    """
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
    who = (
        f"loader worker {match['pid']}"
        if match and match["pid"]
        else "a loader worker"
        if match or warning
        else "the program"
    )
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
        https://docs.python.org/3/library/faulthandler.html
    """
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
    last_frame = search_log(failure, r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
    innermost = (
        [f"innermost Python line: {last_frame['file']}:{last_frame['line']} in {last_frame['function']}"]
        if last_frame
        else []
    )
    last_message = search_log(failure, r"what\(\):\s+(?P<words>.{1,300})")
    return Diagnosis(
        f"the program was ended by {names[signals.Signals(signal_number)]} in native code",
        "python -X faulthandler train.py        # prints the Python line of the crash\n"
        "pip check; pip list | grep -i -E 'torch|cuda|nvidia'   # look for extensions built for another torch",
        [*innermost, *([f"its last message: {last_message['words']}"] if last_message else [])],
    )
