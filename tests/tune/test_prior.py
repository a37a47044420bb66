"""The prior of effect sizes: its values for known and unknown levers, and its table, which must match the
records.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import hang_s

from flatout.levers import TABLE
from flatout.schema.facts import Facts, Gpu
from flatout.tune.prior import (
    ANY,
    ANY_VALUE,
    CPU,
    CPU_BF16,
    NEUTRAL,
    OTHER_PROCESSOR_SD_FACTOR,
    TABLE_FILE,
    Prior,
    clearest,
    committed_entries,
    kinds_of,
    priors,
    value_key,
)

ROOT = Path(__file__).resolve().parents[2]
CPU_FACTS = Facts(cores=2, cpu_flags=("avx2",))
BF16_FACTS = Facts(cores=2, cpu_flags=("avx2", "avx512_bf16"))
GPU_FACTS = Facts(cores=2, gpus=(Gpu("H200", 2**37, (9, 0)),))
CONVOLUTIONAL = {"layers": {"Conv2d": 4, "Linear": 2}, "device": "cpu"}
RECURRENT = {"layers": {"Embedding": 1, "LSTM": 1, "Linear": 1}, "device": "cpu"}
VALUES = (True, False, 0, 1, 2, 64, 0.5, "all", "never seen", {"workers": 1}, {"mib": 10, "ahead": True}, {})
entries = st.builds(Prior, st.floats(-2, 2), st.floats(0.01, 2), st.integers(0, 50))


def phases(step_ms, data_share=0.0):
    return {
        "data": {"median_ms": step_ms * data_share, "share": data_share},
        "forward": {"median_ms": step_ms * (1 - data_share), "share": 1 - data_share},
    }


@pytest.mark.parametrize("facts", [CPU_FACTS, BF16_FACTS, GPU_FACTS])
def test_a_lever_that_the_table_does_not_have_gets_the_wide_neutral_prior(facts):
    assert priors(facts, CONVOLUTIONAL, phases(50))("no such lever", True) == NEUTRAL
    assert NEUTRAL.mean == 0
    assert NEUTRAL.n == 0
    assert NEUTRAL.sd >= math.log(1.25)


@pytest.mark.parametrize("facts", [CPU_FACTS, BF16_FACTS, GPU_FACTS])
@pytest.mark.parametrize("context", [CONVOLUTIONAL, RECURRENT, {}])
def test_every_lever_and_value_has_a_usable_prior(facts, context):
    prior = priors(facts, context, phases(3, 0.5))
    for lever in TABLE:
        for value in VALUES:
            found = prior(lever.name, value)
            assert math.isfinite(found.mean)
            assert 0 < found.sd < 1.5
            assert (found.n > 0) or found == NEUTRAL


def test_the_table_names_existing_levers_and_has_an_entry_for_all_programs_and_each_kind():
    assert {lever for lever, _, _ in committed_entries()} <= {lever.name for lever in TABLE}
    for (lever, _, device), by_kind in committed_entries().items():
        assert ANY in by_kind
        assert (lever, ANY_VALUE, device) in committed_entries()
        assert all(entry.n > 0 and entry.sd > 0 for entry in by_kind.values())


def test_known_cases_match_the_records():
    compute_bound, data_bound = (priors(CPU_FACTS, CONVOLUTIONAL, phases(50, share)) for share in (0.0, 0.6))
    assert compute_bound("malloc", "tcmalloc").mean < 0  # faster on nearly every program
    assert compute_bound("threads", 1).mean > 0.1  # a second core matters
    assert data_bound("batched_transforms", "all").mean < compute_bound("batched_transforms", "all").mean
    assert priors(GPU_FACTS, {**CONVOLUTIONAL, "device": "cuda"}, phases(50))("tf32", True).mean < -0.2


@pytest.mark.processes
def test_regenerating_the_table_gives_the_committed_file(tmp_path):
    out = tmp_path / "prior.json"
    subprocess.run(
        [sys.executable, str(ROOT / "bench" / "prior.py"), "--out", str(out)],
        check=True,
        capture_output=True,
        timeout=hang_s(120),
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert out.read_text() == TABLE_FILE.read_text(), "the records have changed: run `python bench/prior.py`"


@pytest.mark.parametrize(("here", "there"), [(CPU, CPU_BF16), (CPU_BF16, CPU)])
def test_records_of_the_other_kind_of_cpu_count_with_a_wider_spread_where_they_say_more(here, there):
    facts, measured = (BF16_FACTS if here == CPU_BF16 else CPU_FACTS), Prior(-0.2, 0.1, 8)
    elsewhere = {("lever", "x", there): {ANY: measured}}
    assert priors(facts, {}, {}, elsewhere)("lever", "x") == Prior(-0.2, 0.1 * OTHER_PROCESSOR_SD_FACTOR, 8)
    for own, counts in ((Prior(0.3, 0.14, 1), True), (Prior(0.3, 0.16, 1), False)):
        assert (
            priors(facts, {}, {}, {**elsewhere, ("lever", "x", here): {ANY: own}})("lever", "x") == own
        ) is counts


def test_records_of_a_cpu_do_not_apply_to_a_gpu():
    assert priors(CPU_FACTS, {"device": "cpu"}, {})("malloc", "tcmalloc").n > 0
    assert priors(GPU_FACTS, {"device": "cuda"}, {})("malloc", "tcmalloc") == NEUTRAL


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["Conv2d", "Linear"], ("convolutions",)),
        (["ConvTranspose2d"], ("convolutions",)),
        (["LSTM", "Embedding"], ("recurrent",)),
        (["GRUCell"], ("recurrent",)),
        (["Embedding", "LayerNorm", "Linear"], ("transformer",)),
        (["Embedding", "LlamaRMSNorm"], ("transformer",)),
        (["MultiheadAttention"], ("transformer",)),
        (["Conv2d", "Attention"], ("convolutions", "transformer")),
        (["Linear", "LayerNorm"], ("dense",)),
        ([], ()),
        (["Embedding", "LayerNorm", "GRU"], ("recurrent",)),
    ],
)
def test_layers_show_the_kind_of_a_program(layers, expected):
    assert kinds_of({"layers": dict.fromkeys(layers, 1)}, {}) == expected


def test_phases_show_the_kind_of_a_program():
    assert kinds_of({}, phases(4.9, 0.3)) == ("tiny steps", "data-bound")
    assert kinds_of({}, phases(5.1, 0.2)) == ("usual steps", "compute-bound")
    assert kinds_of({}, {}) == ()


@pytest.mark.parametrize(
    ("lever", "value", "expected"),
    [
        ("malloc", "tcmalloc", "tcmalloc"),
        ("channels_last", True, "on"),
        ("threads", 1, "half of the cores or more"),
        ("loader", {"workers": 0}, "workers=0"),
        ("loader", {"workers": 3}, "workers"),
        ("cached_prefix", {"mib": 210, "ahead": True}, "ahead=True, mib"),
        ("batch_size", {}, ""),
        ("threads", True, "on"),
    ],
)
def test_values_are_spelled_without_sizes(lever, value, expected):
    assert value_key(lever, value, cores=2) == expected


@given(
    entries,
    st.dictionaries(st.sampled_from(["a", "b", "c"]), entries),
    st.lists(st.sampled_from(["a", "b", "d"])),
)
def test_the_clearest_entry_belongs_to_the_programs_kind(every, by_kind, kinds):
    found = clearest({**by_kind, ANY: every}, kinds)
    assert found in [every, *(by_kind[kind] for kind in kinds if kind in by_kind)]
    if not set(kinds) & set(by_kind):
        assert found == every


def test_a_kind_that_differs_more_clearly_wins():
    every = Prior(-0.1, 0.1, 20)
    table = {
        ("lever", ANY_VALUE, CPU): {
            ANY: every,
            "tiny steps": Prior(-0.12, 0.1, 2),
            "data-bound": Prior(-0.5, 0.1, 5),
        }
    }
    assert priors(CPU_FACTS, {}, phases(3, 0.5), table)("lever", "x") == Prior(-0.5, 0.1, 5)
    assert priors(CPU_FACTS, {}, phases(3, 0.0), table)("lever", "x") == Prior(-0.12, 0.1, 2)
    assert priors(CPU_FACTS, {}, phases(30, 0.0), table)("lever", "x") == every
