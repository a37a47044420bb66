"""Exact resume inside the program: choose the checkpoint to resume from, and check that it can be used."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.capture.bootstrap import records_first, say_at_once
from flatout.capture.frames import is_users
from flatout.capture.ledger import Ledger
from flatout.engine.rescue import Rescue
from flatout.launch.anew import become_again
from flatout.measure.clock import seconds
from flatout.pipeline.streams import own_generators
from flatout.plan import pulse
from flatout.plan.errors import CannotResume, FlatoutError, SaveError
from flatout.plan.standing import standing
from flatout.state.appointment import Appointment
from flatout.state.drift import drift, surroundings
from flatout.state.saves import Save, Saves, believed

COST_S = 0.02  # assumed cost of a checkpoint, if the one resumed from does not record it
unlink = os.unlink  # the original, before flatout patches file functions

if TYPE_CHECKING:
    from flatout.replay.again import Again

JOURNAL, FETCHES = "journal-", "FLATOUT_FETCHES"


def resume(rescue: Rescue, ledger: Ledger, at_seam: Callable[[], None], asked: Mapping[str, Any], ranks: Ranks) -> Again | None:
    """Return the replay that resumes or records this process; None if its training cannot be recorded.

    Keys of ``asked``: ``anew``; ``shows``; ``rescue``: keep checkpoints even if none can be resumed from;
    ``insists``: exit, instead of starting from scratch, if an exact resume is impossible."""
    import torch

    from flatout.replay.again import Again, Outside, Way

    if why_not := ranks.why_not():
        ranks.say(f"this program is not recorded and cannot be resumed exactly: {why_not}")
        return None
    if (started := sys.modules.get("multiprocessing.process")) is not None and started.parent_process() is not None:
        return None
    if not records_first(ranks.claim):
        return None
    try:
        appointment = ranks.appointment()
    except OSError as error:
        ranks.say(f"this program is not recorded and cannot be resumed exactly: its ranks cannot agree on a save schedule: {error.strerror}")
        return None
    pulse.goes_on_exactly()
    again: Again | None = None
    folder = rescue.folder
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save, unfinished = (None, "") if asked["anew"] else newest_exact(folder) if ranks.size == 1 else newest_of_all(folder, ranks)
    journal = folder / (save.manifest.told["journal"] if save is not None else f"{JOURNAL}{uuid.uuid4().hex[:8]}")

    def refuse(why: str) -> NoReturn:
        """Exit the process: the program must not run with tensors that have no values."""
        then = "`flatout rescue` lists the checkpoints; `flatout run --resume --anew` starts from scratch"
        if not asked["insists"]:
            unlink(journal)
            then = "The next start begins from scratch; `flatout rescue` lists the checkpoints"
        say_at_once(f"{ranks.prefix}cannot resume exactly: {why}. {then}.")
        os._exit(CannotResume.exit_code)

    def astray(why: str) -> NoReturn:
        """Replay the program once more and read its data this time; give up if that was done already."""
        if again is not None and again.skips and FETCHES not in os.environ and ranks.size == 1:
            say_at_once(f"{why}; replaying again, now reading the data")
            unlink(f"{os.environ['FLATOUT_JOB']}.exactly")
            become_again({FETCHES: "1"})
        refuse(why)

    def seam(through_s: float, trained_s: float) -> None:
        os.environ.pop(FETCHES, None)
        differs = drift(save.manifest.told["surroundings"], surroundings(torch)) if save is not None else []
        if differs:  # the program has made its own settings by now
            refuse(f"the environment differs from that of {save.path.name if save is not None else ''}: {'; '.join(differs)}")
        ranks.say(f"resumed exactly after step {save.step if save is not None else 0}, reached in {through_s:.1f} s; training had taken {trained_s:.1f} s")
        pulse.goes_on_here()
        at_seam()

    def left_alone(sentence: str) -> None:
        ranks.say(sentence)
        pulse.goes_on_exactly(False)
        pulse.saved()  # counts the file from which the program resumes itself
        if not asked["rescue"]:
            rescue.leave()
            rescue.may_begin = lambda: False

    state = None
    if unfinished:
        why = f"its last start left no checkpoint to resume from: {unfinished}"
        if asked["insists"]:
            refuse(why)
        ranks.say(f"this program starts from scratch: {why}")
    if save is None and FETCHES in os.environ:
        refuse("the checkpoint that it was resuming from no longer exists")
    if save is not None:
        ranks.say(f"replaying the program up to step {save.step}, from {os.path.relpath(save.path)}")
        try:
            _may_go_on(torch, save)
            state = save.read(torch)["exact"]
        except FlatoutError as error:
            refuse(str(error).rstrip("."))
    way = Way(journal, state, several=ranks.size > 1, shows=asked["shows"], fetches=FETCHES in os.environ)
    again = Again(way, Outside(ranks.say, refuse, astray, lambda: _tidy(folder, journal.name), seam, left_alone, seconds), rescue, ledger, own_generators)
    atexit.register(_ended, again, rescue)
    rescue.beside = Told(again, journal.name, ranks, appointment.launch if appointment is not None else 0)
    if appointment is not None:
        rescue.agrees = appointment.agrees
    if save is not None:
        rescue.goes_on, rescue.cost_s = save.step, float(save.manifest.told.get("cost_s") or COST_S)
    return again


def _ended(again: Again, rescue: Rescue) -> None:
    """Mark the run as ended at process exit, unless it failed or got a signal: such a run can be resumed."""
    if os.getpid() != again.pid:
        return
    failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if again.going:
        what = f"failed with {type(failure).__name__}: {failure}{_place_of(failure)}" if failure is not None else "exited"
        again.refuse(f"before the program reached its resume point, it {what}")
    if failure is None and not rescue.signalled:
        again.ended()


def _place_of(failure: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_users(frame.filename)]
    return f", at {os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


class Ranks:
    """The rank of this process among the ranks of one program. ``folder`` holds the checkpoints of rank 0."""

    def __init__(self, torch: Any, rank: int, size: int, here: int, folder: Path) -> None:
        self.torch, self.rank, self.size, self.here = torch, rank, size, here
        self.folders = [folder if each == 0 else folder / f"rank-{each}" for each in range(size)]
        job = os.environ["FLATOUT_JOB"]
        self.claim = f"{job}.{rank}" if size > 1 else job
        self.prefix = f"rank {rank}: " if rank else ""

    @classmethod
    def of(cls, torch: Any, folder: Path) -> Ranks:
        names = os.environ
        if (here := standing()) is not None:
            return cls(torch, here.rank, here.world_size, here.local_world_size, folder)
        size = int(names.get("WORLD_SIZE") or 1)
        return cls(torch, int(names.get("RANK") or 0) if size > 1 else 0, size, int(names.get("LOCAL_WORLD_SIZE") or size), folder)

    def say(self, sentence: str) -> None:
        """Print the sentence once for all ranks."""
        if self.rank == 0:
            say_at_once(sentence)

    def why_not(self) -> str:
        """Return why the ranks cannot be resumed, or ""."""
        if self.size == 1:
            return ""
        if standing() is not None:
            return "flatout runs it as several ranks (--procs)"
        if self.size != self.here:
            return "its ranks are on several machines"
        return "" if self.torch.distributed.is_available() else "this torch has no torch.distributed"

    def appointment(self) -> Appointment | None:
        """Return the save schedule that the ranks share. The ranks of one launch have the same parent."""
        if self.size == 1:
            return None
        return Appointment(f"{os.environ['FLATOUT_JOB']}.{os.getppid()}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", leads=self.rank == 0)


class Told:
    """Metadata of a checkpoint beyond what `Again` adds: the journal and the sources of the program."""

    def __init__(self, again: Again, journal: str, ranks: Ranks, launch: int) -> None:
        self.again, self.journal, self.ranks, self.launch = again, journal, ranks, launch
        from flatout.replay.world import users_modules

        self._modules, self._sources = users_modules, dict[str, str]()
        self._why_not = ""

    def beside(self, frame: Any) -> tuple[dict[str, Any], str]:
        found, why_not = self.again.beside(frame)
        if why_not and why_not != self._why_not and not self.again.tape.broken:
            say_at_once(f"{self.ranks.prefix}from here on this program could not be resumed exactly: {why_not}")
        self._why_not = why_not
        return found, self._why_not

    def told(self) -> dict[str, Any]:
        for module in self._modules():
            file = os.path.abspath(getattr(module, "__file__", None) or "")
            if file not in self._sources and is_users(file):
                self._sources[file] = _digest_of(file)  # at first sight: later edits do not affect the running program
        told = {"journal": self.journal, "program": sys.orig_argv[1:], "sources": self._sources}
        return {**told, "ranks": {"size": self.ranks.size, "launch": self.launch, **self.again.met()}} if self.ranks.size > 1 else told

    def kept(self, step: int) -> None:
        if not self._why_not and not self.again.tape.broken:
            pulse.saved(step)

    def flush(self) -> None:
        self.again.flush()


def newest_exact(folder: Path) -> tuple[Save | None, str]:
    """Return the newest valid checkpoint of this program that has its journal and can be resumed exactly.

    If there is none, also return why the newest one cannot be resumed; "" if the program was not
    interrupted."""
    why_not = ""
    for save in _of_this_program(folder):
        told = save.manifest.told
        if told.get("exact") == "":
            return save, ""
        why_not = why_not or str(told.get("exact") or "")
    return None, why_not


def newest_of_all(folder: Path, ranks: Ranks) -> tuple[Save | None, str]:
    """Do the same for checkpoints that all ranks wrote at one moment.

    Every rank gets the same answer, for its own ``folder``."""
    kept = [{save.step: save for save in _of_this_program(each)} for each in ranks.folders]
    whole = [step for step in sorted(set.intersection(*map(set, kept)), reverse=True) if _are_of_one_moment([of_rank[step] for of_rank in kept])]
    why_not = ""
    for step in whole:
        reasons = [str(of_rank[step].manifest.told.get("exact") or "") for of_rank in kept]
        if not any(reasons):
            return kept[ranks.rank][step], ""
        why_not = why_not or next(filter(None, reasons))
    return None, why_not or ("its ranks have no checkpoints from the same moment" if any(kept) else "")


def _are_of_one_moment(saves: list[Save]) -> bool:
    """Return whether all ranks ran equally many collectives per group and began to train at one place."""
    told = [save.manifest.told.get("ranks") or {} for save in saves]
    if len({(each.get("size"), each.get("launch")) for each in told}) != 1 or told[0].get("size") != len(saves):
        return False
    return all(len({each[counts][group] for each in told if group in each[counts]}) == 1
               for counts in ("met", "begun") for group in {group for each in told for group in each[counts]})


def _of_this_program(folder: Path) -> Iterator[Save]:
    """Yield the valid checkpoints that have their journal, newest first."""
    for path in Saves(folder).paths():
        try:
            save = believed(path)
        except SaveError:
            continue
        told = save.manifest.told
        if told.get("program") == sys.orig_argv[1:] and (folder / Path(str(told.get("journal"))).name).is_file():
            yield save


def _may_go_on(torch: Any, save: Save) -> None:
    """Raise CannotResume if something that affects the bits has changed."""
    told = save.manifest.told
    changed = [name for name, digest in told["sources"].items() if _digest_of(name) != digest]
    if changed:
        raise CannotResume(f"{', '.join(os.path.relpath(name) for name in changed[:4])} has changed since {save.path.name} was saved")
    before = told["surroundings"]
    now = {**surroundings(torch), **{name: before.get(name) for name in LATER}}
    if before.get("devices") and not torch.cuda.device_count():
        now["devices"] = []
    differs = drift(before, now)
    if differs:
        raise CannotResume(f"the environment differs from that of {save.path.name}: {'; '.join(differs)}")


# Settings that a program makes, or devices that it begins to use, after torch was imported.
LATER = ("threads", "threads between operators", "devices", "deterministic algorithms", "cudnn.benchmark", "cudnn.deterministic", "matmul precision")


def _digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _tidy(folder: Path, own: str) -> None:
    """Delete journals of runs that can no longer be resumed, and the files next to them.

    Files that this run wrote before its training are next to its ``own`` journal; they stay."""
    for path in folder.glob(f"{JOURNAL}*"):
        if path.name.startswith(own):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
