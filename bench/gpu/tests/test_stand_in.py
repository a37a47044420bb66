"""The stand-in for a card keeps CUDA's rules: mistakes that a card punishes are punished, and those that it
shows only sometimes always show.
"""

import json
from pathlib import Path

import pytest
from cards import needed, on_cards

pytestmark = [needed(), pytest.mark.processes]
HERE = Path(__file__).parent

SAID = {
    "tensors_of_two_cards": "found at least two devices, cuda:0 and cuda:1",
    "a_tensor_left_on_the_host": "found at least two devices, cuda:0 and cpu",
    "a_time_before_its_event_was_waited_for": "Both events must be completed before calculating elapsed time",
    "a_time_between_two_cards": "",
    "an_event_on_another_cards_stream": "Event device",
    "a_result_read_before_it_arrived": "NaN until it arrived",
    "a_buffer_used_again_too_early": "illegal memory access",
    "more_memory_than_there_is": "OutOfMemoryError: CUDA out of memory",
    "a_read_while_a_graph_is_recorded": "AcceleratorError",
    "a_recorded_stream_that_does_not_come_back": "unjoined work",
    "recorded_work_that_waits_for_other_work": "uncaptured work",
    "an_output_kept_over_a_replay": "has been overwritten",
    "work_done_while_it_is_only_recorded": "nothing was computed before the replay",
    "a_kernel_that_nothing_stands_in_for": "operation not supported",
    "random_numbers_of_another_seed": "the generator moved on",
}


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    done = on_cards(folder, "python", str(HERE / "mistakes.py"), waits=folder / "waits")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), (folder / "waits").read_text(), done.stderr


@pytest.mark.parametrize("mistake", SAID)
def test_each_mistake_is_caught(mistake, came):
    assert came[0][mistake], "nothing happened"
    assert SAID[mistake] in came[0][mistake]


def test_no_mistake_is_left_out(came):
    assert set(came[0]) == set(SAID)


def test_each_wait_is_counted_with_its_line(came):
    lines = (HERE / "mistakes.py").read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if "a read in every step" in text)
    assert f"3\tcudaStreamSynchronize\t{HERE / 'mistakes.py'}:{line}" in came[1]


def test_an_unknown_kernel_is_named(came):
    assert "no operator stands in for the kernel" in came[2]
    assert "spin_kernel" in came[2]
