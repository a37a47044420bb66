"""Failures of data loaders, of the processes that they start, and of samples that do not fit together."""

import re

from flatout.diagnose.kind import (
    MESSAGE_END,
    Diagnosis,
    Form,
    MessageMatch,
    frame_matches,
    kind,
    pattern_kind,
)
from flatout.schema.failure import ExceptionRecord, FailureRecord


def _nested_error(failure: FailureRecord) -> tuple[ExceptionRecord, ExceptionRecord] | None:
    """The exception of another process, and the exception of this process that contains it."""
    for inner, outer in zip(failure.chain, failure.chain[1:], strict=False):
        if inner.link == "carried":
            return inner, outer
    return None


@kind("FE070", "error-in-a-worker", secondary=True)
def error_in_a_worker(failure: FailureRecord) -> Diagnosis | None:
    """An exception in a loader worker or a spawned process.

    Why it happens:
        The first traceback, the one from that process, shows the cause. In a worker, `__getitem__`, a transform or the collate function
        raised it.
    How to fix it:
        Fix the named line. `num_workers=0` runs the same code in the main process, where a debugger can stop
        at it.
    Sources:
        https://docs.pytorch.org/docs/stable/data.html"""
    nested = _nested_error(failure)
    if nested is None:
        return None
    inner, outer = nested
    worker_match = re.match(
        r"Caught \w+ in (?P<where>DataLoader worker process \d+|replica \d+ on device \d+|pin memory thread for device \w+)\.",
        outer.message,
    )
    process_match = re.search(r"-- Process (?P<where>\d+) terminated with the following error", outer.message)
    match = worker_match or process_match
    if match is None:
        return None
    name = match["where"] if worker_match else f"process {match['where']}"
    frame = inner.user_frame
    line = f" at {frame.place().sentence()}" if frame else ""
    first = inner.message.split("\n")[0][:160]
    return Diagnosis(
        f"{inner.type.rpartition('.')[2]} in {name}{line}" + (f": {first}" if first else ""),
        "DataLoader(..., num_workers=0)   # runs the same code in this process, where a debugger can stop at it"
        if worker_match
        else "fix the named line; it runs in every process",
        [],
        frame.place() if frame else None,
    )


WORKER_ENDED = r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) "
WITHOUT_WORKERS = "DataLoader(..., num_workers=0)                      # does the code itself fail?"
WORKER_FIX = (
    f"{WITHOUT_WORKERS}\n"
    'DataLoader(..., multiprocessing_context="spawn")    # for a library that is not fork-safe; cv2.setNumThreads(0) for OpenCV'
)
CHECK_OOM = "dmesg -T | grep -i oom; cat /sys/fs/cgroup/memory.events   # was memory the cause? then use fewer workers"
CONNECTION_LOST = r"(?:\[Errno \d+\] (?:Connection|Broken pipe|No such file)|$)"


def _is_worker_end(failure: FailureRecord, match: MessageMatch) -> bool:
    """Whether no other kind says more: a missing main guard. A tensor may wait for a worker that is gone."""
    if match.pattern == CONNECTION_LOST:
        return frame_matches(failure, ":(?:rebuild_storage_fd|_try_get_data)$")
    return not failure.facts.get("missing_main_guard")


worker_ended = pattern_kind(
    "FE071",
    "worker-ended",
    """A loader worker or a child process ended unexpectedly.
    SIGKILL usually comes from the OOM killer. SIGSEGV and SIGABRT come from native code (decoders, OpenCV, a
    library that is not fork-safe). An exit without a message comes from `os._exit` or a library that calls it.
    https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
    https://github.com/pytorch/pytorch/issues/8976""",
    Form(
        "loader worker {pid} was ended by SIGKILL: the OOM killer, or a user",
        f"{CHECK_OOM}\n{WORKER_FIX}",
        WORKER_ENDED + r"is killed by signal: Killed",
    ),
    Form(
        "loader worker {pid} was ended by {signal}",
        WORKER_FIX,
        WORKER_ENDED + r"is killed by signal: (?P<signal>(?!Bus error)\w[\w ]*)",
    ),
    Form(
        "loader worker {pid} was ended by a signal; the end of the message names it",
        WORKER_FIX,
        rf"{WORKER_ENDED}is killed by signal{MESSAGE_END}",
    ),
    Form(
        "loader worker {pid} ended unexpectedly with exit code {code}",
        WORKER_FIX,
        WORKER_ENDED + r"exited unexpectedly with exit code (?P<code>\d+)",
    ),
    Form(
        "loader worker {pid} ended unexpectedly, without an exception",
        WORKER_FIX,
        WORKER_ENDED + r"exited unexpectedly",
    ),
    Form(
        "the pin memory thread ended unexpectedly, without an exception",
        WORKER_FIX,
        r"Pin memory thread exited unexpectedly",
    ),
    Form(
        "process {process} was ended by {name}",
        f"{CHECK_OOM}\n{WITHOUT_WORKERS}",
        r"process (?P<process>\d+) terminated with signal (?P<name>SIG\w+)",
    ),
    Form(
        "process {process} ended unexpectedly with exit code {code}",
        WITHOUT_WORKERS,
        r"process (?P<process>\d+) terminated with exit code (?P<code>\d+)",
    ),
    Form(
        "a loader worker ended while it passed on a batch (the reason was not reported)",
        f"{WITHOUT_WORKERS}\n{CHECK_OOM}",
        CONNECTION_LOST,
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
    when=_is_worker_end,
)

COLLATE_FRAMES = ":(?:default_collate|collate_tensor_fn|collate|fetch)$"
PAD_SEQUENCES = (
    "collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)   # for sequences"
)
RESIZE_IMAGES = (
    "transforms.Resize((224, 224)); image.convert('RGB')   # for images: one size, one number of channels"
)
samples_of_other_sizes = pattern_kind(
    "FE072",
    "samples-of-other-sizes",
    """The samples of a batch have different sizes.
    Images were not resized to one size, sequences were not padded, or a sample is damaged (grey instead of
    colour). The loader stacks the samples of a batch into one tensor.
    https://docs.pytorch.org/docs/stable/data.html#dataloader-collate-fn""",
    Form(
        "sample 0[[ of batch {batch}]] is {one} and sample {at} is {other}: they cannot be stacked into one tensor",
        f"{RESIZE_IMAGES}\n{PAD_SEQUENCES}",
        r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]*\]) at entry 0 and (?P<other>\[[\d, ]*\]) at entry (?P<at>\d+)",
    ),
    Form(
        "the samples[[ of batch {batch}]] are lists of different lengths (or share memory that cannot grow): they cannot be stacked into one tensor",
        PAD_SEQUENCES,
        r"(?P<lists>each element in list of batch should be of equal size)",
        r"Trying to resize storage that is not resizable",
    ),
    when=lambda failure, match: bool(match["lists"]) or frame_matches(failure, COLLATE_FRAMES),
    values=lambda failure, _: {"batch": "" if failure.batch is None else str(failure.batch + 1)},
)

DTYPE_INFERENCE = r"Could not infer dtype of (?P<type>\w+)"
uncollatable_sample = pattern_kind(
    "FE073",
    "uncollatable-sample",
    """A sample has a type that the loader cannot collate.
    `__getitem__` returns None for a damaged sample, a PIL image without a transform to a tensor, or a custom
    object. The loader collates tensors, arrays, numbers, strings, and lists and dictionaries of these.
    https://docs.pytorch.org/docs/stable/data.html#dataloader-collate-fn""",
    Form(
        "the data set returned a sample of type {type}, and the loader cannot collate it",
        "transforms.ToTensor()   # as the last transform, for images\n"
        "DataLoader(..., collate_fn=lambda rows: default_collate([row for row in rows if row is not None]))   # drops damaged samples\n"
        "DataLoader(..., collate_fn=...)   # a function that handles this type; or return tensors from __getitem__",
        r"(?:default_collate: )?batch must contain .{5,60}?; found <class '(?P<type>[\w.]+)'>",
        r"default_collate: batch must contain .{5,60}?; found (?P<type>\S+)",
        DTYPE_INFERENCE,
    ),
    types=("TypeError", "RuntimeError"),
    when=lambda failure, match: match.pattern != DTYPE_INFERENCE or frame_matches(failure, COLLATE_FRAMES),
)

TOP_LEVEL_FUNCTION = "def at_the_top_of_the_module(x): ...   # instead of a lambda or a nested function; functools.partial for arguments"
cannot_be_pickled = pattern_kind(
    "FE074",
    "cannot-be-pickled",
    """An object for a spawned process cannot be pickled.
    A lambda or a nested function (as a transform or `collate_fn`), a nested class, an open file, a lock, a
    database connection or a generator. A spawned process receives its data set, functions and arguments pickled.
    https://docs.python.org/3/library/pickle.html#what-can-be-pickled-and-unpickled""",
    Form(
        "`{what}` cannot be pickled, and a spawned process receives everything pickled",
        TOP_LEVEL_FUNCTION,
        r"Can't (?:pickle|get) local object '(?P<what>[^']+)'",
        r"Can't pickle <(?:function|class) '?(?P<what><lambda>|[^'>]+?)'?(?: at 0x[0-9a-f]+)?>: .+",
        r"Can't pickle local object (?P<what><.+?>)(?: at 0x|$|>)",
    ),
    Form(
        "an object of type {what} cannot be pickled, and a spawned process receives everything pickled",
        "open it in the worker: on first use, or in worker_init_fn",
        r"cannot pickle '(?P<what>[^']+)' object",
    ),
    Form(
        "a child process does not find `{attribute}` in {module}: it was defined in code that the new process does not run",
        "define it at the top of a module that can be imported (not under the main guard, not in a notebook)",
        r"Can't get attribute '(?P<attribute>[^']+)' on <module '(?P<module>[^']+)'",
    ),
    types=("AttributeError", "TypeError", "PicklingError", "PickleError"),
    # otherwise the program pickles or copies for another purpose
    when=lambda failure, match: (
        not match.error.frames or frame_matches(failure, "multiprocessing|concurrent/futures")
    ),
)

BOOTSTRAP = "An attempt has been made to start a new process before the"
NO_MAIN_GUARD = r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"
no_main_guard = pattern_kind(
    "FE075",
    "no-main-guard",
    """A script starts processes without a main guard.
    Code that starts workers (or trains) is at the top level of the script, and processes are spawned (macOS,
    Windows, or by choice): each imports the script again, and starts processes again.
    https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods""",
    Form(
        "the script starts processes on import, and a spawned process imports it again",
        'if __name__ == "__main__":\n    main()',
        rf"{BOOTSTRAP}\s+current process has finished its bootstrapping phase",
        NO_MAIN_GUARD,
    ),
    when=lambda failure, match: (
        match.pattern != NO_MAIN_GUARD or bool(failure.facts.get("missing_main_guard"))
    ),
)

loader_timed_out = pattern_kind(
    "FE076",
    "loader-timed-out",
    """The data loader timed out.
    A sample takes longer than `timeout=` (a slow disk, a download), or a worker hangs (a lock held at the fork,
    a deadlock of OpenCV).
    https://docs.pytorch.org/docs/stable/data.html""",
    Form(
        "no loader worker returned a batch within {seconds} seconds[[ after {batches} batches]]",
        "DataLoader(..., timeout=0)       # or longer than the slowest batch\nDataLoader(..., num_workers=0)   # shows how long one batch takes, and where",
        r"DataLoader timed out after (?P<seconds>[\d.]+) seconds",
    ),
    values=lambda failure, _: {"batches": "" if failure.batch is None else str(failure.batch + 1)},
)

no_samples = pattern_kind(
    "FE077",
    "no-samples",
    """The data set is empty.
    A glob or a filter matches nothing, the path names another folder, or the split leaves no sample.
    https://docs.pytorch.org/docs/stable/data.html""",
    Form(
        "the data set is empty: its list of files or samples matches nothing",
        "print(len(dataset), root)   # check the folder and the pattern; glob does not search subfolders without **",
        r"num_samples should be a positive integer value, but got num_samples=0",
    ),
    types=("ValueError",),
)
