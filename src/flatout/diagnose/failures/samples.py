"""Samples that cannot be combined to a batch or sent to another process."""

from __future__ import annotations

import re

from flatout.diagnose.kind import RUNTIME, Diagnosis, kind, match_message
from flatout.schema.failure import FailureRecord


@kind("FE072", "samples-of-other-sizes")
def samples_of_other_sizes(failure: FailureRecord) -> Diagnosis | None:
    """The samples of a batch have different sizes.

    What:
        The loader stacks the samples of a batch into one tensor, and their sizes differ.
    Why it happens:
        Images were not resized to one size, sequences were not padded, or a sample is damaged (grey instead
        of colour).
    How to fix it:
        Use a transform that gives a fixed size, or `collate_fn=` with `pad_sequence` for sequences.
    Sources:
        https://docs.pytorch.org/docs/stable/data.html#dataloader-collate-fn
    """
    collating = any(
        frame.function in ("default_collate", "collate_tensor_fn", "collate", "fetch")
        for thrown in failure.chain
        for frame in thrown.frames
    )
    found = match_message(
        failure,
        RUNTIME,
        r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]*\]) at entry 0 and (?P<other>\[[\d, ]*\]) at entry (?P<at>\d+)",
        r"(?P<lists>each element in list of batch should be of equal size)",
        r"Trying to resize storage that is not resizable(?P<storage>)",
    )
    if found is None or (not collating and not found["lists"]):
        return None
    batch = f" of batch {failure.batch + 1}" if failure.batch is not None else ""
    if found["one"]:
        said = f"sample 0{batch} is {found['one']} and sample {found['at']} is {found['other']}: they cannot be stacked into one tensor"
        image = len(re.findall(r"\d+", found["one"])) == 3
    else:
        said, image = (
            f"the samples{batch} are lists of different lengths (or share memory that cannot grow): they cannot be stacked into one tensor",
            False,
        )
    pad = "collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)   # for sequences"
    return Diagnosis(
        said,
        f"transforms.Resize((224, 224)); image.convert('RGB')   # for images: one size, one number of channels\n{pad}"
        if image
        else pad,
    )


def _collates(failure: FailureRecord) -> bool:
    """Whether a loader was collating samples."""
    return any(
        frame.function in ("default_collate", "collate_tensor_fn", "collate", "fetch")
        for thrown in failure.chain
        for frame in thrown.frames
    )


@kind("FE073", "uncollatable-sample")
def uncollatable_sample(failure: FailureRecord) -> Diagnosis | None:
    """A sample has a type that the loader cannot collate.

    What:
        The loader collates tensors, arrays, numbers, strings, and lists and dictionaries of these.
    Why it happens:
        `__getitem__` returns None for a damaged sample, a PIL image without a transform to a tensor, or a
        custom object.
    How to fix it:
        Put `transforms.ToTensor()` at the end of the transforms, or use a `collate_fn` that drops None or
        handles the objects.
    Sources:
        https://docs.pytorch.org/docs/stable/data.html#dataloader-collate-fn
    """
    found = match_message(
        failure,
        ("TypeError", "RuntimeError"),
        r"Could not infer dtype of (?P<type>\w+)" if _collates(failure) else r"(?!)",
        r"default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class '(?P<type>[\w.]+)'>",
        r"batch must contain tensors, numbers, dicts or lists; found <class '(?P<type>[\w.]+)'>",
        r"default_collate: batch must contain .{5,60}?; found (?P<type>\S+)",
    )
    if found is None:
        return None
    name = found["type"]
    if name == "NoneType":
        fix = "DataLoader(..., collate_fn=lambda rows: default_collate([row for row in rows if row is not None]))   # drops damaged samples"
    elif name.startswith("PIL."):
        fix = "transforms.ToTensor()   # as the last transform"
    else:
        fix = "DataLoader(..., collate_fn=...)   # a function that handles this type; or return tensors from __getitem__"
    return Diagnosis(f"the data set returned a sample of type {name}, and the loader cannot collate it", fix)


@kind("FE074", "cannot-be-pickled")
def cannot_be_pickled(failure: FailureRecord) -> Diagnosis | None:
    """An object for a spawned process cannot be pickled.

    What:
        A spawned process receives its data set, functions and arguments pickled, and one of them cannot be
        pickled.
    Why it happens:
        A lambda or a nested function (as a transform or `collate_fn`), a nested class, an open file, a lock,
        a database connection or a generator.
    How to fix it:
        Define functions and classes at the top of a module, and use `functools.partial` instead of a lambda.
        Open files and connections in the worker (on first use, or in `worker_init_fn`).
    Sources:
        https://docs.python.org/3/library/pickle.html#what-can-be-pickled-and-unpickled
    """
    found = match_message(
        failure,
        ("AttributeError", "TypeError", "PicklingError", "PickleError"),
        r"Can't (?:pickle|get) local object '(?P<local>[^']+)'",
        r"Can't pickle <(?:function|class) '?(?P<object>[^'>]+?)'?(?: at 0x[0-9a-f]+)?>: (?P<why>.+)",
        r"cannot pickle '(?P<type>[^']+)' object",
        r"Can't get attribute '(?P<attribute>[^']+)' on <module '(?P<module>[^']+)'",
        r"Can't pickle local object (?P<local><.+?>)(?: at 0x|$|>)",
        r"can't pickle (?P<type>\S+) objects",
    )
    if found is None or (found.thrown.frames and not _starts_a_process(failure)):
        return None  # the program pickles or copies for another purpose
    if found["attribute"]:
        return Diagnosis(
            f"a child process does not find `{found['attribute']}` in {found['module']}: it was defined in code that the new process does not run",
            "define it at the top of a module that can be imported (not under the main guard, not in a notebook)",
        )
    what = found["local"] or found["object"] or f"an object of type {found['type']}"
    function = "lambda" in what or "<locals>" in what
    return Diagnosis(
        f"`{what}` cannot be pickled, and a spawned process receives everything pickled",
        "def at_the_top_of_the_module(x): ...   # instead of a lambda or a nested function; functools.partial for arguments"
        if function
        else "open it in the worker: on first use, or in worker_init_fn",
    )


def _starts_a_process(failure: FailureRecord) -> bool:
    return any(
        re.search(r"multiprocessing|concurrent[/\\]futures", frame.file)
        for thrown in failure.chain
        for frame in thrown.frames
    )
