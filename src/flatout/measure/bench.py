"""Measures the ceilings of this machine: ``python -P -m flatout.measure.bench OUT FOLDER``. One JSON object a line, as each figure is known.

Every rate is the best of repetitions that each last long enough for the clock: a ceiling is what can be reached (STREAM does the same). How
much other programs disturbed the rest shows in the quartiles.
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
from typing import Any

from flatout.measure.clock import Clock, HostClock, clock_for
from flatout.measure.load import busy_cores
from flatout.measure.statistics import median, quantile
from flatout.plan.ceilings import MATMUL_DTYPES, Ceiling

REPETITIONS = 7
LONG_ENOUGH_MS = 60.0  # of one repetition; the clock of CUDA events resolves half a microsecond
MULTIPLY_MS = 15.0  # of one multiplication: from here on its size is not what limits it
LARGEST = {"cpu": 4096, "cuda": 16384}  # rows of a matrix
ARRAY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}  # several times the last cache of today's processors
COPY_BYTES = 256 * 2**20
FILE_BYTES = 256 * 2**20
BLOCK_BYTES = 8 * 2**20
LOADER_STARTS = 5


def on_host(torch: Any, folder: Path) -> Iterator[Ceiling]:
    """Every figure of the processor that one process can have. ``folder`` is where the disk is measured."""
    yield from on_device(torch, "cpu")
    yield disk(folder)
    yield loader(torch)


def on_device(torch: Any, device: str) -> Iterator[Ceiling]:
    for dtype in MATMUL_DTYPES:
        yield matmul(torch, device, dtype)
    yield from memory(torch, device)
    yield from copies(torch, device)


def repeated(clock: Clock, work: Callable[[], object], count: int = REPETITIONS) -> tuple[list[float], int]:
    """Milliseconds of one ``work`` in each repetition, and how many of it a repetition held. The first, unmeasured ones warm up."""
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
    """Milliseconds of one ``work``: the shortest of three after one that warms up, so that a busy machine misleads nobody."""
    work()
    found = []
    for _ in range(3):
        clock.settle()
        start = clock.mark()
        work()
        found.append(clock.elapsed_ms(start, clock.mark()))
    return max(min(found), 1e-3)


def rate(name: str, device: str, amount: float, each_ms: list[float], note: str) -> Ceiling:
    """``amount`` a repetition as a rate a second: the best one, and the quartiles of all."""
    rates = [amount / ms * 1000 for ms in each_ms]
    return Ceiling(name, device, max(rates), quantile(rates, 0.25), quantile(rates, 0.75), len(rates), note)


def matmul(torch: Any, device: str, dtype: str) -> Ceiling:
    """Square matrices, the smallest whose product takes MULTIPLY_MS; counted as 2 n^3 operations."""
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
        return Ceiling(name, device, note=f"not run: {str(error).splitlines()[0]}")
    finally:
        torch.set_float32_matmul_precision(before)
    return rate(name, device, 2.0 * rows**3, each, f"{rows} x {rows}, {times} product{'s' * (times > 1)} a repetition")


def memory(torch: Any, device: str) -> Iterator[Ceiling]:
    """Copy and triad over arrays that no cache holds. What is read to be overwritten is not counted, as in STREAM."""
    clock, count = clock_for(torch, device), ARRAY_BYTES[device] // 4
    try:
        a, b, c = (torch.ones(count, device=device) for _ in range(3))
    except RuntimeError as error:
        for name in ("memory_bytes_per_s", "memory_copy_bytes_per_s", "memory_triad_bytes_per_s"):
            yield Ceiling(name, device, note=f"not run: {str(error).splitlines()[0]}")
        return
    note = f"arrays of {ARRAY_BYTES[device] // 2**20} MiB"
    copy = rate("memory_copy_bytes_per_s", device, 2.0 * ARRAY_BYTES[device], repeated(clock, lambda: a.copy_(b))[0], note)
    triad = rate("memory_triad_bytes_per_s", device, 3.0 * ARRAY_BYTES[device], repeated(clock, lambda: torch.add(b, c, alpha=3.0, out=a))[0], note)
    best = copy if (copy.value or 0) >= (triad.value or 0) else triad
    yield Ceiling("memory_bytes_per_s", device, best.value, best.low, best.high, best.n, f"the better of copy and triad: {best.name.split('_')[1]}")
    yield copy
    yield triad


def copies(torch: Any, device: str) -> Iterator[Ceiling]:
    for kind in ("pinned", "pageable"):
        name = f"host_to_device_{kind}_bytes_per_s"
        if device != "cuda":
            yield Ceiling(name, device, note="not run: there is no device beside the processor")
            continue
        try:
            source, target = torch.ones(COPY_BYTES // 4, pin_memory=kind == "pinned"), torch.empty(COPY_BYTES // 4, device=device)
        except RuntimeError as error:
            yield Ceiling(name, device, note=f"not run: {str(error).splitlines()[0]}")
            continue
        each, _ = repeated(clock_for(torch, device), lambda to=target, of=source: to.copy_(of, non_blocking=True))  # type: ignore[misc]
        yield rate(name, device, COPY_BYTES, each, f"{COPY_BYTES // 2**20} MiB a copy")


def disk(folder: Path) -> Ceiling:
    """One file read from its start to its end, after the kernel was asked to drop it from the page cache.

    How much really came from the disk is the kernel's own count (/proc/self/io, read_bytes), and is said.
    """
    name, clock = "disk_read_bytes_per_s", HostClock()
    try:
        room = os.statvfs(folder)
        length = min(FILE_BYTES, room.f_bavail * room.f_frsize // 20) // BLOCK_BYTES * BLOCK_BYTES
        if length < BLOCK_BYTES:
            return Ceiling(name, "cpu", note=f"not run: too little room in {folder}")
        each, fetched = [], []
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".flatout-disk-") as file:
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
    return rate(name, "cpu", length, each, f"{length // 2**20} MiB in {folder}, page cache dropped before each reading; "
                                           f"{100 * sum(fetched) / len(fetched) / length:.0f} % came from the disk itself")


def _read_from_disk() -> int:
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


def loader(torch: Any) -> Ceiling:
    """From iter() of a DataLoader with one worker to its first batch: what each epoch pays without persistent workers."""
    clock, each = HostClock(), []
    data = torch.utils.data.TensorDataset(torch.zeros(64, 4))
    for _ in range(LOADER_STARTS):
        start = clock.mark()
        batches = iter(torch.utils.data.DataLoader(data, batch_size=32, num_workers=1))
        next(batches)
        each.append(clock.elapsed_ms(start, clock.mark()) / 1000)
        del batches
    return Ceiling("loader_start_s", "cpu", median(each), quantile(each, 0.25), quantile(each, 0.75), len(each), "one worker, fork")


def main(out: str, folder: str) -> None:
    import torch

    with open(out, "a", encoding="utf-8") as file:
        def write(**record: Any) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        write(threads=torch.get_num_threads(), busy_cores=busy_cores())
        device: Iterable[Ceiling] = on_device(torch, "cuda") if torch.cuda.is_available() else ()
        for found in chain(device, on_host(torch, Path(folder))):
            write(ceiling=found.to_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
