"""Batches of a loader without workers reach a stand-in for a card without a wait, and equal the
plain ones.
"""

import pytest
from cards import PROGRAMS, needed, on_cards

pytestmark = [needed(), pytest.mark.processes]
READS = (str(PROGRAMS / "reads.py"), "--epochs", "6", "--device", "cuda:1")
BATCHES = 6 * 5


def run(folder, *before):
    """Its lines, and how often it waited for a card."""
    done = (
        on_cards(folder, *before, "python", *READS, waits=folder / "waits")
        if before
        else on_cards(folder, "python", *READS, waits=folder / "waits")
    )
    assert done.returncode == 0, done.stderr[-3000:]
    waits = [line.split("\t") for line in (folder / "waits").read_text().splitlines()]
    (folder / "waits").unlink()
    return (
        done.stdout.splitlines(),
        sum(int(count) for count, call, _ in waits if call == "cudaStreamSynchronize"),
        done.stderr,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "lever", ["loader={workers=0,pin=true}", "device_prefetch=0", "resident_data={mib=64,host=true}"]
)
def test_no_copy_of_a_batch_waits(lever, plain, tmp_path):
    lines, waits, said = run(tmp_path, "flatout", "run", "--with", lever)
    assert lines == plain[0]
    assert "applied " + lever.split("=")[0] in said
    assert plain[1] - waits >= 2 * BATCHES - 4, "images and labels of each batch but the first"
