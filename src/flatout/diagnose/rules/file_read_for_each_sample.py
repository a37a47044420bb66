"""Every sample reads a whole file again.

What:
    `__getitem__`, or a function that it calls, reads a whole file: one whose path is the same for every sample, or
    one with many samples of which it keeps a single one, as in `np.load(path)["data"][row]`.
Why it matters:
    The file is read, unpacked and parsed once per sample, not once per run. The time of a sample grows with the size
    of the file, and with shuffled samples no cache of the program helps. The step waits for data.
How to fix it:
    Read the file once in `__init__`, or open it so that an index reads only its part: `np.load(path, mmap_mode="r")`
    for a `.npy` file, `torch.load(path, mmap=True)`, or an open HDF5 data set without `[:]`.
Example:
    import numpy as np
    import torch

    class Rows(torch.utils.data.Dataset):
        def __init__(self, rows):
            self.rows = rows
  +         self.files = {path: np.load(path)["data"] for path, _ in rows}

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            path, row = self.rows[index]
  -         return torch.from_numpy(np.load(path)["data"][row])  # <-
  +         return torch.from_numpy(self.files[path][row])
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.sample_reads import FileRead, reads_of_samples
from flatout.probe.sample_rows import row_of
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    seen: set[int] = set()
    for read in reads_of_samples(program):
        if id(read.call) in seen:
            continue
        name, row = read.source.code(getattr(read.call, "func", read.call)), row_of(program, read)
        if read.constant:
            said = f"`{name}` reads the same whole file for every sample"
        elif row is not None:
            said = f"`{name}` reads a whole file for every sample, of which it keeps only `[{read.source.code(row)}]`"
        else:
            continue
        seen.add(id(read.call))
        yield RULE.finding(
            said,
            read.source.place(read.call),
            "# read the file once in __init__, or open it with mmap",
            others=[] if _directly(read) else [read.home.place(read.entry)],
        )


def _directly(read: FileRead) -> bool:
    """Return whether the file is read in the text of ``__getitem__`` itself."""
    return any(above is read.entry for above in read.source.parents(read.call))


RULE = Rule("FL124", "file_read_for_each_sample", Severity.TIME, __doc__, check)
