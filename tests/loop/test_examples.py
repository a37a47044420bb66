"""Each template in plain PyTorch and with the Loop prints the same numbers, to the last digit."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="not run: torchvision is not installed"),
    pytest.mark.skipif(find_spec("sklearn") is None, reason="not run: scikit-learn is not installed"),
]
ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
TEMPLATES = {
    "linear": ("--steps", "501"),
    "cnn": ("--epochs", "2", "--images", "640"),
    "resnet18": ("--epochs", "1", "--images", "160", "--batch-size", "32"),
    "gpt": ("--steps", "31"),
}


ACCUMULATED = ("--steps", "21", "--accumulate", "3", "--batch-size", "4")
# One process runs all of them, since importing torch takes longer than any; each is run as the main program.
DRIVER = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
said = []
for name, *arguments in json.loads(sys.argv[2]):
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(name, run_name="__main__")
    said.append(out.getvalue())
print(json.dumps(said))
"""


def said(folder, *runs):
    """The output of each (example, *arguments)."""
    words = [(str(EXAMPLES / f"{name}.py"), *arguments) for name, *arguments in runs]
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    return json.loads(run_python(driver, EXAMPLES, json.dumps(words), limit_s=280))


def test_the_loop_prints_what_the_plain_template_prints(tmp_path):
    runs = [(f"{name}{kind}", *arguments) for name, arguments in TEMPLATES.items() for kind in ("", "_loop")]
    printed = said(tmp_path, *runs)
    for at, name in enumerate(TEMPLATES):
        plain, loop = printed[2 * at : 2 * at + 2]
        assert plain.count("loss") >= 1, name
        assert loop == plain, name


@pytest.mark.full
def test_accumulation_by_hand_and_by_name_and_tensors_on_a_device(tmp_path):
    """The hand-written loop prints the last loss of the mean; the Loop prints the whole one."""
    printed = said(tmp_path, ("gpt", *ACCUMULATED), ("gpt_loop", *ACCUMULATED), ("tensors",))
    by_hand, by_name, tensors = ([float(x) for x in re.findall(r"loss ([\d.]+)", text)] for text in printed)
    assert len(by_hand) == len(by_name) == 3
    assert by_name[-1] < by_name[0] - 0.5
    assert tensors[-1] < tensors[0] / 10
