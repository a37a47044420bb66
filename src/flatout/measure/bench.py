"""Measure the ceilings of this machine: ``python -P -m flatout.measure.bench OUT FOLDER``.

Writes one JSON object per line, as soon as each figure is known. A rate is the best of several repetitions,
each long enough for the clock: a ceiling is the best achievable value (as in STREAM). The quartiles show the
disturbance by other programs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType

from flatout.measure.clock import Clock, HostClock, clock_for
from flatout.measure.load import busy_cores
from flatout.measure.statistics import quantile
from flatout.schema.ceilings import MATMUL_DTYPES, Ceiling
from flatout.schema.errors import first_line

REPETITIONS = 7
LONG_ENOUGH_MS = 60.0  # per repetition; CUDA events resolve half a microsecond
MULTIPLY_MS = 15.0  # per multiplication: above this, size does not limit the rate
LARGEST = {"cpu": 4096, "cuda": 16384}  # rows of a matrix
ARRAY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}  # several times the last-level cache of current processors
COPY_BYTES = 256 * 2**20
FILE_BYTES = 256 * 2**20
BLOCK_BYTES = 8 * 2**20


def on_host(torch: ModuleType, folder: Path) -> Iterator[Ceiling]:
    """Yield every host figure that a single process can measure. ``folder`` selects the disk."""
    yield from on_device(torch, "cpu")
    yield disk(folder)


def on_device(torch: ModuleType, device: str) -> Iterator[Ceiling]:
    for dtype in MATMUL_DTYPES:
        yield matmul(torch, device, dtype)
    yield memory(torch, device)
    yield to_device(torch, device)


def repeated(clock: Clock, work: Callable[[], object], count: int = REPETITIONS) -> tuple[list[float], int]:
    """Time ``work`` in repetitions, after a warm-up.

    Returns the milliseconds of one ``work`` in each repetition, and the number of calls per repetition.
    """
    times = max(1, round(LONG_ENOUGH_MS / _once(clock, work)))
    found = []
    for _ in range(count):
        clock.settle()
        start = clock.mark()
        for _ in range(times):
            work()
        end = clock.mark()
        found.append(clock.elapsed_ms(start, end) / times)
    return found, times


def _once(clock: Clock, work: Callable[[], object]) -> float:
    """Return the milliseconds of one ``work``: the shortest of three, because the machine may be busy."""
    work()
    found = []
    for _ in range(3):
        clock.settle()
        start = clock.mark()
        work()
        found.append(clock.elapsed_ms(start, clock.mark()))
    return max(min(found), 1e-3)


def rate(name: str, device: str, amount: float, each_ms: list[float], note: str) -> Ceiling:
    """Return ``amount`` per repetition as a rate per second: the best, and the quartiles."""
    rates = [amount / ms * 1000 for ms in each_ms]
    return Ceiling(name, device, max(rates), quantile(rates, 0.25), quantile(rates, 0.75), len(rates), note)


def matmul(torch: ModuleType, device: str, dtype: str) -> Ceiling:
    """Multiply square matrices of the smallest size that takes MULTIPLY_MS.

    A product counts as 2 n^3 operations.
    """
    name = f"matmul_{dtype}_flops"
    if dtype == "tf32" and device != "cuda":
        return Ceiling(name, device, note="not run: Tensor Cores are needed")
    before = torch.get_float32_matmul_precision()
    clock, kind, rows = clock_for(torch, device), getattr(torch, "float32" if dtype == "tf32" else dtype), 256
    try:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        while True:
            a, b = (torch.randn(rows, rows, device=device).to(kind) for _ in range(2))
            out = torch.empty_like(a)
            product = partial(torch.mm, a, b, out=out)
            if _once(clock, product) > MULTIPLY_MS or rows >= LARGEST[device]:
                break
            rows *= 2
        each, times = repeated(clock, product)
    except RuntimeError as error:  # no kernel for this type, or no memory for this size
        return Ceiling(name, device, note=f"not run: {first_line(error)}")
    finally:
        torch.set_float32_matmul_precision(before)
    return rate(
        name,
        device,
        2.0 * rows**3,
        each,
        f"{rows} x {rows}, {times} product{'s' * (times > 1)} per repetition",
    )


def memory(torch: ModuleType, device: str) -> Ceiling:
    """Run copy and triad on arrays larger than any cache; the better of them counts.

    As in STREAM, reads caused by overwriting do not count.
    """
    name, clock, size = "memory_bytes_per_s", clock_for(torch, device), ARRAY_BYTES[device]
    try:
        a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    except RuntimeError as error:
        return Ceiling(name, device, note=f"not run: {first_line(error)}")
    note = f"arrays of {size // 2**20} MiB"
    copy = rate(name, device, 2.0 * size, repeated(clock, lambda: a.copy_(b))[0], f"copy, {note}")
    triad_ms = repeated(clock, lambda: torch.add(b, c, alpha=3.0, out=a))[0]
    triad = rate(name, device, 3.0 * size, triad_ms, f"triad, {note}")
    return max(copy, triad, key=lambda ceiling: ceiling.value or 0.0)


def to_device(torch: ModuleType, device: str) -> Ceiling:
    """Copy from pinned host memory."""
    name = "host_to_device_pinned_bytes_per_s"
    if device != "cuda":
        return Ceiling(name, device, note="not run: there is no device except the CPU")
    try:
        source = torch.ones(COPY_BYTES // 4, pin_memory=True)
        target = torch.empty(COPY_BYTES // 4, device=device)
    except RuntimeError as error:
        return Ceiling(name, device, note=f"not run: {first_line(error)}")
    copy = partial(target.copy_, source, non_blocking=True)
    each_ms, _ = repeated(clock_for(torch, device), copy)
    return rate(name, device, COPY_BYTES, each_ms, f"{COPY_BYTES // 2**20} MiB per copy")


def disk(folder: Path) -> Ceiling:
    """Read a file from start to end, after asking the kernel to drop it from the page cache.

    The note reports how much came from the disk, by the kernel's own count (/proc/self/io, read_bytes).
    """
    name, clock = "disk_read_bytes_per_s", HostClock()
    try:
        room = os.statvfs(folder)
        length = min(FILE_BYTES, room.f_bavail * room.f_frsize // 20) // BLOCK_BYTES * BLOCK_BYTES
        if length < BLOCK_BYTES:
            return Ceiling(name, "cpu", note=f"not run: too little space in {folder}")
        each, fetched = [], []
        with tempfile.TemporaryFile(dir=folder) as file:
            block = os.urandom(BLOCK_BYTES)
            for _ in range(length // BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            for _ in range(3):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                os.lseek(file.fileno(), 0, os.SEEK_SET)
                before, start = _read_from_disk(), clock.mark()
                while os.read(file.fileno(), BLOCK_BYTES):
                    pass
                each.append(clock.elapsed_ms(start, clock.mark()))
                fetched.append(_read_from_disk() - before)
    except OSError as error:
        return Ceiling(name, "cpu", note=f"not run: {folder}: {error.strerror}")
    return rate(
        name,
        "cpu",
        length,
        each,
        f"{length // 2**20} MiB in {folder}, page cache dropped before each read; "
        f"{100 * sum(fetched) / len(fetched) / length:.0f} % came from the disk",
    )


def _read_from_disk() -> int:
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


def main(out: str, folder: str) -> None:
    import torch

    with open(out, "a", encoding="utf-8") as file:

        def write(**record: object) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        write(threads=torch.get_num_threads(), busy_cores=busy_cores())
        device: Iterable[Ceiling] = on_device(torch, "cuda") if torch.cuda.is_available() else ()
        for found in chain(device, on_host(torch, Path(folder))):
            write(ceiling=found.to_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
