"""Failures of data loaders, of the processes that they start, and of samples that do not fit together."""

from __future__ import annotations

import re

from flatout.diagnose.kind import (
    SHORT,
    Diagnosis,
    MessageMatch,
    form,
    kind,
    known,
    runs_in,
)
from flatout.schema.failure import ExceptionRecord, FailureRecord


def _carried(failure: FailureRecord) -> tuple[ExceptionRecord, ExceptionRecord] | None:
    """The exception of another process, and the exception of this process that contains it."""
    for inner, outer in zip(failure.chain, failure.chain[1:], strict=False):
        if inner.link == "carried":
            return inner, outer
    return None


@kind("FE070", "error-in-a-worker", reports=True)
def error_in_a_worker(failure: FailureRecord) -> Diagnosis | None:
    """An exception in a loader worker or a spawned process.

    Why it happens:
        The first traceback, the one from that process, shows the cause. In a worker, `__getitem__`, a transform or the collate function
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
    own = inner.user_frame
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


WORKER = r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) "
NO_WORKERS = "DataLoader(..., num_workers=0)                      # does the code itself fail?"
ENDED_FIX = (
    f"{NO_WORKERS}\n"
    'DataLoader(..., multiprocessing_context="spawn")    # for a library that is not fork-safe; cv2.setNumThreads(0) for OpenCV'
)
OF_MEMORY = "dmesg -T | grep -i oom; cat /sys/fs/cgroup/memory.events   # was memory the cause? then use fewer workers"
HANDED_OVER = r"(?:\[Errno \d+\] (?:Connection|Broken pipe|No such file)|$)"


def _is_end_of_worker(failure: FailureRecord, match: MessageMatch) -> bool:
    """Whether no other kind says more: a missing main guard. A tensor may wait for a worker that is gone."""
    if match.pattern == HANDED_OVER:
        return runs_in(failure, ":(?:rebuild_storage_fd|_try_get_data)$")
    return not failure.facts.get("unguarded")


worker_ended = known(
    "FE071",
    "worker-ended",
    """A loader worker or a child process ended unexpectedly.
    SIGKILL usually comes from the OOM killer. SIGSEGV and SIGABRT come from native code (decoders, OpenCV, a
    library that is not fork-safe). An exit without a message comes from `os._exit` or a library that calls it.
    https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
    https://github.com/pytorch/pytorch/issues/8976""",
    form(
        "loader worker {pid} was ended by SIGKILL: the OOM killer, or a user",
        f"{OF_MEMORY}\n{ENDED_FIX}",
        WORKER + r"is killed by signal: Killed",
    ),
    form(
        "loader worker {pid} was ended by {signal}",
        ENDED_FIX,
        WORKER + r"is killed by signal: (?P<signal>(?!Bus error)\w[\w ]*)",
    ),
    form(
        "loader worker {pid} was ended by a signal; the end of the message names it",
        ENDED_FIX,
        rf"{WORKER}is killed by signal{SHORT}",
    ),
    form(
        "loader worker {pid} ended unexpectedly with exit code {code}",
        ENDED_FIX,
        WORKER + r"exited unexpectedly with exit code (?P<code>\d+)",
    ),
    form(
        "loader worker {pid} ended unexpectedly, without an exception",
        ENDED_FIX,
        WORKER + r"exited unexpectedly",
    ),
    form(
        "the pin memory thread ended unexpectedly, without an exception",
        ENDED_FIX,
        r"Pin memory thread exited unexpectedly",
    ),
    form(
        "process {process} was ended by {name}",
        f"{OF_MEMORY}\n{NO_WORKERS}",
        r"process (?P<process>\d+) terminated with signal (?P<name>SIG\w+)",
    ),
    form(
        "process {process} ended unexpectedly with exit code {code}",
        NO_WORKERS,
        r"process (?P<process>\d+) terminated with exit code (?P<code>\d+)",
    ),
    form(
        "a loader worker ended while it passed on a batch (the reason was not reported)",
        f"{NO_WORKERS}\n{OF_MEMORY}",
        HANDED_OVER,
    ),
    types=(
        "RuntimeError",
        "ProcessExitedException",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "EOFError",
        "FileNotFoundError",
    ),
    when=_is_end_of_worker,
)

COLLATES = ":(?:default_collate|collate_tensor_fn|collate|fetch)$"
PAD = "collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)   # for sequences"
TO_ONE_SIZE = (
    "transforms.Resize((224, 224)); image.convert('RGB')   # for images: one size, one number of channels"
)
samples_of_other_sizes = known(
    "FE072",
    "samples-of-other-sizes",
    """The samples of a batch have different sizes.
    Images were not resized to one size, sequences were not padded, or a sample is damaged (grey instead of
    colour). The loader stacks the samples of a batch into one tensor.
    https://docs.pytorch.org/docs/stable/data.html#dataloader-collate-fn""",
    form(
        "sample 0[[ of batch {batch}]] is {one} and sample {at} is {other}: they cannot be stacked into one tensor",
        f"{TO_ONE_SIZE}\n{PAD}",
        r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]*\]) at entry 0 and (?P<other>\[[\d, ]*\]) at entry (?P<at>\d+)",
    ),
    form(
        "the samples[[ of batch {batch}]] are lists of different lengths (or share memory that cannot grow): they cannot be stacked into one tensor",
        PAD,
        r"(?P<lists>each element in list of batch should be of equal size)",
        r"Trying to resize storage that is not resizable",
    ),
    when=lambda failure, match: bool(match["lists"]) or runs_in(failure, COLLATES),
    values=lambda failure, _: {"batch": "" if failure.batch is None else str(failure.batch + 1)},
)

INFERS = r"Could not infer dtype of (?P<type>\w+)"
uncollatable_sample = known(
    "FE073",
    "uncollatable-sample",
    """A sample has a type that the loader cannot collate.
    `__getitem__` returns None for a damaged sample, a PIL image without a transform to a tensor, or a custom
    object. The loader collates tensors, arrays, numbers, strings, and lists and dictionaries of these.
    https://docs.pytorch.org/docs/stable/data.html#dataloader-collate-fn""",
    form(
        "the data set returned a sample of type {type}, and the loader cannot collate it",
        "transforms.ToTensor()   # as the last transform, for images\n"
        "DataLoader(..., collate_fn=lambda rows: default_collate([row for row in rows if row is not None]))   # drops damaged samples\n"
        "DataLoader(..., collate_fn=...)   # a function that handles this type; or return tensors from __getitem__",
        r"(?:default_collate: )?batch must contain .{5,60}?; found <class '(?P<type>[\w.]+)'>",
        r"default_collate: batch must contain .{5,60}?; found (?P<type>\S+)",
        INFERS,
    ),
    types=("TypeError", "RuntimeError"),
    when=lambda failure, match: match.pattern != INFERS or runs_in(failure, COLLATES),
)

AT_THE_TOP = "def at_the_top_of_the_module(x): ...   # instead of a lambda or a nested function; functools.partial for arguments"
cannot_be_pickled = known(
    "FE074",
    "cannot-be-pickled",
    """An object for a spawned process cannot be pickled.
    A lambda or a nested function (as a transform or `collate_fn`), a nested class, an open file, a lock, a
    database connection or a generator. A spawned process receives its data set, functions and arguments pickled.
    https://docs.python.org/3/library/pickle.html#what-can-be-pickled-and-unpickled""",
    form(
        "`{what}` cannot be pickled, and a spawned process receives everything pickled",
        AT_THE_TOP,
        r"Can't (?:pickle|get) local object '(?P<what>[^']+)'",
        r"Can't pickle <(?:function|class) '?(?P<what>[^'>]+?)'?(?: at 0x[0-9a-f]+)?>: .+",
        r"Can't pickle local object (?P<what><.+?>)(?: at 0x|$|>)",
    ),
    form(
        "an object of type {what} cannot be pickled, and a spawned process receives everything pickled",
        "open it in the worker: on first use, or in worker_init_fn",
        r"cannot pickle '(?P<what>[^']+)' object",
    ),
    form(
        "a child process does not find `{attribute}` in {module}: it was defined in code that the new process does not run",
        "define it at the top of a module that can be imported (not under the main guard, not in a notebook)",
        r"Can't get attribute '(?P<attribute>[^']+)' on <module '(?P<module>[^']+)'",
    ),
    types=("AttributeError", "TypeError", "PicklingError", "PickleError"),
    # otherwise the program pickles or copies for another purpose
    when=lambda failure, match: (
        not match.thrown.frames or runs_in(failure, "multiprocessing|concurrent/futures")
    ),
)

UNGUARDED = r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"
no_main_guard = known(
    "FE075",
    "no-main-guard",
    """A script starts processes without a main guard.
    Code that starts workers (or trains) is at the top level of the script, and processes are spawned (macOS,
    Windows, or by choice): each imports the script again, and starts processes again.
    https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods""",
    form(
        "the script starts processes on import, and a spawned process imports it again",
        'if __name__ == "__main__":\n    main()',
        r"An attempt has been made to start a new process before the\s+current process has finished its bootstrapping phase",
        UNGUARDED,
    ),
    when=lambda failure, match: match.pattern != UNGUARDED or bool(failure.facts.get("unguarded")),
)

loader_timed_out = known(
    "FE076",
    "loader-timed-out",
    """The data loader timed out.
    A sample takes longer than `timeout=` (a slow disk, a download), or a worker hangs (a lock held at the fork,
    a deadlock of OpenCV).
    https://docs.pytorch.org/docs/stable/data.html""",
    form(
        "no loader worker returned a batch within {seconds} seconds[[ after {batches} batches]]",
        "DataLoader(..., timeout=0)       # or longer than the slowest batch\nDataLoader(..., num_workers=0)   # shows how long one batch takes, and where",
        r"DataLoader timed out after (?P<seconds>[\d.]+) seconds",
    ),
    values=lambda failure, _: {"batches": "" if failure.batch is None else str(failure.batch + 1)},
)
