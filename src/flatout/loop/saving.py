"""A Loop with ``saves=``: it goes on from the newest save that can be believed, and writes new ones between two steps.

A save describes the moment before a step is made, when the body of the ``for`` has run for the last one. It is taken then, written beside the steps that
follow, and waited for where the program is about to end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.levers import TABLE
from flatout.loop.kept import Kept
from flatout.loop.resumed import Resumed
from flatout.loop.signals import Signals
from flatout.measure.clock import seconds, thread_seconds
from flatout.pipeline.streams import own_generators
from flatout.plan.errors import LoopError, SaveError
from flatout.plan.folder import read_json
from flatout.plan.words import Effect, Moment
from flatout.state.drift import drift, surroundings
from flatout.state.loading import Reading
from flatout.state.randoms import random_states, set_random_states
from flatout.state.saver import Clocks, Saver
from flatout.state.saves import Save, Saves
from flatout.state.values import Packed, pack

LOGGER = logging.getLogger("flatout")
LEVERS = {lever.name: lever for lever in TABLE}
KIND = "loop"
MEASURED = "flatout.trial."


def measured() -> bool:
    """Whether this process is one that flatout measures, which goes on from nothing and leaves nothing behind."""
    path = os.environ.get("FLATOUT_JOB")
    job = read_json(Path(path)) if path else None
    return isinstance(job, dict) and str(job.get("entry", "")).startswith(MEASURED)


class Saving:
    """``found`` is the save to go on from, None where the training begins."""

    def __init__(self, torch: Any, folder: str | Path, every: int | None, fresh: bool, on_drift: str) -> None:
        """Raises SaveError where there are saves and none can be believed, StorageError where the folder cannot be written."""
        self.torch, self.every, self.stops_on_drift = torch, every, on_drift == "stop"
        self.saves = Saves(Path(folder)).open()
        self.damaged: list[Path] = []
        self.found: Save | None = None
        if fresh:
            aside = self.saves.begin_anew()
            if aside is not None:
                LOGGER.info("fresh=True: the saves that were there are in %s now", aside)
        else:
            self.found, bad = self.saves.newest()
            self.damaged = [self.saves.set_aside(each) for each in bad]
            for each, path in zip(bad, self.damaged, strict=True):
                LOGGER.warning("%s cannot be believed: %s. It was put into %s", each.path.name, each.why, path)
        if self.found is not None and self.found.manifest.kind != KIND:
            raise SaveError(f"{self.found.path} was not written by a flatout.Loop. Name another folder in saves=.")
        self._signals = Signals()
        self._open = True
        self._inexact: list[str] = []  # from the run before
        self._first = 0, 0  # step and epoch with which this training began
        self._resumed_state: dict[str, Any] | None = None

    @property
    def plan(self) -> str | None:
        """Under which the training was saved, as TOML, where it was one that plan="auto" had found."""
        return self.found.manifest.told.get("tuned") if self.found is not None else None

    # -- going on -----------------------------------------------------------------------------------------------------------

    def attach(self, loop: Any, kept: Kept, settings: Mapping[str, Any]) -> Resumed | None:
        """The Loop is made: what a save holds is put back, but for random numbers and the place in the data, which wait until it is iterated over."""
        self.loop, self.kept, self.settings = loop, kept, dict(settings)
        self.reading = Reading(self.torch, loop.loader, own_generators)
        parameters = self.kept.parameters()
        self.saver = Saver(self.torch, self.saves, KIND, Clocks(seconds, thread_seconds), self._say, every=self.every,
                           sound=lambda packed: _not_finite(self.torch, packed, parameters))
        return self._go_on(self.found) if self.found is not None else None

    def _go_on(self, save: Save) -> Resumed:
        told = save.manifest.told
        differs = drift(told.get("surroundings", {}), self._surroundings())
        if self.stops_on_drift and differs:
            raise LoopError(f"{save.path} cannot be gone on from exactly: {'; '.join(differs)}. on_drift=\"say\" goes on all the same, fresh=True begins anew.")
        state = save.read(self.torch)
        inexact = [*told.get("inexact", ()), *(f"{where} ({what}) was not stored" for where, what in save.manifest.left_out.items())]
        inexact += [f"{where} is not what it was" for where in self.kept.put_back(state)]
        differs += self.reading.go_on(state["place"])
        if self.stops_on_drift and differs:
            raise LoopError(f"{save.path} cannot be gone on from exactly: {'; '.join(differs)}. on_drift=\"say\" goes on all the same, fresh=True begins anew.")
        at = state["loop"]
        self.loop.index, self.loop.epoch, self._first = at["index"], at["epoch"], (at["first_index"], at["first_epoch"])
        self.saver.goes_on(save.step)
        self._inexact, self._resumed_state = list(dict.fromkeys([*inexact, *differs])), state
        resumed = Resumed(save.step, at["epoch"], save.path, tuple(differs), tuple(dict.fromkeys(inexact)), tuple(self.damaged))
        for sentence in resumed.sentences()[len(self.damaged):]:
            LOGGER.log(logging.INFO if resumed.exact else logging.WARNING, sentence)
        return resumed

    # -- while it is iterated over ------------------------------------------------------------------------------------------

    def begin(self) -> tuple[int, int]:
        """Step and epoch with which this iteration began; the random numbers of the save go on from here."""
        if not self._open:
            self.saves.open()
            self._open = True
        self._signals.listen()
        if self._resumed_state is None:
            self._first = self.loop.index, self.loop.epoch
            return self._first
        for sentence in set_random_states(self.torch, self._resumed_state["random"]):
            LOGGER.warning(sentence)
        self._resumed_state = None
        return self._first

    def batches(self) -> Iterator[Any]:
        """Of one epoch, or what is left of it."""
        if self.reading.workers:
            self.saver.wait()  # a process that is forked while a thread writes may find locks held that nobody will ever release
        return self.reading.epoch()

    @property
    def given(self) -> int:
        """Batches of the coming epoch that were given out before the training was interrupted."""
        return self.reading.coming

    def edge(self) -> None:
        """Between two steps. Raises SystemExit where a signal has asked to end, once a save is written."""
        if self._signals.seen:
            self.finish()
        elif self.saver.due(self.loop.index):
            self._save()

    def finish(self) -> None:
        """A last save, which is waited for. Raises SystemExit where a signal has asked to end."""
        if self.saver.last_step != self.loop.index:
            self._save()
        self.saver.wait()
        if self._signals.seen:
            LOGGER.warning("asked to end by signal %d: step %d was finished, and %s", self._signals.seen, self.loop.index - 1, self._last_words())
            self._signals.end()

    def leave(self) -> None:
        """The iteration ends, however it ends."""
        self._signals.leave()
        self.saver.wait()
        self.saves.close()
        self._open = False

    def _save(self) -> None:
        loop = self.loop
        state = {**self.kept.state(), "random": random_states(self.torch), "place": self.reading.place(),
                 "loop": {"index": loop.index, "epoch": loop.epoch, "first_index": self._first[0], "first_epoch": self._first[1]}}
        packed = pack(self.torch, state)
        self.saver.save(loop.index, packed, {"surroundings": self._surroundings(), "inexact": self._why_not_exact(),
                                             "tuned": loop.plan.to_toml() if loop.tuned is not None else None})

    def _why_not_exact(self) -> list[str]:
        loop = self.loop
        found = [*self._inexact, *self.reading.inexact]
        if loop.sizing:
            found.append("sizes of micro-batches were still tried out when it was saved")
        if loop.tuning:
            found.append("levers were still tried out when it was saved")
        levers = [lever for choice in loop.plan if (lever := LEVERS.get(choice.name)) is not None]
        found += [f"the lever {lever.name} acts from the second step on, and rounds otherwise than the first" for lever in levers
                  if lever.effect is not Effect.EXACT and lever.moment not in (Moment.PROCESS, Moment.LOADER)]
        if self.reading.workers and any(lever.moment is Moment.LOADER for lever in levers):
            found.append("levers of the plan make the batches, and what loader workers draw for them is not known")
        return list(dict.fromkeys(found))

    def _surroundings(self) -> dict[str, Any]:
        script = _digest_of_script()
        return surroundings(self.torch, {**self.settings, "plan": self.loop.plan.describe(), **({"script": script} if script else {})})

    def _say(self, sentence: str) -> None:
        LOGGER.warning(sentence)

    def _last_words(self) -> str:
        last = self.saver.last
        kept = last is not None and last.step == self.loop.index
        return f"all of it is in {last.path}" if kept and last is not None else "could not be saved; see above"


def _digest_of_script() -> str | None:
    """Of the program's main file; None in a notebook."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else None
    except OSError:
        return None


def _not_finite(torch: Any, packed: Packed, parameters: set[str]) -> str:
    """A spoiled model is not written over a good one."""
    for name, tensor in packed.tensors.items():
        if (name in parameters or name.startswith("precision.masters")) and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    return ""
