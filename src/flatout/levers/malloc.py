"""Start the program with a memory allocator that keeps large blocks instead of returning them to the system.

What it does: preloads tcmalloc, jemalloc or mimalloc if the system or flatout's environment has one; or
    tells the C library's allocator (glibc) to keep freed memory instead of mapping each large tensor again.
    The values `tcmalloc`, `mimalloc` and `jemalloc` name the preloaded library. The value `glibc` is glibc's own
    allocator, which most Linux programs use anyway, told to keep freed memory.
Why it is faster: on a CPU every activation and gradient is a new malloc. glibc maps blocks above 128 kB to 32
    MB from the kernel and unmaps them when they are freed. Each step then pays again for page faults and
    zeroed pages.
When it does not help: on a GPU, where tensors are not in host memory; if the maths takes far longer than
    touching the memory.
What it can change: nothing in the results; the process may hold more memory.
Evidence: word_language_model LSTM 1.54x, MNIST 1.31x (2 CPU cores, torch 2.14.1, interleaved process pairs, n
    = 3, against the plain program, 2026-11-21).
Sources: mallopt(3), section "M_MMAP_THRESHOLD"; gperftools, jemalloc and mimalloc documentation; PyTorch
    performance tuning guide.
"""

import re

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Value
from flatout.schema.program import TrainingContext

ALLOCATORS = ("tcmalloc", "mimalloc", "jemalloc", "glibc")
FOUR_GB = str(4 * 2**30 - 1)
# Settings that stop each allocator from returning freed pages, which the next step would fault in again.
KEEP_MEMORY = {
    "tcmalloc": {
        "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**62)
    },  # it keeps pages by default, but would report every large tensor
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "-1"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if facts.system != "Linux":
        return Skip(
            f"this lever replaces allocators on Linux only, and this system is {facts.system or 'unknown'}"
        )
    libraries = [
        path.rpartition("/")[2] for path in re.split("[: ]+", facts.environment.get("LD_PRELOAD", ""))
    ]
    preloaded = next((library for library in libraries if "malloc" in library), None)
    if preloaded is not None:
        return Skip(f"LD_PRELOAD names the allocator {preloaded}; remove it to measure allocators")
    name = next((name for name, value in facts.environment.items() if _configures_malloc(name, value)), None)
    if name is not None:
        return Skip(f"the environment sets {name}, which configures malloc; unset it to measure allocators")
    if context is not None and context.device_type != "cpu":
        return Skip(f"the parameters are on {context.device_type}, whose memory malloc does not manage")
    found = tuple(name for name in ALLOCATORS if name in facts.allocators)
    return (
        Options(found)
        if found
        else Skip("no other allocator was found; install one with `pip install cmeel-mimalloc`")
    )


def _configures_malloc(name: str, value: str) -> bool:
    """Whether this variable configures malloc. GLIBC_TUNABLES configures all of the C library."""
    return (
        "glibc.malloc." in value
        if name == "GLIBC_TUNABLES"
        else bool(value) and name.startswith(("MALLOC_", "MIMALLOC_"))
    )


def environment(facts: Facts, value: Value) -> dict[str, str]:
    if value == "glibc":
        # Never map, never trim: the process keeps freed memory, including its pages, and uses it again.
        return {
            "MALLOC_MMAP_THRESHOLD_": FOUR_GB,
            "MALLOC_TRIM_THRESHOLD_": FOUR_GB,
            "MALLOC_TOP_PAD_": str(64 * 2**20),
        }
    library = facts.allocators.get(str(value))
    if library is None:
        raise LookupError(f"{value} is not installed here")
    before = facts.environment.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{before}" if before else library, **KEEP_MEMORY[str(value)]}


def code(value: Value) -> str:
    if value == "glibc":
        return f"MALLOC_MMAP_THRESHOLD_={FOUR_GB} MALLOC_TRIM_THRESHOLD_={FOUR_GB} python train.py"
    settings = "".join(f"{name}={setting} " for name, setting in KEEP_MEMORY[str(value)].items())
    return f"{settings}LD_PRELOAD=/path/to/lib{value}.so python train.py"


LEVER = Lever(
    "malloc",
    Moment.PROCESS,
    Effect.EXACT,
    applies,
    code,
    environment=environment,
    accepts=ALLOCATORS,
    page=__doc__,
)
