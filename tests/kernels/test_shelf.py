"""The rules for every built-in kernel: its page, its folder, and its gate, on a machine without a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import flatout.kernels
from flatout.kernels import NAMES, load
from flatout.kernels.kernel import has_triton
from flatout.kernels.subject import find

torch = pytest.importorskip("torch")
WRONG = Path(__file__).parent / "wrong"
HOME = Path(flatout.kernels.__file__).parent
# The gate of one kernel in `make test`, of each in `make full`.
GATED = [name if name == "augment" else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
FOLDERS = {path.parent.name for path in HOME.glob("*/__init__.py")} - {"template"}


@pytest.mark.processes
@pytest.mark.parametrize("name", GATED)
@pytest.mark.timeout(300)
def test_the_gate_is_green(gates, name):
    """Everything is checked except what needs a GPU; nothing fails."""
    outcomes = gates[name]
    assert not {check: why for check, (status, why) in outcomes.items() if status == "failed"}
    if not torch.cuda.is_available():
        not_run = {check for check, (status, _) in outcomes.items() if status == "not run"}
        assert {"triton on a GPU", "cuda on a GPU"} <= not_run
        if (
            has_triton() and torch.version.cuda and not any("NumPy" in why for _, why in outcomes.values())
        ):  # a CPU build of torch has neither Triton nor NVRTC
            assert not_run == {"triton on a GPU", "cuda on a GPU"}
    assert {f"kernel.cu compiles for {target}" for target in ("sm_80", "sm_90a")} <= set(outcomes)


@pytest.mark.processes
@pytest.mark.parametrize("name", GATED)
def test_known_wrong_variants_are_rejected_by_their_numbers(gates, name):
    for variant in find(str(WRONG / f"{name}.py")).wrong:
        status, why = gates[name][f"rejects {variant}"]
        assert status == "ok", variant
        assert "times the allowed error" in why or "bit for bit" in why, variant


@pytest.mark.parametrize("name", NAMES)
def test_the_page_and_the_folder(name):
    kernel = load(name)
    assert kernel.name == name
    assert len(find(str(WRONG / f"{name}.py")).wrong) >= 4
    assert kernel.page == import_module(f"flatout.kernels.{name}").__doc__
    for section in ("Formula: ", "What bounds it: ", "Limits: ", "Sources: "):
        assert section in kernel.page, section
    assert [each.name for each in kernel.implementations] == ["plain", "triton", "cuda"]
    assert {"any", "gpu"} <= {case.bench for case in kernel.cases() if case.bench}


def test_the_table_names_every_folder():
    assert set(NAMES) == FOLDERS
    with pytest.raises(LookupError, match="there is no kernel 'nope'; there are layer_norm"):
        load("nope")


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(FOLDERS - {"rms_norm"}))
def test_the_emulator_takes_its_source(emulated, name):
    assert emulated[1][name] == ""
