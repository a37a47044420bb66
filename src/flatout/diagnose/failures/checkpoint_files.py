"""Files of checkpoints that cannot be read or written."""

from __future__ import annotations

import re

from flatout.diagnose.kind import RUNTIME, Diagnosis, kind, match_message
from flatout.schema.failure import FailureRecord


@kind("FE093", "broken-checkpoint")
def broken_checkpoint(failure: FailureRecord) -> Diagnosis | None:
    """The checkpoint file is damaged or not a checkpoint.

    What:
        torch cannot read the file: it is truncated, empty or of another kind.
    Why it happens:
        The program was killed while it wrote, the disk was full, or a download was interrupted or returned an
        HTML page or a Git LFS pointer.
    How to fix it:
        `ls -l` and `file` show what the file is. Use the previous checkpoint or download again (`git lfs
        pull`). Write to a temporary file and rename it, so that a kill leaves the old file intact.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/serialization.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "UnpicklingError", "EOFError", "BadZipFile", "OSError", "ValueError"),
        r"PytorchStreamReader failed (?:reading (?:zip archive|file (?P<part>\S+?))|locating file (?P<part2>\S+?)):? ?(?P<why>[\w .]+)",
        r"invalid load key, (?P<key>'.{1,6}?')\.",
        r"Ran out of input",
        r"(?:negative seek value -\d+|\[Errno 22\] Invalid argument)$"
        if _opens_an_archive(failure)
        else r"(?!)",
        r"(?P<empty>)$",
        r"unexpected EOF, expected (?P<bytes>\d+) more bytes\. The file might be corrupted",
        r"Weights only load failed\..*?(?P<operand>Unsupported operand (?P<number>\d+)|persistent_load)",
        r"unpickling stack underflow",
        r"pickle data was truncated",
        r"File is not a zip file",
        r"(?P<magic>Invalid magic number; corrupt file\?)",
        r".{0,60}(?P<header>Error while deserializing header: (?P<why>\w+))",
    )
    if found is None:
        return None
    if (
        found.thrown.names
        and not {"RuntimeError", "UnpicklingError"} & set(found.thrown.names)
        and not _loads(failure)
    ):
        return None
    if not found.thrown.message and "EOFError" not in found.thrown.names:
        return None
    if (
        found.thrown.message.startswith(
            ("Ran out of input", "unpickling stack", "pickle data", "invalid load key", "File is not")
        )
        and found.thrown.frames
        and not _loads(failure)
    ):
        return None
    key = found["key"] or (
        repr(chr(int(found["number"]))) if found["number"] and int(found["number"]) < 128 else ""
    )
    if found.thrown.message.startswith("Ran out of input") or not found.thrown.message:
        said = "the file is empty or ends at once"
    elif key in ("'<'", "'v'", "'{'"):
        said = {
            "'<'": "the file begins like HTML: a web page was saved instead of the checkpoint",
            "'v'": "the file begins like a Git LFS pointer: the checkpoint itself was not fetched",
            "'{'": "the file begins like JSON: an error message or an index was saved instead of the checkpoint",
        }[key]
    else:
        said = "the file is truncated or is not a torch checkpoint" + (
            f" ({found['why'].strip()})" if found["why"].strip() else ""
        )
    return Diagnosis(
        said,
        "ls -l checkpoint.pt; file checkpoint.pt; head -c 200 checkpoint.pt   # shows what the file is (git lfs pull)\n"
        'torch.save(state, path + ".part"); os.replace(path + ".part", path)   # next time: a kill leaves the old file intact',
    )


def _opens_an_archive(failure: FailureRecord) -> bool:
    """Whether torch was opening an archive. For a file that is too short it reports only a failed seek."""
    return any(thrown.frames and "PyTorchFileReader" in thrown.frames[-1].text for thrown in failure.chain)


def _loads(failure: FailureRecord) -> bool:
    """Whether torch (or safetensors) was reading a file."""
    return any(
        re.search(r"torch[/\\](?:serialization|_weights_only_unpickler|hub|jit)|safetensors", frame.file)
        for thrown in failure.chain
        for frame in thrown.frames
    )


@kind("FE096", "writing-failed")
def writing_failed(failure: FailureRecord) -> Diagnosis | None:
    """The checkpoint could not be written completely.

    What:
        `torch.save` could not write the whole file. The file's previous content is lost.
    Why it happens:
        The disk, the quota or the file size limit is full. torch reports it as a position in the archive, not
        as a full disk.
    How to fix it:
        Check `df -h . ; df -i . ; ulimit -f`, remove old checkpoints, and write to a temporary file before
        renaming it.
    Sources:
        https://github.com/pytorch/pytorch/issues/112196
    """
    found = match_message(
        failure,
        ("RuntimeError", "OSError"),
        r"\[enforce fail at inline_container\.cc:\d+\] ?\.? ?(?:PytorchStreamWriter failed|unexpected pos (?P<at>\d+) vs (?P<wanted>\d+))",
        r"PytorchStreamWriter failed (?:writing|closing|in)",
        r"(?P<disk>\[Errno (?:28|122|27)\] .+)",
    )
    if found is None or (
        found["disk"]
        and not any("torch/serialization" in frame.file.replace("\\", "/") for frame in found.thrown.frames)
    ):
        return None
    return Diagnosis(
        "the checkpoint could not be written completely: the disk, a quota or the file size limit is full; the old file is lost",
        "df -h . ; df -i . ; ulimit -f   # free space, free files, largest file size\n"
        'torch.save(state, path + ".part"); os.replace(path + ".part", path)   # next time: keeps the old file until the new one is complete',
    )


@kind("FE097", "no-such-folder")
def no_such_folder(failure: FailureRecord) -> Diagnosis | None:
    """The folder for the checkpoint does not exist.

    What:
        `torch.save` creates files, not folders.
    Why it happens:
        The folder was never created, or the program runs in an unexpected working directory.
    How to fix it:
        `os.makedirs(os.path.dirname(path), exist_ok=True)` before saving, preferably before training.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.save.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"Parent directory (?P<folder>.{1,300}?) does not exist\.",
        r"File (?P<path>.{1,300}?) cannot be opened\.",
    )
    if found is None:
        return None
    what = (
        f"the folder {found['folder']} does not exist"
        if found["folder"]
        else f"{found['path']} cannot be written"
    )
    return Diagnosis(
        what,
        "os.makedirs(os.path.dirname(path), exist_ok=True)   # before training, so that an error shows early",
    )
