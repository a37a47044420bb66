"""A model on the second card while the first is the current device: everything that acts on its device, or
reads its memory, uses the second.
"""

import json
import re
from pathlib import Path

import pytest
from cards import needed, on_cards

pytestmark = [needed(), pytest.mark.processes]
PROGRAM = Path(__file__).parent / "second_card.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = on_cards(tmp_path_factory.mktemp("second card"), "python", str(PROGRAM), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", re.findall(r"^@check\ndef (\w+)", PROGRAM.read_text(), re.MULTILINE))
def test_the_second_card(check, found):
    assert found[check] == ""
