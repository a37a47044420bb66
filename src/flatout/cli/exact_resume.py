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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.capture.bootstrap import records_first, say_at_once
from flatout.capture.frames import is_users
from flatout.capture.ledger import Ledger
from flatout.engine.rescue import Rescue
from flatout.launch.reexec import reexecute
from flatout.measure.clock import seconds
from flatout.pipeline.streams import own_generators
from flatout.plan import heartbeat
from flatout.plan.errors import CannotResume, FlatoutError, SaveError
from flatout.plan.rank_environment import this_rank
from flatout.state.checkpoints import Checkpoint, CheckpointFolder, verified
from flatout.state.drift import drift, surroundings
from flatout.state.save_schedule import SaveSchedule

COST_S = 0.02  # assumed cost of a checkpoint, if the one resumed from does not record it
unlink = os.unlink  # the original, before flatout patches file functions

if TYPE_CHECKING:
    from flatout.replay.script_replay import ScriptReplay

JOURNAL, FETCHES = "journal-", "FLATOUT_FETCHES"


def resume(
    rescue: Rescue,
    ledger: Ledger,
    at_resume_point: Callable[[], None],
    asked: Mapping[str, Any],
    ranks: ResumeRanks,
) -> ScriptReplay | None:
    """Return the replay that resumes or records this process; None if its training cannot be recorded.

    Keys of ``asked``: ``from_scratch``; ``shows``; ``rescue``: keep checkpoints even if none can be resumed from;
    ``insists``: exit, instead of starting from scratch, if an exact resume is impossible."""
    import torch

    from flatout.replay.script_replay import ResumeRequest, ScriptReplay

    if why_not := ranks.why_not():
        ranks.say(f"this program is not recorded and cannot be resumed exactly: {why_not}")
        return None
    processes = sys.modules.get("multiprocessing.process")
    if (processes is not None and processes.parent_process() is not None) or not records_first(ranks.claim):
        return None
    try:
        save_schedule = ranks.save_schedule()
    except OSError as error:
        ranks.say(
            f"this program is not recorded and cannot be resumed exactly: its ranks cannot agree on a save schedule: {error.strerror}"
        )
        return None
    heartbeat.set_exact_resume()
    rescue.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    host = ResumeHost(torch, rescue, ranks, asked, at_resume_point)
    state = host.saved_state()
    request = ResumeRequest(
        host.journal, state, several=ranks.size > 1, shows=asked["shows"], fetches=FETCHES in os.environ
    )
    host.replay = replay = ScriptReplay(request, host, rescue, ledger, own_generators)
    atexit.register(_ended, replay, rescue)
    rescue.beside = CheckpointMetadata(
        replay,
        host.journal.name,
        ranks,
        save_schedule.launch if save_schedule is not None else 0,
        "the same command" + (" without --from-scratch" if asked["from_scratch"] else ""),
    )
    if save_schedule is not None:
        rescue.agrees = save_schedule.agrees
    if host.save is not None:
        rescue.goes_on = host.save.step
        rescue.cost_s = float(host.save.manifest.metadata.get("cost_s") or COST_S)
    return replay


class ResumeHost:
    """The `ReplayHost` of this process: the checkpoint to resume from, and messages and exits of its replay.

    ``save`` is None, and ``journal`` a new file, if there is no checkpoint to resume from.
    """

    def __init__(
        self,
        torch: Any,
        rescue: Rescue,
        ranks: ResumeRanks,
        asked: Mapping[str, Any],
        at_resume_point: Callable[[], None],
    ) -> None:
        self.torch, self.rescue, self.ranks, self.asked = torch, rescue, ranks, asked
        self._at_resume_point = at_resume_point
        self.replay: ScriptReplay | None = None
        self.save: Checkpoint | None = None
        self.unfinished = ""
        if not asked["from_scratch"]:
            self.save, self.unfinished = (
                newest_exact(rescue.folder) if ranks.size == 1 else newest_of_all(rescue.folder, ranks)
            )
        self.journal = rescue.folder / (
            self.save.manifest.metadata["journal"] if self.save else f"{JOURNAL}{uuid.uuid4().hex[:8]}"
        )

    def saved_state(self) -> dict[str, Any] | None:
        """Return the state of the checkpoint; None to start from scratch.

        Refuses if the checkpoint cannot be used, or if there is none although the user insists."""
        if self.unfinished:
            why = f"its last start left no checkpoint to resume from: {self.unfinished}"
            if self.asked["insists"]:
                self.refuse(why)
            self.say(f"this program starts from scratch: {why}")
        if self.save is None:
            if FETCHES in os.environ:
                self.refuse("the checkpoint that it was resuming from no longer exists")
            return None
        self.say(f"replaying the program up to step {self.save.step}, from {os.path.relpath(self.save.path)}")
        try:
            _may_go_on(self.torch, self.save)
            return self.save.read(self.torch)["exact"]
        except FlatoutError as error:
            self.refuse(str(error).rstrip("."))

    def say(self, sentence: str) -> None:
        self.ranks.say(sentence)

    def seconds(self) -> float:
        return seconds()

    def refuse(self, why: str) -> NoReturn:
        """Exit the process: the program must not run with tensors that have no values."""
        then = "`flatout rescue` lists the checkpoints; `flatout run --resume --from-scratch` starts from scratch"
        if not self.asked["insists"]:
            unlink(self.journal)
            then = "The next start begins from scratch; `flatout rescue` lists the checkpoints"
        say_at_once(f"{self.ranks.prefix}cannot resume exactly: {why}. {then}.")
        os._exit(CannotResume.exit_code)

    def diverged(self, why: str) -> NoReturn:
        """Replay the program once more and read its data this time; give up if that was done already."""
        skipped = self.replay is not None and self.replay.skips
        if skipped and FETCHES not in os.environ and self.ranks.size == 1:
            say_at_once(f"{why}; replaying again, now reading the data")
            for claim in ("exactly", "reported"):
                with suppress(FileNotFoundError):
                    unlink(f"{os.environ['FLATOUT_JOB']}.{claim}")
            reexecute({FETCHES: "1"})
        self.refuse(why)

    def begins(self) -> None:
        _tidy(self.rescue.folder, self.journal.name)

    def at_resume_point(self, through_s: float, trained_s: float) -> None:
        os.environ.pop(FETCHES, None)
        step = 0
        if self.save is not None:
            step = self.save.step
            differs = drift(self.save.manifest.metadata["surroundings"], surroundings(self.torch))
            if differs:  # the program has made its own settings by now
                self.refuse(
                    f"the environment differs from that of {self.save.path.name}: {'; '.join(differs)}"
                )
        self.say(
            f"resumed exactly after step {step}, reached in {through_s:.1f} s; training had taken {trained_s:.1f} s"
        )
        heartbeat.mark_resume_point()
        self._at_resume_point()

    def left_alone(self, sentence: str) -> None:
        self.say(sentence)
        heartbeat.set_exact_resume(False)
        heartbeat.saved()  # counts the file from which the program resumes itself
        if not self.asked["rescue"]:
            self.rescue.leave()
            self.rescue.may_begin = lambda: False


def _ended(replay: ScriptReplay, rescue: Rescue) -> None:
    """Mark the run as ended at process exit, unless it failed or got a signal: such a run can be resumed."""
    if os.getpid() != replay.pid:
        return
    failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if replay.going:
        what = (
            f"failed with {type(failure).__name__}: {failure}{_place_of(failure)}"
            if failure is not None
            else "exited"
        )
        replay.refuse(f"before the program reached its resume point, it {what}")
    if failure is None and not rescue.signalled:
        replay.ended()


def _place_of(failure: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_users(frame.filename)]
    return f", at {os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


class ResumeRanks:
    """The rank of this process among the ranks of one program. ``folder`` holds the checkpoints of rank 0."""

    def __init__(self, torch: Any, rank: int, size: int, here: int, folder: Path) -> None:
        self.torch, self.rank, self.size, self.here = torch, rank, size, here
        self.folders = [folder if each == 0 else folder / f"rank-{each}" for each in range(size)]
        job = os.environ["FLATOUT_JOB"]
        self.claim = f"{job}.{rank}" if size > 1 else job
        self.prefix = f"rank {rank}: " if rank else ""

    @classmethod
    def of(cls, torch: Any, folder: Path) -> ResumeRanks:
        names = os.environ
        if (here := this_rank()) is not None:
            return cls(torch, here.rank, here.world_size, here.local_world_size, folder)
        size = int(names.get("WORLD_SIZE") or 1)
        return cls(
            torch,
            int(names.get("RANK") or 0) if size > 1 else 0,
            size,
            int(names.get("LOCAL_WORLD_SIZE") or size),
            folder,
        )

    def say(self, sentence: str) -> None:
        """Print the sentence once for all ranks."""
        if self.rank == 0:
            say_at_once(sentence)

    def why_not(self) -> str:
        """Return why the ranks cannot be resumed, or ""."""
        if self.size == 1:
            return ""
        if this_rank() is not None:
            return "flatout runs it as several ranks (--procs)"
        if self.size != self.here:
            return "its ranks are on several machines"
        return "" if self.torch.distributed.is_available() else "this torch has no torch.distributed"

    def save_schedule(self) -> SaveSchedule | None:
        """Return the save schedule that the ranks share. The ranks of one launch have the same parent."""
        if self.size == 1:
            return None
        return SaveSchedule(
            f"{os.environ['FLATOUT_JOB']}.{os.getppid()}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            leads=self.rank == 0,
        )


class CheckpointMetadata:
    """Metadata of a checkpoint beyond what `ScriptReplay` adds: the journal and the sources of the program."""

    def __init__(
        self, replay: ScriptReplay, journal: str, ranks: ResumeRanks, launch: int, next_command: str
    ) -> None:
        self.replay, self.journal, self.ranks, self.launch = replay, journal, ranks, launch
        self.next_command = next_command
        from flatout.replay.reachable_state import users_modules

        self._modules, self._sources = users_modules, dict[str, str]()
        self._why_not = ""

    def beside(self, frame: Any) -> tuple[dict[str, Any], str]:
        found, why_not = self.replay.beside(frame)
        if why_not and why_not != self._why_not and not self.replay.value_log.broken:
            say_at_once(
                f"{self.ranks.prefix}from here on this program could not be resumed exactly: {why_not}"
            )
        self._why_not = why_not
        return found, self._why_not

    def metadata(self) -> dict[str, Any]:
        for module in self._modules():
            file = os.path.abspath(getattr(module, "__file__", None) or "")
            if file not in self._sources and is_users(file):
                self._sources[file] = _digest_of(
                    file
                )  # at first sight: later edits do not affect the running program
        metadata = {"journal": self.journal, "program": sys.orig_argv[1:], "sources": self._sources}
        return (
            {**metadata, "ranks": {"size": self.ranks.size, "launch": self.launch, **self.replay.met()}}
            if self.ranks.size > 1
            else metadata
        )

    def kept(self, step: int) -> None:
        if not self._why_not and not self.replay.value_log.broken:
            heartbeat.saved(step)

    def flush(self) -> None:
        self.replay.flush()


def newest_exact(folder: Path) -> tuple[Checkpoint | None, str]:
    """Return the newest valid checkpoint of this program that has its journal and can be resumed exactly.

    If there is none, also return why the newest one cannot be resumed; "" if the program was not
    interrupted."""
    why_not = ""
    for save in _of_this_program(folder):
        metadata = save.manifest.metadata
        if metadata.get("exact") == "":
            return save, ""
        why_not = why_not or str(metadata.get("exact") or "")
    return None, why_not


def newest_of_all(folder: Path, ranks: ResumeRanks) -> tuple[Checkpoint | None, str]:
    """Do the same for checkpoints that all ranks wrote at one moment.

    Every rank gets the same answer, for its own ``folder``."""
    kept = [{save.step: save for save in _of_this_program(each)} for each in ranks.folders]
    whole = [
        step
        for step in sorted(set.intersection(*map(set, kept)), reverse=True)
        if _are_of_one_moment([of_rank[step] for of_rank in kept])
    ]
    why_not = ""
    for step in whole:
        reasons = [str(of_rank[step].manifest.metadata.get("exact") or "") for of_rank in kept]
        if not any(reasons):
            return kept[ranks.rank][step], ""
        why_not = why_not or next(filter(None, reasons))
    return None, why_not or ("its ranks have no checkpoints from the same moment" if any(kept) else "")


def _are_of_one_moment(saves: list[Checkpoint]) -> bool:
    """Return whether all ranks ran equally many collectives per group and began to train at one place."""
    metadata = [save.manifest.metadata.get("ranks") or {} for save in saves]
    if len({(each.get("size"), each.get("launch")) for each in metadata}) != 1 or metadata[0].get(
        "size"
    ) != len(saves):
        return False
    return all(
        len({each[counts][group] for each in metadata if group in each[counts]}) == 1
        for counts in ("met", "begun")
        for group in {group for each in metadata for group in each[counts]}
    )


def _of_this_program(folder: Path) -> Iterator[Checkpoint]:
    """Yield the valid checkpoints that have their journal, newest first."""
    for path in CheckpointFolder(folder).paths():
        try:
            save = verified(path)
        except SaveError:
            continue
        metadata = save.manifest.metadata
        if (
            metadata.get("program") == sys.orig_argv[1:]
            and (folder / Path(str(metadata.get("journal"))).name).is_file()
        ):
            yield save


def _may_go_on(torch: Any, save: Checkpoint) -> None:
    """Raise CannotResume if something that affects the bits has changed."""
    metadata = save.manifest.metadata
    changed = [name for name, digest in metadata["sources"].items() if _digest_of(name) != digest]
    if changed:
        raise CannotResume(
            f"{', '.join(os.path.relpath(name) for name in changed[:4])} has changed since {save.path.name} was saved"
        )
    before = metadata["surroundings"]
    now = {**surroundings(torch), **{name: before.get(name) for name in LATER}}
    if before.get("devices") and not torch.cuda.device_count():
        now["devices"] = []
    differs = drift(before, now)
    if differs:
        raise CannotResume(f"the environment differs from that of {save.path.name}: {'; '.join(differs)}")


# Settings that a program makes, or devices that it begins to use, after torch was imported.
LATER = (
    "threads",
    "threads between operators",
    "devices",
    "deterministic algorithms",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "matmul precision",
)


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
