"""A program that is killed and started again ends as if uninterrupted, or is rejected with an error, even for
state that exact resume could miss. These are a few of each kind; ``bench/traps.py`` runs all.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from interrupted import TWICE, Programs, live
from mutants import CHECKS
from traps import TRAPS

GOES_ON = (
    "own_generators",
    "values_steer",
    "clock_steers",
    "best_file_moved_into_place",
    "persistent_workers",
    "data_set_counts",
    "tensor_of_losses",
    "hard_samples_by_a_mask",
    "batches_fetched_ahead",
    "batches_fetched_ahead_of_workers",
    "loaded_again_in_an_enumerate",
    "gradients_detached_in_place",
)
REFUSED = {  # program -> part of its error, from one check each
    "other_place_before_the_save": "takes another path than in the first run",
    "reads_less_before_the_save": "has not read 1 of the values",
    "process_number_kept": "variables differ from the first run: `number` is",
    "mask_made_meanwhile": "tensors are missing or new: `mask`",
    "large_table_through_data": "`table` had other values than in the first run",
    "teacher_in_a_generator_in_a_zip": "no variable leads to",
    "generator_of_another_kind": "another type of random generator",
    "loaded_again_in_a_cycle": "needs a tensor that the checkpoint does not hold",
    "loader_in_a_cycle": "needs a tensor that the checkpoint does not hold",
    "hidden_state_with_its_graph": "a backward pass goes through `state`",
    "numbers_change_meanwhile": "has changed since the script read it",
    "helper_changes_meanwhile": "helper.py has changed",
    "server_answers_otherwise": "over the network",
    "rows_in_a_database": "it uses an SQLite database",
}


@pytest.fixture(scope="session")
def programs():
    found = Programs()
    yield found
    found.close()


@pytest.mark.sampled(4)
@pytest.mark.processes
@pytest.mark.parametrize("name", GOES_ON)
def test_it_resumes_exactly(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name])
    assert (found.verdict, found.after) == ("right", 10), found.why


@pytest.mark.sampled(6)
@pytest.mark.processes
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_rejected_with_an_error(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name])
    assert found.verdict == "refused", found.why
    assert REFUSED[name] in found.why
    assert found.why.rstrip().endswith(".")


@pytest.mark.processes
def test_a_program_that_resumes_by_itself_is_left_alone(programs, tmp_path):
    found = live(programs, tmp_path, TRAPS["goes_on_by_itself"])
    assert found.verdict == "unkilled", found.why  # no checkpoint is due that a kill could follow


@pytest.mark.full
@pytest.mark.processes
def test_again_with_its_data_read(programs, tmp_path):
    """Its data set and its loop share one random generator.

    It runs in its own process: the others are forked from one that has torch already.
    """
    found = live(programs, tmp_path, TRAPS["random_in_turns_not_kept"].in_a_process_of_its_own)
    assert (found.verdict, found.after) == ("right", 10), found.why


@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize("name", ["replay_buffers", "log_written_line_by_line"])
def test_it_is_killed_twice(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name], TWICE)
    assert (found.verdict, found.after) == ("right", 16), found.why


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_can_be_switched_off(name):
    """``bench/again_checks.py`` shows what then goes wrong."""
    check = CHECKS[name]
    assert Path(importlib.util.find_spec(check.module).origin).read_text().count(check.words[0]) == 1
