"""Failures, really provoked: explained from the dying process and from the text of its
traceback, with their fixes tried.
"""

import json
import sys
from pathlib import Path

import pytest
from processes import run_python

from flatout.diagnose.explain import explain, explain_text
from flatout.diagnose.failures import TABLE
from flatout.schema.failure import FailureRecord

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from provoked import PROGRAMS  # noqa: E402

NAMES = [name for name, one in PROGRAMS.items() if not one.slow and (torch.version.cuda or not one.of_cuda)]
ENDED_BY_A_SIGNAL = ("FE042", "FE045")  # such a process leaves no text


@pytest.fixture(scope="module")
def provoked(tmp_path_factory):
    """The results of all programs, from one process that runs them."""
    out = tmp_path_factory.mktemp("provoked") / "seen.json"
    run_python(HERE / "provoked.py", out, limit_s=200)
    return {one["name"]: one for one in json.loads(out.read_text())}


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_explained_in_the_dying_process(provoked, name):
    seen, program = provoked[name], PROGRAMS[name]
    record = (
        FailureRecord(signal=seen["signal"]) if "signal" in seen else FailureRecord.from_json(seen["live"])
    )
    finding = explain(record)
    assert finding is not None, seen["text"]
    assert finding.rule == program.code, seen["text"]
    for word in program.says:
        assert word in finding.message, seen["text"]
    assert finding.fix
    if "signal" not in seen and record.user_frame is not None:
        assert finding.place is not None
        assert Path(finding.place.file).name in ("provoked.py", "train.py")
        assert finding.place.line > 0


@pytest.mark.parametrize("name", [name for name in NAMES if PROGRAMS[name].code not in ENDED_BY_A_SIGNAL])
def test_explained_from_the_text(provoked, name):
    """A text lacks the tensors and the layer, but has the kind and the line."""
    seen, program = provoked[name], PROGRAMS[name]
    info = explain_text("epoch 3, loss 0.71\n" + seen["text"])
    assert [one.finding.rule for one in info] == [program.code], seen["text"]
    live = explain(FailureRecord.from_json(seen["live"]))
    assert live is not None
    if program.code != "FE065":  # only the graph knows the line of the operation
        assert info[0].finding.place == live.place


@pytest.mark.parametrize("name", [name for name in NAMES if not PROGRAMS[name].tried])
def test_the_fixed_program_runs(provoked, name):
    assert provoked[name]["fixed"] == ""


def test_enough_kinds_are_provoked():
    assert len(PROGRAMS) >= 40
    assert len({program.code for program in PROGRAMS.values()}) >= 40
    assert len(TABLE) >= 60


def test_details_that_only_a_living_process_knows(provoked):
    """The layer's own name, the bad label and its place, the operation that was changed."""

    def said(name):
        finding = explain(FailureRecord.from_json(provoked[name]["live"]))
        assert finding is not None
        return finding

    assert said("linear_of_another_size").message == "`fc1` (Linear) expects 128 features and got 392"
    nan = said("nan_under_anomaly_detection")
    assert nan.message.startswith("the gradient of `Sqrt` is the first that is NaN (")
    assert nan.place is not None
    assert "torch.sqrt(weight" in nan.place.text
    label = said("label_out_of_range")
    assert "`target` holds the label 3 at [2]" in label.message
    assert "3 outputs" in label.message
    token = said("token_outside_the_vocabulary")
    assert "`tokens` holds 7 at [1, 0]" in token.message
    assert "5 rows" in token.message
    assert "target: 3 int64 on cpu" in label.evidence


def test_no_value_of_the_data_is_kept(provoked):
    """For float tensors only the shape is kept; for integer tensors also the minimum and maximum."""
    for seen in provoked.values():
        if "live" in seen:
            for tensor in FailureRecord.from_json(seen["live"]).tensors:
                assert (tensor.low is None) == (tensor.high is None)
                assert tensor.low is None or tensor.dtype in ("int64", "int32", "int16", "int8", "uint8")
