"""The built-in kernel: its page, its folder, and its gate, as `flatout kernel check` runs it without a GPU."""

import json
from pathlib import Path

import pytest

import flatout.kernels
from flatout.kernels import NAMES, load
from flatout.kernels.kernel import has_triton
from flatout.kernels.subject import find

torch = pytest.importorskip("torch")
WRONG = Path(__file__).parent / "wrong"
FOLDERS = {path.parent.name for path in Path(flatout.kernels.__file__).parent.glob("*/__init__.py")}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_the_gate_is_green_and_rejects_known_wrong_variants(flatout, name):
    """Everything is checked except what needs a GPU; nothing fails."""
    done = flatout("kernel", "check", str(WRONG / f"{name}.py"), "--json", timeout=200)
    assert done.code == 0, done.out + done.err
    outcomes = {check["name"]: (check["status"], check["why"]) for check in json.loads(done.out)["checks"]}
    not_run = {check for check, (status, _) in outcomes.items() if status == "not run"}
    if not torch.cuda.is_available():
        assert "triton on a GPU" in not_run
        if has_triton() and not any("NumPy" in why for _, why in outcomes.values()):
            assert not_run == {"triton on a GPU"}
    variants = find(str(WRONG / f"{name}.py")).wrong
    assert len(variants) >= 4
    for variant in variants:
        status, why = outcomes[f"rejects {variant}"]
        assert status == "ok", variant
        assert "times the allowed error" in why, variant


def test_the_table_its_pages_and_its_folders():
    assert set(NAMES) == FOLDERS - {"template"}
    for name in NAMES:
        kernel = load(name)
        for section in ("Formula: ", "What bounds it: ", "Limits: ", "Sources: "):
            assert section in kernel.page, section
        assert [implementation.name for implementation in kernel.implementations] == [
            "plain",
            "triton",
        ]
        assert {"any", "gpu"} <= {case.bench for case in kernel.cases() if case.bench}
    with pytest.raises(LookupError, match="there is no kernel 'nope'; there are layer_norm"):
        load("nope")
