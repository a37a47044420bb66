"""Failures of data loaders and of the processes that they start."""

from __future__ import annotations

import re

from flatout.diagnose.kind import RUNTIME, SHORT, Diagnosis, kind, match_message
from flatout.schema.failure import ExceptionRecord, FailureRecord

SIGNALS = {
    "Killed": "SIGKILL: the OOM killer, or a user",
    "Segmentation fault": "SIGSEGV: a crash in native code",
    "Aborted": "SIGABRT: native code aborted",
    "Terminated": "SIGTERM: a request to terminate",
    "Bus error": "SIGBUS",
}
WORDS = {
    "SIGKILL": "Killed",
    "SIGSEGV": "Segmentation fault",
    "SIGABRT": "Aborted",
    "SIGTERM": "Terminated",
    "SIGBUS": "Bus error",
}


def _carried(failure: FailureRecord) -> tuple[ExceptionRecord, ExceptionRecord] | None:
    """The exception of another process, and the exception of this process that contains it."""
    for inner, outer in zip(failure.chain, failure.chain[1:], strict=False):
        if inner.link == "carried":
            return inner, outer
    return None


@kind("FE070", "error-in-a-worker", reports=True)
def error_in_a_worker(failure: FailureRecord) -> Diagnosis | None:
    """An exception in a loader worker or a spawned process.

    What:
        Code of the program raised an exception in another process. The first traceback, the one from that
        process, shows the cause.
    Why it happens:
        The inner exception shows the cause. In a worker, `__getitem__`, a transform or the collate function
        raised it.
    How to fix it:
        Fix the named line. `num_workers=0` runs the same code in the main process, where a debugger can stop
        at it.
    Sources:
        https://docs.pytorch.org/docs/stable/data.html
    """
    carried = _carried(failure)
    if carried is None:
        return None
    inner, outer = carried
    where = re.match(
        r"Caught \w+ in (?P<where>DataLoader worker process \d+|replica \d+ on device \d+|pin memory thread for device \w+)\.",
        outer.message,
    )
    process = re.search(r"-- Process (?P<where>\d+) terminated with the following error", outer.message)
    if where is None and process is None:
        return None
    name = where["where"] if where else f"process {process['where']}" if process else ""
    own = inner.own
    line = f" at {own.place().sentence()}" if own else ""
    first = inner.message.split("\n")[0][:160]
    return Diagnosis(
        f"{inner.type.rpartition('.')[2]} in {name}{line}" + (f": {first}" if first else ""),
        "DataLoader(..., num_workers=0)   # runs the same code in this process, where a debugger can stop at it"
        if where
        else "fix the named line; it runs in every process",
        [],
        own.place() if own else None,
    )


@kind("FE071", "worker-ended")
def worker_ended(failure: FailureRecord) -> Diagnosis | None:
    """A loader worker or a child process ended unexpectedly.

    What:
        A process that the program waited for was ended by a signal or exited.
    Why it happens:
        SIGKILL usually comes from the OOM killer. SIGSEGV and SIGABRT come from native code (decoders,
        OpenCV, a library that is not fork-safe). An exit without a message comes from `os._exit` or a library
        that calls it.
    How to fix it:
        `num_workers=0` shows whether the code itself fails. If memory is the cause, use fewer workers. For a
        library that is not fork-safe use `multiprocessing_context="spawn"`, and for OpenCV
        `cv2.setNumThreads(0)`.
    Sources:
        https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
        https://github.com/pytorch/pytorch/issues/8976
    """
    found = match_message(
        failure,
        ("RuntimeError", "ProcessExitedException"),
        r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) is killed by signal: (?P<signal>[\w ]+?)\.",
        rf"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) is killed by (?P<unnamed>signal)(?:: (?P<signal>{'|'.join(SIGNALS)}))?{SHORT}",
        r"DataLoader worker \(pid\(s\) (?P<pid>[\d, ]+)\) exited unexpectedly(?: with exit code (?P<code>\d+))?",
        r"Pin memory thread exited unexpectedly(?P<pin>)",
        r"DataLoader worker \(pid (?P<pid>\d+)\) exited unexpectedly with exit code (?P<code>\d+)",
        r"process (?P<process>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code (?P<code>\d+))",
    )
    inner = None
    if found is None and _handing_over(failure):
        return Diagnosis(
            "a loader worker ended while it passed on a batch (the reason was not reported)",
            "DataLoader(..., num_workers=0)                             # does the code itself fail?\n"
            "dmesg -T | grep -i oom; cat /sys/fs/cgroup/memory.events   # was it out of memory? then use fewer workers",
        )
    if found is None or found["signal"] == "Bus error" or failure.facts.get("unguarded"):
        return None
    if not found["signal"]:  # the previous exception may name the signal
        inner = match_message(
            failure,
            RUNTIME,
            r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) is killed by signal: (?P<signal>[\w ]+?)\.",
        )
    signal = found["signal"] or (inner["signal"] if inner else "")
    if signal == "Bus error":
        return None
    if found["name"]:
        signal = WORDS.get(found["name"], found["name"])
    who = (
        f"process {found['process']}"
        if found["process"]
        else f"loader worker {found['pid']}"
        if found["pid"]
        else "the pin memory thread"
    )
    if signal:
        said = f"{who} was ended by {SIGNALS.get(signal, signal)}"
    elif found["unnamed"]:
        said = f"{who} was ended by a signal; the end of the message names it"
    else:
        said = f"{who} ended unexpectedly" + (
            f" with exit code {found['code']}" if found["code"] else ", without an exception"
        )
    memory = (
        "dmesg -T | grep -i oom; cat /sys/fs/cgroup/memory.events   # was memory the cause? then use fewer workers\n"
        if signal == "Killed"
        else ""
    )
    return Diagnosis(
        said,
        memory + "DataLoader(..., num_workers=0)                      # does the code itself fail?\n"
        'DataLoader(..., multiprocessing_context="spawn")    # for a library that is not fork-safe; cv2.setNumThreads(0) for OpenCV',
    )


def _handing_over(failure: FailureRecord) -> bool:
    """Whether a shared-memory tensor was requested from a process that no longer exists."""
    gone = match_message(
        failure,
        (
            "ConnectionResetError",
            "ConnectionRefusedError",
            "BrokenPipeError",
            "EOFError",
            "FileNotFoundError",
        ),
        r"",
    )
    return gone is not None and any(
        frame.function in ("rebuild_storage_fd", "_try_get_data") for frame in gone.thrown.frames
    )


@kind("FE075", "no-main-guard")
def no_main_guard(failure: FailureRecord) -> Diagnosis | None:
    """A script starts processes without a main guard.

    What:
        A spawned process imports the script again, and the script starts processes again.
    Why it happens:
        Code that starts workers (or trains) is at the top level of the script, and processes are spawned
        (macOS, Windows, or by choice).
    How to fix it:
        Put the code that starts the training under `if __name__ == "__main__":`.
    Sources:
        https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods
    """
    found = match_message(
        failure,
        RUNTIME,
        r"An attempt has been made to start a new process before the\s+current process has finished its bootstrapping phase",
        *(
            [r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"]
            if failure.facts.get("unguarded")
            else []
        ),
    )
    if found is None:
        return None
    return Diagnosis(
        "the script starts processes on import, and a spawned process imports it again",
        'if __name__ == "__main__":\n    main()',
    )


@kind("FE076", "loader-timed-out")
def loader_timed_out(failure: FailureRecord) -> Diagnosis | None:
    """The data loader timed out.

    What:
        No worker returned its batch within `timeout=` seconds.
    Why it happens:
        A sample takes longer than that (a slow disk, a download), or a worker hangs (a lock held at the fork,
        a deadlock of OpenCV).
    How to fix it:
        Use a longer `timeout`, or 0 for none. Use `num_workers=0` to see how long one batch takes.
    Sources:
        https://docs.pytorch.org/docs/stable/data.html
    """
    found = match_message(failure, RUNTIME, r"DataLoader timed out after (?P<seconds>[\d.]+) seconds")
    if found is None:
        return None
    batch = f" after {failure.batch + 1} batches" if failure.batch is not None else ""
    return Diagnosis(
        f"no loader worker returned a batch within {found['seconds']} seconds{batch}",
        "DataLoader(..., timeout=0)       # or longer than the slowest batch\nDataLoader(..., num_workers=0)   # shows how long one batch takes, and where",
    )
