"""A program that is killed and started again ends as if uninterrupted, or is rejected with an error, even for
state that exact resume could miss. These are a few of each kind; ``bench/traps.py`` runs all.
"""

import importlib.util
import runpy
from pathlib import Path

import pytest
from interrupted import COMMAND, TWICE, Programs, live, write
from traps import TRAPS

CHECKS = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "again_mutants.py"))["CHECKS"]

GOES_ON = (
    "own_generators",
    "values_steer",
    "clock_steers",
    "best_file_moved_into_place",
    "last_three_files",
    "persistent_workers",
    "iterable_data_set_with_workers",
    "tensor_of_losses",
    "hard_samples_by_a_mask",
    "batches_fetched_ahead",
    "batches_fetched_ahead_of_workers",
    "loaded_again_in_an_enumerate",
    "gradients_detached_in_place",
)
REFUSED = {  # program -> part of its error
    "other_place_before_the_save": "takes another path than in the first run",
    "reads_less_before_the_save": "has not read 1 of the values",
    "process_number_kept": "variables differ from the first run: `number` is",
    "data_set_counts": "variables differ from the first run: `mine.calls` is",
    "random_in_turns_in_a_cycle": "both the script and its skipped data loading draw from python",
    "rows_of_an_order_that_only_a_loop_has": "no variable leads to",
    "sequences_packed": "packed sequences (pack_padded_sequence) cannot be replayed",
    "mask_made_meanwhile": "tensors are missing or new: `mask`",
    "large_table_through_data": "`table` had other values than in the first run",
    "teacher_in_a_generator_in_a_zip": "no variable leads to",
    "generator_of_another_kind": "another type of random generator",
    "loaded_again_in_a_cycle": "needs a tensor that the checkpoint does not hold",
    "loader_in_a_cycle": "needs a tensor that the checkpoint does not hold",
    "hidden_state_with_its_graph": "a backward pass goes through `state`",
    "numbers_change_meanwhile": "has changed since the script read it",
    "best_is_loaded_back_from_its_file": "loads best.pt, which it saved before the checkpoint",
    "best_read_after_the_checkpoint": "reads best.txt, which it wrote after the checkpoint",
    "helper_changes_meanwhile": "helper.py has changed",
    "server_answers_otherwise": "over the network",
    "rows_in_a_database": "it uses an SQLite database",
}


@pytest.fixture
def programs():
    return Programs()


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


@pytest.mark.processes
def test_a_rank_is_not_recorded(programs, tmp_path):
    work = tmp_path / "work"
    write(work, TRAPS["accumulator_made_before"])
    done = programs(work, ["flatout", *COMMAND], {"WORLD_SIZE": "2", "RANK": "0"}, False)
    assert done.code == 0, done.err
    assert "cannot be resumed exactly: it runs as several ranks" in done.err
    assert "`flatout rescue --to DIR` exports them" in done.err
    assert list(work.glob(".flatout/*/rescue/step-*"))
    assert not list(work.glob(".flatout/*/rescue/journal-*"))


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
