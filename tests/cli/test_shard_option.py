"""`flatout run --procs N --shard`: when sharding is chosen, and what is reported."""

import pytest

from flatout.schema.facts import Facts, Gpu
from flatout.schema.records import TrialRecord
from flatout.tune.sharding import decide, ran_out_of_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("requested", "weights_gib", "device", "divides", "says"),
    [
        ("auto", 1, "cuda", False, ""),  # 4 of 80: nothing to report
        ("auto", 8, "cuda", False, "--shard always shards them"),
        ("auto", 11, "cuda", True, "44.0 GiB"),
        ("never", 11, "cuda", False, "each rank keeps a full copy"),
        ("always", 0.001, "cuda", True, "as requested"),
        ("auto", 3, "cpu", True, "16.0 GiB"),  # 12 of 32 / 2
        ("auto", 1.5, "cpu", False, "6.00 GiB"),
    ],
)
def test_when_weights_are_sharded(requested, weights_gib, device, divides, says):
    """The choice compares the need of one process, four times its weights with Adam, with the memory of the
    GPU, or of the machine divided by the ranks.
    """
    held = {
        "weights": int(weights_gib * GIB),
        "gradients": int(weights_gib * GIB),
        "optimizer state": int(2 * weights_gib * GIB),
    }
    facts = Facts(memory_bytes=32 * GIB, gpus=(Gpu("A100", 80 * GIB, (8, 0)), Gpu("H200", 140 * GIB, (9, 0))))
    found = decide(requested, held, device, facts, 2)
    assert found.shards is divides
    assert says in found.sentence
    assert bool(found.sentence) is bool(says)


def test_running_out_of_memory_is_distinguished_from_other_failures():
    assert ran_out_of_memory(
        TrialRecord(
            "failed",
            reason="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            exit_code=1,
        )
    )
    assert ran_out_of_memory(
        TrialRecord(
            "failed",
            log_tail="RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
            exit_code=1,
        )
    )
    assert ran_out_of_memory(TrialRecord("failed", exit_code=-9))
    assert not ran_out_of_memory(TrialRecord("failed", reason="ValueError: shapes do not match", exit_code=1))
