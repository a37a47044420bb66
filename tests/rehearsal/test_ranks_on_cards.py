"""Two ranks of torchrun on two stand-ins for cards: levers on their own DistributedDataParallel are switched
in both after the same step.
"""

import json
from pathlib import Path

import pytest
from cards import needed, on_cards

pytestmark = [needed(), pytest.mark.timeout(200), pytest.mark.processes]
SWITCHING = Path(__file__).parents[1] / "distributed" / "ddp_switching.py"


def test_ranks_on_cards_switch_together(tmp_path):
    done = on_cards(tmp_path, "python", str(SWITCHING), str(tmp_path), "cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["device"], found["status"], found["skipped"]) == ("cuda", "finished", [])
    together = min(map(len, found["info"]))
    assert together > 36
    assert found["info"][0][:together] == found["info"][1][:together]
