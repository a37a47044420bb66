"""Leaves the record of a run at its end, and shows it in a box; on request also live figures for trackers.

A run without a plan is only counted (`count`): the two hooks of `StepCounters`, and nothing else. Live figures
are lines of a file, which another process reads (`flatout.export`), so a tracker cannot slow the training.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from flatout import __version__
from flatout.agent.bootstrap import notify, show
from flatout.agent.compilers import compile_record
from flatout.agent.heartbeat import StepCounters, counters
from flatout.agent.live_figures import LiveFigures, PeriodicThread
from flatout.job.claims import REPORT, SUMMARY, claim
from flatout.job.folder import JobFolder, write_json
from flatout.job.rank_environment import rank_number, this_rank
from flatout.schema.errors import StorageError, first_line
from flatout.schema.facts import untested_torch
from flatout.schema.findings import Finding
from flatout.schema.run_request import EXPORT_FAILED, LIVE_FIGURES, RunSummary, SummaryRequest

GPU_EVERY_S = 5.0
FINDINGS: list[Finding] = []  # of the checks of this run (flatout.diagnose.run_checks)
MAX_LOG_BYTES = 1 << 20


def count(job: dict[str, Any]) -> None:
    """Count a run without levers. The bootstrap calls this right after ``import torch``."""
    import torch

    if (sentence := untested_torch(str(torch.__version__))) and claim(os.environ["FLATOUT_JOB"] + REPORT):
        notify(sentence)
    Summarizer(SummaryRequest.from_json(job["summary"]), {}, counters(torch), torch)


class Summarizer:
    """Writes the record when the process exits, if it trained."""

    def __init__(
        self,
        request: SummaryRequest,
        plan: dict[str, Any],
        counts: StepCounters,
        torch: ModuleType,
        real_files: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``real_files``: inside, files are the user's, and not the private copies of a rank."""
        self.real_files = real_files
        self.request, self.plan, self.counts, self.torch = request, plan, counts, torch
        self.pid = os.getpid()
        try:
            self.folder = os.getcwd()
        except FileNotFoundError:  # it was removed
            self.folder = ""
        self.figures = LiveFigures(torch, counts)
        self.live_file: TextIO | None = None
        self.start = self.latest = self.figures.now()
        self.sampler_thread: PeriodicThread | None = None
        self.closed = False
        counts.on_first_step = self._start_thread
        atexit.register(self.close)

    def _start_thread(self) -> None:
        if self.request.every_s or self.figures.on_cuda:
            every_s = self.request.every_s or GPU_EVERY_S
            self.sampler_thread = PeriodicThread(every_s, self._sample, "flatout-summary")

    # -- live figures

    def _sample(self) -> None:
        if self.request.every_s:
            self._write_live()
        else:
            self.figures.sample()

    def _write_live(self) -> None:
        now = self.figures.now()
        if now[1] == self.latest[1]:
            return
        figures = self.figures.between(self.latest, now)
        self.latest = now
        self._append_line(
            {"step": now[1], "seconds": now[0], **{name: figures[name] for name in LIVE_FIGURES}}
        )

    def _append_line(self, data: dict[str, Any]) -> None:
        try:
            with self.real_files():
                if self.live_file is None:
                    path = self._path(f"rank{rank_number()}.jsonl")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self.live_file = path.open("a", encoding="utf-8", buffering=1)
                self.live_file.write(json.dumps(data) + "\n")
        except (OSError, ValueError):
            self.request = SummaryRequest(**{**vars(self.request), "every_s": 0.0})  # the disk is full

    # -- the end

    def close(self) -> None:
        """Write and show the record. Does nothing in a forked process."""
        if os.getpid() != self.pid or self.closed:
            return
        self.closed = True
        if self.sampler_thread is not None:
            self.sampler_thread.stop()
        if self.counts.last_ns <= self.counts.first_ns:
            return
        record = self.record()
        if self.request.every_s:
            self._write_live()
            self._append_line({"end": record.to_json()})
        try:
            with self.real_files():
                # It has a .gitignore, and is only written if it is trusted
                JobFolder(Path(self.request.folder).parent).make()
                path = self._free_path(record.rank)
                write_json(path, record.to_json())
                written_to = min(os.path.relpath(path), str(path), key=len)
        except (OSError, StorageError) as error:
            written_to = f"not written: {first_line(error)}"
        if (
            self.request.print_summary
            and record.rank == 0
            and claim(os.environ.get("FLATOUT_JOB", "") + SUMMARY)
        ):
            from flatout.render.run_box import box

            show(box(record, written_to, self._failed_trackers()))
        if record.exit_reason == KeyboardInterrupt.__name__:
            _end_as_interrupted()

    def _failed_trackers(self) -> dict[str, str]:
        failures = {}
        for log in sorted(self._path("").glob("*.log")):
            try:
                with log.open("rb") as file:
                    lines = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
            except OSError:
                continue
            reported = [line.removeprefix(EXPORT_FAILED) for line in lines if line.startswith(EXPORT_FAILED)]
            if reported:
                failures[log.stem] = reported[0]
        return failures

    def _path(self, name: str) -> Path:
        return Path(self.request.folder) / self.request.name / name

    def _free_path(self, rank: int) -> Path:
        number = 1
        while (path := self._path(f"rank{rank}{'' if number == 1 else f'-{number}'}.json")).exists():
            number += 1
        return path

    def record(self) -> RunSummary:
        counts, rank_env = self.counts, this_rank()
        elapsed_s = max((counts.last_ns - counts.first_ns) / 1e9, 1e-9)
        steps_per_s = (counts.steps - counts.first_step) / elapsed_s
        figures = self.figures.between(self.start, self.figures.now())
        return RunSummary(
            list(self.request.command),
            self.folder,
            created=self.request.created,
            status="done",
            device="cuda" if self.figures.on_cuda else "cpu",
            versions={"python": sys.version.split()[0], "torch": str(self.torch.__version__)},
            untested=untested_torch(str(self.torch.__version__)),
            machine=self.request.machine,
            rank=rank_number(),
            world_size=rank_env.world_size
            if rank_env is not None
            else int(os.environ.get("WORLD_SIZE") or 1),
            plan=self.plan,
            flatout=__version__,
            exit_reason=getattr(
                getattr(sys, "last_type", None), "__name__", "ended"
            ),  # of an uncaught exception
            steps=counts.steps,
            seconds=elapsed_s,
            steps_per_s=steps_per_s,
            samples_per_s=steps_per_s * counts.samples_a_step or None,
            data_wait=min(1.0, counts.waited_ns / 1e9 / elapsed_s),
            cores_used=figures["cores_used"] or 0.0,
            cores=self.figures.cores,
            peak_memory_bytes=self.figures.memory_bytes,
            gpu_busy=self.figures.gpu_busy,
            piped=self.request.piped,
            compiled=compile_record(),
            findings=list(FINDINGS),
        )


def _end_as_interrupted() -> None:
    """Let Python end by SIGINT, as it does after Ctrl-C.

    It then looks at a flag that each ``exec`` of a text clears, and what runs at exit may import modules that do
    so (dataclasses). An ``exec`` that ends by KeyboardInterrupt sets it again.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
