"""A program that is killed and typed again ends as if nothing had happened, or refuses in words: for each thing that going through it again might not see."""

from __future__ import annotations

import pytest
from interrupted import REFUSES, TWICE, Programs, live
from traps import TRAPS


@pytest.fixture(scope="session")
def programs():
    found = Programs()
    yield found
    found.close()

# Nothing exact is kept of these, and so nothing is due that a kill could follow: they resume by themselves, or nobody hears their steps.
LEFT_ALONE = {"goes_on_by_itself", "tensor_written_and_read_back", "optimizer_in_the_backward_pass"}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_seen(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name])
    safe = ("right", "refused", "anew", "unkilled") if name in LEFT_ALONE else ("right", "refused", "anew")
    assert found.verdict in safe, f"{found.verdict}: {found.why}"
    if found.verdict == "refused":
        assert found.why.rstrip().endswith("."), f"{REFUSES}{found.why}"


@pytest.mark.parametrize("name", ["accumulator_made_inside", "list_of_losses", "own_generators"])
def test_a_process_of_its_own_tells_the_same(programs, tmp_path, name):
    """The others are forked from one that has imported torch already."""
    found = live(programs, tmp_path, TRAPS[name].in_a_process_of_its_own)
    assert (found.verdict, found.after) == ("right", 10), found.why


@pytest.mark.parametrize("name", ["accumulator_made_inside", "replay_buffers", "own_generators", "log_appended_each_step", "persistent_workers"])
def test_it_is_killed_twice(programs, tmp_path, name):
    found = live(programs, tmp_path, TRAPS[name], TWICE)
    assert (found.verdict, found.after) == ("right", 16), found.why
