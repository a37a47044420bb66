"""The gate's child process: ``python -m flatout.kernels SUBJECT RECORDS AFTER``.

Writes one JSON object per line to RECORDS: first the list of checks, then the number of each check before it
runs and its outcome after it. So the reader knows which check caused a crash, and restarts AFTER it. For CUDA
C++ without a GPU, it requests the emulator and ends. A process that may start a compiler then builds the
libraries and names them in FLATOUT_EMULATED.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from flatout.kernels.cuda import EMULATED
from flatout.kernels.gate import SANITIZED, checks, run
from flatout.kernels.subject import SubjectError, find


def main(subject: str, records: Path, after: int) -> None:
    with records.open("a", encoding="utf-8") as file:

        def write(**record: object) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        gpu = torch.cuda.is_available()
        if not gpu:
            os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, with the kernel
        try:
            kernel = find(subject)
        except SubjectError as error:
            write(refused=str(error))
            return
        todo = checks(kernel)
        if os.environ.get(SANITIZED):
            todo = [(name, check) for name, check in todo if name.endswith(": memory")]
        emulate = bool(kernel.sources) and not gpu and EMULATED not in os.environ
        write(
            kernel=kernel.name,
            sources=[(str(source.path), source.kernels(), source.emulated_name) for source in kernel.sources],
            checks=[name for name, _ in todo],
            gpu=gpu,
            emulate=emulate,
        )
        if emulate:
            return
        for number, (name, check) in enumerate(todo):
            if number > after:
                write(begins=number)
                write(**asdict(run(name, check)))
        write(ended=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
