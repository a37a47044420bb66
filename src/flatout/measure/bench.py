"""Measure the ceilings of this machine: ``python -P -m flatout.measure.bench OUT``.

Writes one JSON object per line, as soon as each figure is known. A rate is the best of several repetitions,
each long enough for the clock: a ceiling is the best achievable value (as in STREAM). The quartiles show the
disturbance by other programs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

from flatout.measure.clock import Clock, clock_for
from flatout.measure.load import busy_cores
from flatout.measure.statistics import quantile
from flatout.schema.errors import first_line
from flatout.schema.machine_snapshot import MATMUL_DTYPES, Ceiling

REPETITIONS = 7
MIN_REPETITION_MS = 60.0  # per repetition; CUDA events resolve half a microsecond
MIN_PRODUCT_MS = 15.0  # per multiplication: above this, size does not limit the rate
MAX_MATRIX_ROWS = {"cpu": 4096, "cuda": 16384}  # rows of a matrix
ARRAY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}  # several times the last-level cache of current processors


def measure_device(torch: ModuleType, device: str) -> Iterator[Ceiling]:
    """Yield the figures of "cpu" or "cuda"."""
    for dtype in MATMUL_DTYPES:
        yield matmul(torch, device, dtype)
    yield memory_bandwidth(torch, device)


def time_repetitions(clock: Clock, work: Callable[[], object]) -> tuple[list[float], int]:
    """Time ``work`` in repetitions, after a warm-up.

    Returns the milliseconds of one ``work`` in each repetition, and the number of calls per repetition.
    """
    calls = max(1, round(MIN_REPETITION_MS / _shortest_ms(clock, work)))
    ms_per_call = []
    for _ in range(REPETITIONS):
        clock.synchronize()
        start = clock.mark()
        for _ in range(calls):
            work()
        end = clock.mark()
        ms_per_call.append(clock.elapsed_ms(start, end) / calls)
    return ms_per_call, calls


def _shortest_ms(clock: Clock, work: Callable[[], object]) -> float:
    """The milliseconds of one ``work``: the shortest of three, because the machine may be busy."""
    work()
    times_ms = []
    for _ in range(3):
        clock.synchronize()
        start = clock.mark()
        work()
        times_ms.append(clock.elapsed_ms(start, clock.mark()))
    return max(min(times_ms), 1e-3)


def rate(name: str, device: str, amount: float, ms_per_call: list[float], note: str) -> Ceiling:
    """Return ``amount`` per repetition as a rate per second: the best, and the quartiles."""
    rates = [amount / ms * 1000 for ms in ms_per_call]
    return Ceiling(name, device, max(rates), quantile(rates, 0.25), quantile(rates, 0.75), len(rates), note)


def matmul(torch: ModuleType, device: str, dtype: str) -> Ceiling:
    """Multiply square matrices of the smallest size that takes MIN_PRODUCT_MS.

    A product counts as 2 n^3 operations.
    """
    name = f"matmul_{dtype}_flops"
    if dtype == "tf32" and device != "cuda":
        return Ceiling(name, device, note="not run: Tensor Cores are needed")
    previous_precision = torch.get_float32_matmul_precision()
    clock, torch_dtype, rows = (
        clock_for(torch, device),
        getattr(torch, "float32" if dtype == "tf32" else dtype),
        256,
    )
    try:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        while True:
            a, b = (torch.randn(rows, rows, device=device).to(torch_dtype) for _ in range(2))
            out = torch.empty_like(a)
            product = partial(torch.mm, a, b, out=out)
            if _shortest_ms(clock, product) > MIN_PRODUCT_MS or rows >= MAX_MATRIX_ROWS[device]:
                break
            rows *= 2
        ms_per_product, products = time_repetitions(clock, product)
    except RuntimeError as error:  # no kernel for this type, or no memory for this size
        return Ceiling(name, device, note=f"not run: {first_line(error)}")
    finally:
        torch.set_float32_matmul_precision(previous_precision)
    return rate(
        name,
        device,
        2.0 * rows**3,
        ms_per_product,
        f"{rows} x {rows}, {products} product{'s' * (products > 1)} per repetition",
    )


def memory_bandwidth(torch: ModuleType, device: str) -> Ceiling:
    """Run copy and triad on arrays larger than any cache; the better of them counts.

    As in STREAM, reads caused by overwriting do not count.
    """
    name, clock, size = "memory_bytes_per_s", clock_for(torch, device), ARRAY_BYTES[device]
    try:
        a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    except RuntimeError as error:
        return Ceiling(name, device, note=f"not run: {first_line(error)}")
    note = f"arrays of {size // 2**20} MiB"
    copy = rate(name, device, 2.0 * size, time_repetitions(clock, lambda: a.copy_(b))[0], f"copy, {note}")
    triad_ms = time_repetitions(clock, lambda: torch.add(b, c, alpha=3.0, out=a))[0]
    triad = rate(name, device, 3.0 * size, triad_ms, f"triad, {note}")
    return max(copy, triad, key=lambda ceiling: ceiling.value or 0.0)


def main(out: str) -> None:
    import torch

    with open(out, "a", encoding="utf-8") as file:

        def write(**record: object) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        write(threads=torch.get_num_threads(), busy_cores=busy_cores())
        for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
            for ceiling in measure_device(torch, device):
                write(ceiling=ceiling.to_json())


if __name__ == "__main__":
    main(sys.argv[1])
