"""The zoo of small faulty programs: both texts of each are programs, and `flatout check` judges them
correctly. bench/zoo.py runs them.
"""

import sys
from pathlib import Path

import pytest

from flatout.diagnose.check import check
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from specimens import ZOO, read_specimen

SPECIMENS = {path.stem: read_specimen(path) for path in sorted(ZOO.glob("*.py"))}
CODES = {rule.code: rule for rule in TABLE}


@pytest.mark.parametrize("name", SPECIMENS)
def test_both_texts_are_programs_that_differ_by_the_fault(name):
    specimen = SPECIMENS[name]
    for text in (specimen.ill, specimen.well):
        compile(text, name, "exec")
        assert not any(word in text for word in ("# ill", "# well", "# both", "fault:"))
    assert specimen.ill != specimen.well
    assert specimen.lines <= set(range(1, len(specimen.ill.splitlines()) + 1))
    assert specimen.lines
    assert set(specimen.codes) <= set(CODES)


@pytest.mark.parametrize("name", SPECIMENS)
def test_the_source_of_the_fixed_version_has_no_finding(name):
    specimen = SPECIMENS[name]
    assert [finding.rule for finding in check(ScriptProgram.of_text(specimen.well))] == []
    found = check(ScriptProgram.of_text(specimen.ill))
    assert {finding.rule for finding in found} <= set(specimen.codes)


OBSERVED = [
    name for name, specimen in SPECIMENS.items() if any(CODES[code].invariant for code in specimen.codes)
]


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", OBSERVED)
def test_the_running_program_shows_its_fault_and_the_fixed_one_none(observe, name):
    pytest.importorskip("torch")
    specimen = SPECIMENS[name]
    ill, well = observe(specimen.ill, steps=100), observe(specimen.well, steps=100)
    assert (ill["failed"], well["failed"]) == ({}, {})
    assert {finding["rule"] for finding in ill["findings"]} <= set(specimen.codes)
    assert ill["findings"][0]["place"]["line"] in specimen.lines
    assert well["findings"] == []
