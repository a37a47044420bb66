"""A program that is killed and typed again ends as if nothing had happened, or refuses in words: for things that going through it again might not see. These
are a few of each kind; ``bench/traps.py`` runs all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from interrupted import TWICE, Programs, live
from mutants import CHECKS
from traps import TRAPS

GOES_ON = ("own_generators", "values_steer", "clock_steers", "best_file_moved_into_place", "persistent_workers", "data_set_counts", "tensor_of_losses",
           "hard_samples_by_a_mask")
REFUSED = {  # program -> words that it is refused with, of one check each
    "other_place_before_the_save": "goes another way than it did the first time",
    "reads_less_before_the_save": "has not asked for 1 values",
    "process_number_kept": "with other values: `number` is",
    "mask_made_meanwhile": "with other tensors: `mask`",
    "large_table_through_data": "had other values before the training began",
    "teacher_in_a_generator_in_a_zip": "where no variable leads to them",
    "generator_of_another_kind": "another kind of random generator",
    "loader_in_a_cycle": "of a tensor that was not kept",
    "hidden_state_with_its_graph": "a backward pass goes through `state`",
    "numbers_change_meanwhile": "has changed since the program read it",
    "helper_changes_meanwhile": "helper.py has changed",
    "server_answers_otherwise": "over the network",
    "rows_in_a_database": "it keeps a database",
}


@pytest.fixture(scope="session")
def programs():
    found = Programs()
    yield found
    found.close()


@pytest.mark.parametrize("name", GOES_ON)
def test_it_goes_on_exactly(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name])
    assert (found.verdict, found.after) == ("right", 10), found.why


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_words(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name])
    assert found.verdict == "refused", found.why
    assert REFUSED[name] in found.why
    assert found.why.rstrip().endswith(".")


def test_what_resumes_by_itself_is_left_alone(programs, tmp_path):
    found = live(programs, tmp_path, TRAPS["goes_on_by_itself"])
    assert found.verdict == "unkilled", found.why  # no save is due that a kill could follow


def test_once_more_with_its_data_read(programs, tmp_path):
    """Its data set draws from the generator that its loop draws from. In a process of its own: the others are forked from one that knows torch already."""
    found = live(programs, tmp_path, TRAPS["random_in_turns_not_kept"].in_a_process_of_its_own)
    assert (found.verdict, found.after) == ("right", 10), found.why


@pytest.mark.parametrize("name", ["replay_buffers", "log_written_line_by_line"])
def test_it_is_killed_twice(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name], TWICE)
    assert (found.verdict, found.after) == ("right", 16), found.why


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_can_be_switched_off(name):
    """``bench/again_checks.py`` shows what goes wrong then."""
    check = CHECKS[name]
    assert Path(importlib.util.find_spec(check.module).origin).read_text().count(check.words[0]) == 1
