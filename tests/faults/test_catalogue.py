"""Every fault of a training, and the tests that inject it: an index for readers, checked against the existing
tests.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
# fault -> file, functions
FAULTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "a process is killed at a random moment": [
        ("loop/test_loop_resume.py", ("test_killed_at_random_moments_it_ends_with_the_same_bits",)),
        (
            "cli/test_supervise.py",
            ("test_a_run_that_dies_and_hangs_ends_with_the_bits_of_the_undisturbed_run",),
        ),
    ],
    "it is killed while it saves": [
        (
            "checkpoint/test_cuts.py",
            (
                "test_killed_at_any_call_that_changes_the_disk",
                "test_the_very_first_checkpoint_is_complete_or_absent",
            ),
        )
    ],
    "it gets a signal to end: once, twice, one rank of several": [
        (
            "loop/test_loop_resume.py",
            (
                "test_a_signal_ends_it_after_the_step_and_a_checkpoint",
                "test_the_second_signal_ends_it_at_once",
            ),
        ),
        ("cli/test_supervise.py", ("test_signals_reach_the_program_once_and_it_gets_time_to_end",)),
        ("cli/test_rescue.py", ("test_a_signal_waits_for_the_step_and_the_printed_lines_restore_the_state",)),
    ],
    "a checkpoint is cut off, has a flipped bit or a page of zeros, files of another checkpoint, an old manifest": [
        (
            "checkpoint/test_checkpoints.py",
            (
                "test_every_accident_is_detected_and_the_previous_checkpoint_used",
                "test_a_file_that_changes_after_verification_is_not_read",
            ),
        ),
        ("cli/test_rescue.py", ("test_a_damaged_checkpoint_is_named_and_the_previous_one_used",)),
    ],
    "every checkpoint is corrupt": [
        (
            "checkpoint/test_checkpoints.py",
            ("test_without_a_valid_checkpoint_training_does_not_start_from_scratch",),
        ),
        ("loop/test_loop_resume.py", ("test_invalid_checkpoints",)),
    ],
    "the disk is full, or files may not grow": [
        (
            "checkpoint/test_disks.py",
            ("test_a_file_that_may_not_grow", "test_a_full_disk_and_a_disk_that_becomes_read_only"),
        ),
        ("cli/test_bad_days.py", ("test_a_full_disk",)),
    ],
    "folders that are read-only, vanish, come back": [
        ("checkpoint/test_disks.py", ("test_a_folder_that_vanishes_and_one_that_comes_back",)),
        (
            "cli/test_bad_days.py",
            (
                "test_a_folder_that_was_named_and_cannot_be_written",
                "test_a_folder_where_nothing_can_be_written",
            ),
        ),
    ],
    "a loader worker is stopped, or never gives its batch": [
        ("cli/test_supervise.py", ("test_a_stalled_loader_worker_is_named",))
    ],
    "a rank is killed under torchrun": [
        ("cli/test_supervise.py", ("test_a_rank_killed_under_torchrun_resumes_with_the_same_bits",))
    ],
    "a rank stalls": [
        ("cli/test_supervise.py", ("test_the_process_that_blocks_the_waiting_ranks_is_named",))
    ],
    "its parent is killed": [
        ("cli/test_supervise.py", ("test_nothing_outlives_a_supervisor_that_is_killed",)),
        ("launch/test_local_launcher.py", ("test_killing_the_launcher_kills_everything",)),
    ],
    "out of memory, injected at every operator, and on one rank of two": [
        (
            "loop/test_loop_memory.py",
            ("test_every_operator_of_forward_and_backward", "test_every_operator_of_the_optimizer"),
        ),
        ("loop/test_loop_ranks.py", ("test_out_of_memory_on_one_rank_ends_all",)),
    ],
    "out of memory, a real one": [("loop/test_loop_memory.py", ("test_a_real_one_on_the_cpu",))],
    "numbers that are not finite": [
        ("loop/test_loop_resume.py", ("test_an_invalid_model_does_not_overwrite_a_good_one",)),
        ("loop/test_loop_sharded.py", ("test_one_invalid_slice_prevents_the_whole_checkpoint",)),
        ("loop/test_loop_ranks.py", ("test_an_infinite_gradient_of_one_rank_is_skipped_by_all",)),
        ("cli/test_supervise.py", ("test_a_nan_loss_ends_the_program_on_request",)),
    ],
    "wrong clocks": [("checkpoint/test_checkpoints.py", ("test_order_is_by_step_and_no_clock_matters",))],
    "two runs in one folder, and the lock of a dead one": [
        ("checkpoint/test_checkpoints.py", ("test_one_writer_at_a_time_and_a_killed_one_is_followed",)),
        ("checkpoint/test_disks.py", ("test_another_process_that_took_the_folder_is_not_disturbed",)),
    ],
    "files that are hostile": [
        ("faults/test_hostile_files.py", ("test_files_that_are_bad_on_purpose", "test_damaged_files"))
    ],
    "programs that exit in their own way": [
        ("cli/test_uses.py", ("test_it_is_as_without_flatout",)),
        ("cli/test_supervise.py", ("test_input_output_and_exit_code_are_the_programs_own",)),
    ],
    "programs with processes, hooks and handlers of their own": [
        (
            "agent/test_bootstrap.py",
            (
                "test_children_are_reached",
                "test_loader_workers_are_inert",
                "test_another_sitecustomize_is_not_hidden",
            ),
        ),
        (
            "agent/test_signals.py",
            (
                "test_a_child_has_the_programs_own_handlers",
                "test_an_earlier_wrapper_of_the_function_is_found",
            ),
        ),
    ],
    "a hundred megabytes of output": [
        ("launch/test_process.py", ("test_a_hundred_megabytes_of_output", "test_output_that_fits_is_whole"))
    ],
    "the program or machine differs on resume": [
        (
            "loop/test_loop_resume.py",
            (
                "test_differences_are_reported_and_nothing_is_claimed",
                "test_a_mismatched_checkpoint_is_rejected",
            ),
        ),
        ("checkpoint/test_loading.py", ("test_differences_are_reported",)),
    ],
    "power loss": [("checkpoint/test_cuts.py", ("test_a_loss_of_power_at_any_time",))],
    "a lever that fails, or is wrong": [
        ("trial/test_baton.py", ("test_a_plan_holds_from_the_first_step_on",)),
        ("loop/test_loop_auto.py", ("test_a_wrong_lever_never_affects_the_training",)),
    ],
    "repeated identical crashes": [
        ("cli/test_supervise.py", ("test_repeated_identical_crashes_end_it_with_the_reason",))
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_injected_by_existing_tests(fault):
    for file, names in FAULTS[fault]:
        found = {
            node.name
            for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert found >= set(names), f"{file} has no {set(names) - found}"
