"""Checks of exact resume, each of which can be switched off: a few words in flatout's source are replaced
where TRAP_OFF names the check.

A check matters if some program that is rejected, or right, resumes wrongly without it.
``tests/resume/site/sitecustomize.py`` switches it off in each run of a program.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader

REPLAY = "flatout.checkpoint.resume."


@dataclass(frozen=True)
class Check:
    """Replaces some ``words`` of a module.

    ``traps``: programs that show the check, rejected or right with it. ``beside``: another check that hides
    this one, off in both cases. ``why``: its purpose, where no program resumes wrongly without it.
    """

    what: str
    module: str
    words: tuple[str, str]
    traps: tuple[str, ...]
    beside: str = ""
    why: str = ""


CHECKS = {}


def check(name, what, module, before, after, *traps, beside="", why=""):
    CHECKS[name] = Check(
        what, module if module.startswith("flatout") else REPLAY + module, (before, after), traps, beside, why
    )


# -- the control flow --------------------------------------------------------------------------------------------------------------

check(
    "byte",
    "each value comes where it came the first time: a byte of the way beside it",
    "value_log",
    "if self.checks[number] != self.flow & 255:",
    "if False:",
    "other_place_before_the_save",
)
check(
    "mark",
    "each step ends after the same way",
    "value_log",
    "elif self._take() != {STEP_MARK: self.flow}:",
    "elif self._take() is None:",
    "other_way_in_the_middle",
    beside="byte",
)
check(
    "left_over",
    "no value is left over at the seam",
    "value_log",
    "if self._next_entry != len(self.checks):",
    "if False:",
    "reads_less_before_the_save",
)
check(
    "more",
    "no more values are asked for than there are",
    "value_log",
    'self.refuse(f"in step {self.steps + 1} the script reads more values than in the first run")',
    "return 0.0",
    "reads_more_before_the_save",
)
check(
    "ended",
    "a program does not end before it comes to its save",
    "session",
    'if self.replaying:\n            how = "exited"',
    'if False:\n            how = "exited"',
    "leaves_early",
)
check(
    "large",
    "a value that was too large to be kept is the same when it is computed again",
    "value_hooks",
    "if zlib.crc32(encode(recomputed).encode()) != value.digest:",
    "if False:",
    "large_list_of_the_machine",
    beside="plain",
)
check(
    "large_computed",
    "a value that was too large to be kept is not asked of a tensor without values",
    "value_hooks",
    """value_log.refuse(
                f"in step {value_log.steps + 1} {original.__name__}() returns more values to Python than the journal keeps"
            )""",
    "return [0.0] * args[0].numel()",
    "large_list_that_was_computed",
    beside="plain",
)
check(
    "threads",
    "what another thread reads from a clock is not the program's way",
    "value_hooks",
    "if not value_log.observes or not is_user_file",
    "if value_log.paused or not is_user_file",
    "thread_reads_the_same_clock",
    beside="plain",
)

# -- the resulting state -----------------------------------------------------------------------------------------------------------

check(
    "plain",
    "plain values are those of the save",
    "resume_point",
    "if differ:",
    "if False:",
    "process_number_kept",
)
check(
    "paths",
    "there are the same tensors",
    "resume_point",
    "if mismatched:",
    "if False:",
    "mask_made_meanwhile",
)
check(
    "together",
    "tensors that shared their memory share it again",
    "resume_point",
    "separated = self._separated_storages(reachable)",
    "separated: set[int] = set()",
    "weights_in_the_memory_of_another_tensor",
)
check(
    "optimizers",
    "there are the same optimizers",
    "resume_point",
    'if list(self.state["optimizers"]) != list(reachable.optimizers):',
    "if False:",
    "optimizer_in_a_cache",
    beside="plain",
)
check(
    "digests",
    "what was there before the training is there again",
    "resume_point",
    "if changed:",
    "if False:",
    "large_table_through_data",
)
check(
    "others",
    "no variable leads to a tensor that looks as if it had values",
    "resume_point",
    "if others:",
    "if False:",
    "weights_of_a_thread_known_weakly",
    "teacher_in_a_generator_in_a_zip",
)
check(
    "generators",
    "random generators are of the same kind",
    "resume_point",
    'self.refuse(f"`{path}` was another type of random generator in the first run")',
    "pass",
    "generator_of_another_kind",
)
check(
    "draws",
    "a program does not draw in turns with what is skipped",
    "session",
    'if interleaved := self._draws.compare(saved["random"]):',
    "if interleaved := list[str]():",
    "random_in_turns_in_a_cycle",
    beside="plain",
)
check(
    "complete",
    "all objects can be looked through",
    "resume_point",
    'reasons = [] if reachable.complete else ["it holds more objects than can be inspected"]',
    "reasons = []",
    "more_than_can_be_looked_through",
)

# -- after the resume point --------------------------------------------------------------------------------------------------------

check(
    "tripped",
    "nothing reads a tensor that has no values",
    "gradient_sources",
    "return ReplayTensor.on_bypass(func, args, kwargs or {})",
    "return func(*torch.utils._pytree.tree_map(lambda each: torch.zeros(each.meta[0], dtype=each.meta[2]) if type(each) is ReplayTensor else each, args), **(kwargs or {}))",
    "loader_in_a_cycle",
)
check(
    "trips",
    "no backward pass goes through the seam",
    "resume_point",
    """self.refuse(
                f"a backward pass goes through `{path}` to operations before the checkpoint, whose graph is not saved"
            )""",
    "return None",
    "hidden_state_with_its_graph",
)

# -- outside of the program --------------------------------------------------------------------------------------------------------

check(
    "read_again",
    "a file that was read has not changed",
    "files",
    "if not self.overlay.in_upper(key) and self.reads.get(key, present) != present:",
    "if False:",
    "numbers_change_meanwhile",
    beside="plain",
)
check(
    "future",
    "no file is read that was written after the save",
    "files",
    "elif key in self.stale_paths:",
    "elif False:",
    "best_read_after_the_checkpoint",
)
check(
    "adds",
    "nothing is added to a file that was written anew after the save",
    "files",
    'if key in self.stale_paths and "a" in mode:',
    "if False:",
    "log_that_gets_another_header",
)
check(
    "databases",
    "no database is kept",
    "files",
    "lambda *_, **__: True, sqlite3",
    "lambda *_, **__: False, sqlite3",
    "rows_in_a_database",
)
check(
    "programs",
    "no other programs are started while it trains",
    "files",
    'ledger.set(popen, "__init__", starts_program(popen.__init__))',
    "pass",
    "another_program_writes",
)
check(
    "parts",
    "no parts of a file are changed",
    "files",
    'return mode not in ("r", "c", "readonly", "copyonwrite")',
    "return False",
    "array_in_a_file",
)
check(
    "by_itself",
    "a program that resumes by itself is left alone",
    "files",
    "if key in self.checked_paths:",
    "if False:",
    "goes_on_by_itself",
    why="it says who goes on, the program from its own file or flatout; without it, this program goes on exactly",
)
check(
    "network",
    "nothing is asked over the network",
    "session",
    """self.refuse(
                    f"the script connects to {address[0]} over the network, and the answer may differ from the first run"
                )""",
    "pass",
    "server_answers_otherwise",
    beside="plain",
)
check(
    "sources",
    "its sources have not changed",
    "flatout.checkpoint.metadata",
    "if changed:",
    "if False:",
    "helper_changes_meanwhile",
)
check(
    "surroundings",
    "it is where it was",
    "flatout.checkpoint.metadata",
    """return [
        f"{name}: {_shown(before.get(name))}""",
    'return [] and [f"{name}: {_shown(before.get(name))}',
    "processor_without_wide_registers",
    "more_threads_than_before",
)


class Otherwise(SourceFileLoader):
    """A module with some words replaced."""

    words: tuple[tuple[str, str], ...] = ()

    def get_code(self, fullname):
        text = self.get_source(fullname)
        for before, after in self.words:
            assert text.count(before) == 1, f"{fullname} has {text.count(before)} times: {before}"
            text = text.replace(before, after)
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder:
    def __init__(self, words):
        self.words = words

    def find_spec(self, name, path=None, target=None):
        if name not in self.words:
            return None
        spec = PathFinder.find_spec(name, path, target)
        spec.loader = Otherwise(name, spec.origin)
        spec.loader.words = tuple(self.words[name])
        return spec


def switch_off(names):
    """Switch checks off in this process from now on. ``names`` are separated by commas."""
    words = {}
    for name in names.split(","):
        words.setdefault(CHECKS[name].module, []).append(CHECKS[name].words)
    early = set(words) & set(sys.modules)
    assert not early, f"already imported: {early}"
    sys.meta_path.insert(0, Finder(words))
