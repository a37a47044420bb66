"""What a rank of a launch tells its launcher when it fails, at the moment when the exception has reached the top: which rank was first must not be told from
when processes end. Ending takes long, and the others fail meanwhile because this one no longer answers them.

The launch has a folder, named by FLATOUT_GANG. In it the rank rings the *bell*, a pipe that the launcher listens to (lines arrive there in the order in
which ranks write them, so no clock is read), and leaves its words, `rank<k>.failed`, by atomic rename:

    failing <rank> <pid>           an exception has reached the top; the words are being written
    failing <rank> <pid> first     the same, of the first rank (what is explained and what is named must not differ)
    words   <rank> <pid>           they lie there
    leaving <rank> <pid>           the program has ended, for whatever reason, and now its objects end

Like the last words, this file is read at the start of a program and imports nothing that is not there already.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

BELL, CLAIM = "bell", "claim"
FAILING, WORDS, LEAVING, FIRST = "failing", "words", "leaving", "first"
MOST_CHARACTERS = 100_000  # of a traceback


class FirstWords:
    """Of this process, in the rank that it belongs to. It *is* the rank where the launcher is its parent; a rank may start programs of its own."""

    def __init__(self, gang: str, rank: str, launcher: str) -> None:
        self.gang, self.rank = gang, rank
        self.is_rank = launcher == str(os.getppid())

    def hear(self, error: BaseException) -> bool:
        """Tell of an exception that ends this process. Answers whether it may explain itself: of the ranks, the first that fails does. Raises nothing."""
        try:
            if isinstance(error, KeyboardInterrupt):
                self._ring(FAILING)
                return False  # writing imports what calls eval(), after which CPython no longer ends by SIGINT but with 1 (run_eval_code_obj)
            first = self.is_rank and self._claim()
            self._ring(FAILING, FIRST if first else "")
            self._write(error)
            self._ring(WORDS)
        except Exception:
            return False  # the launch is over, or its disk full: then when this process ends has to do
        return first or not self.is_rank

    def leave(self) -> None:
        """Tell that this process comes to its end."""
        try:
            self._ring(LEAVING)
        except OSError:
            pass

    def _ring(self, word: str, more: str = "") -> None:
        bell = os.open(os.path.join(self.gang, BELL), os.O_WRONLY | os.O_NONBLOCK)  # never waits: without a launcher it is an error
        try:
            os.write(bell, f"{word} {self.rank} {os.getpid()} {more}\n".encode())  # less than PIPE_BUF: lines of several ranks do not mix
        finally:
            os.close(bell)

    def _claim(self) -> bool:
        try:
            os.close(os.open(os.path.join(self.gang, CLAIM), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def _write(self, error: BaseException) -> None:
        import json
        import traceback

        said = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        words = {"rank": self.rank, "host": os.uname().nodename, "pid": os.getpid(), "traceback": said[-MOST_CHARACTERS:]}
        path = os.path.join(self.gang, f"rank{self.rank}.failed")
        beside = f"{path}.{os.getpid()}"
        with open(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8", errors="replace") as out:
            json.dump(words, out)
        os.replace(beside, path)


def of_this_launch(environment: Mapping[str, str] = os.environ) -> FirstWords | None:
    """None where no launcher of ours waits for them."""
    gang, rank = environment.get("FLATOUT_GANG"), environment.get("FLATOUT_RANK", "")
    return FirstWords(gang, rank, environment.get("FLATOUT_LAUNCHER", "")) if gang and rank.isdigit() else None
