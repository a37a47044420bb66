"""docs/howto/writing_a_kernel.md: its commands run, and its excerpts match the named files."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

pytest.importorskip("torch")
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "writing_a_kernel.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_writing_a_kernel(flatout):
    """In the order of the page: commands are run, whole files are written, excerpts must be in the file that
    is named.
    """
    outcomes, excerpts = [], 0
    for language, text in BLOCKS:
        if language == "console":
            for line in text.splitlines():
                words = line.removeprefix("$ flatout ").split()
                done = flatout(*words, timeout=150)
                assert done.code == 0, done.out + done.err
                outcomes.append(done.out)
            continue
        head, _, body = text.partition("\n")
        path = flatout.folder / head.split()[1]
        if path.parent == flatout.folder:
            path.write_text(text, encoding="utf-8")
        else:
            assert body in path.read_text(encoding="utf-8"), head
            excerpts += 1
    assert excerpts == 7
    new, folder, function = outcomes
    assert "flatout kernel check silu_mul" in new
    assert " 0 failed" in folder
    assert "rejects half_the_gradient" in folder
    assert " 0 failed" in function
    assert "ok       rejects one side only" in function
    assert (flatout.folder / "silu_mul" / "test_silu_mul.py").is_file()
