"""The part of a trial outside the program: starts it, sends one command at a time, and takes its record."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.agent.applier import before_start
from flatout.agent.bootstrap import notify
from flatout.agent.file_sandbox import ESCAPED, FILES_VARIABLE
from flatout.agent.overlay import Overlay
from flatout.job.folder import TrialFolder, read_json, write_json
from flatout.job.temporary import remove, temporary
from flatout.launch.command import Command, EntryWatch, check_measurable
from flatout.launch.environment import ENTERED, OFFLINE_TRACKERS, compiler_cache, job_environment
from flatout.launch.process import ProgramRun
from flatout.measure.clock import seconds
from flatout.schema.errors import StorageError, TrialFailed
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import TrialRecord
from flatout.trial import leaks
from flatout.trial.channel import Channel, Hangup
from flatout.trial.spec import DEFAULT_OPTIONS, TrialOptions, TrialSpec, levers

POLL_S = 0.2
MAX_TMPDIR_BYTES = 55  # bytes of TMPDIR: a socket path is limited to 107
NEVER_TRAINED = "it did not finish a training step"


class ProgramGone(Exception):
    """The program ended, died or hung before it answered; ``record`` says how."""

    def __init__(self, record: TrialRecord) -> None:
        super().__init__(record.reason)
        self.record = record


class Trial:
    """One run of the program. Use it as a context manager, which always ends the process group."""

    def __init__(
        self,
        command: Command,
        folder: TrialFolder,
        plan: Plan,
        facts: Facts,
        options: TrialOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.command, self.folder, self.plan, self.facts, self.options = command, folder, plan, facts, options
        self.ready: dict[str, Any] = {}
        self.training = False  # a process of it has finished its first backward pass
        self.attached = False  # a process of it has imported torch
        self.started_s = 0.0
        self.ticks_done = 0  # since the program began to train
        self.core: int | None = None  # on which the last ticks ended
        self.stopped_s = 0.0  # when they ended
        long_path = len(os.fsencode(tempfile.gettempdir())) > MAX_TMPDIR_BYTES
        self._short_folder = temporary("t", in_memory=long_path)
        self._files = folder.files.absolute()
        self._temporary = (
            folder.files if long_path else self._short_folder
        ) / "tmp"  # of the program; not in memory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channels: list[Channel] = []
        self._main: Channel | None = None
        self._held: list[Channel] = []  # to processes of it that wait for the plan
        self._released = not options.hold
        self._program: ProgramRun | None = None
        self._watch: EntryWatch | None = None
        self._record: TrialRecord | None = None

    def __enter__(self) -> Trial:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Trial:
        """Start the program. Raises NothingMeasured if it cannot be measured."""
        check_measurable(self.command)
        try:
            address = self._short_folder / "baton"
            self._listener.bind(str(address))
            self._listener.listen(64)
            self._listener.settimeout(0)
            spec = TrialSpec(
                **vars(self.options),
                folder=str(self.folder.path.resolve()),
                address=str(address),
                plan=self.plan,
                facts=self.facts,
            )
            write_json(self.folder.spec, spec.to_json())
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"cannot prepare a trial in {self.folder.path}: {error.strerror}") from None
        files = {
            FILES_VARIABLE: str(self._files),
            "TMPDIR": str(self._temporary),
            "WANDB_DIR": str(self._temporary),
        }
        variables = {
            **OFFLINE_TRACKERS,
            **files,
            **_process_environment(self.plan, self.facts, self.options.table),
        }
        base = {**os.environ, **dict(self.command.environment)}
        if self.options.seed is not None and "PYTHONHASHSEED" not in base:
            variables["PYTHONHASHSEED"] = str(self.options.seed)
        environment = job_environment(self.folder.spec.resolve(), variables, base=base)
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", compiler_cache())
        self._watch = EntryWatch(Path(environment[ENTERED]))
        self.started_s = seconds()
        self._program = ProgramRun(
            self.command.argv,
            environment,
            self.folder.stdout,
            self.folder.stderr,
            self.options.show,
            self.command.folder,
        )
        return self

    # -- commands

    def wait_ready(self, deadline_s: float) -> dict[str, Any]:
        """Wait until the program has trained its first steps and is warm.

        Raises ProgramGone if it never is.
        """
        while not self.is_ready(deadline_s):
            pass
        return self.ready

    def is_ready(self, deadline_s: float, wait_s: float = POLL_S) -> bool:
        """Wait up to ``wait_s`` for the program to be warm.

        Raises ProgramGone if it ends first, or is not warm by ``deadline_s``.
        """
        message = self._next_message(deadline_s, NEVER_TRAINED, wait_s)
        if message is None:
            return False
        self.ready = message
        self.ticks_done = message["ticks"]
        return True

    def poll(self, deadline_s: float) -> dict[str, Any] | None:
        """The next message of a program that sends them unasked, if one comes soon.

        Raises ProgramGone if it ended, or after ``deadline_s``.
        """
        return self._next_message(deadline_s, "it did not end", POLL_S)

    @property
    def held(self) -> bool:
        """Whether the program waits for its plan."""
        return bool(self._held) and not self._released

    def release(self, plan: Plan) -> None:
        """Give a held program its plan; what acts before a program starts cannot change any more."""
        self.plan, self._released = plan, True
        self._send_plan()

    def _send_plan(self) -> None:
        while self._released and self._held:
            try:
                self._held.pop().send({"do": "plan", "plan": self.plan.to_json()})
            except Hangup:
                continue  # that process ended; the next message says how

    def ask(self, command: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a command and wait for the answer; the program may run only until then."""
        assert self._main is not None
        assert self._program is not None
        self._program.resume()
        try:
            self._main.send(command)
        except Hangup:
            raise ProgramGone(self._end_record()) from None
        return self._receive(deadline_s, f"it did not answer in time ({command['do']})")

    def pause(self, rescan: bool = False) -> None:
        if self._program is not None:
            self._program.stop(rescan)

    def resume(self) -> None:
        """Let the program run freely while it starts or compiles."""
        if self._program is not None:
            self._program.resume()

    def run_ticks(
        self, ticks: int, deadline_s: float, max_s: float = 1e9, core: int | None = None
    ) -> list[float]:
        """Run ``ticks`` ticks and return the milliseconds of each; the program is paused before and after.

        After ``max_s`` it returns fewer ticks, but at least one. ``core``: begin on it (measure/cores.py).
        """
        answer = self.ask({"do": "run", "ticks": ticks, "seconds": max_s, "core": core}, deadline_s)
        self.pause()
        self.stopped_s = seconds()
        times: list[float] = answer["ms"]
        self.core = answer["core"]
        self.ticks_done += len(times)
        return times

    def switch(self, choices: Sequence[Choice], deadline_s: float) -> dict[str, Any]:
        answer = self.ask({"do": "switch", "choices": [c.to_json() for c in choices]}, deadline_s)
        self.ticks_done += answer["ticks"]
        return answer

    def run_probe(self, probe: str, deadline_s: float, **requested: object) -> dict[str, Any]:
        """Run some ticks with a probe of ``trial.probes``.

        Returns its results with the ticks' milliseconds as ``ms``, or ``why_not``. Some probes also report
        when the program fails; then ``failed`` has the error.
        """
        answer = self.ask({"do": "probe", "probe": probe, **requested}, deadline_s)
        self.pause()
        self.ticks_done += len(answer.get("ms", ()))
        return answer

    def finish(self, deadline_s: float | None = None, fetch_samples: bool = False) -> TrialRecord:
        """Stop the program and take its record.

        ``fetch_samples``: first fetch a few samples repeatedly, for the guard.
        """
        if self._record is None:
            try:
                answer = self.ask(
                    {"do": "finish", "fetch_samples": fetch_samples}, deadline_s or seconds() + 60
                )
            except ProgramGone as gone:
                self._record = gone.record
            else:
                assert self._program is not None
                # A launcher must not notice that its rank has stopped: it and the other ranks would report a
                # failure.
                direct = answer.get("pid") == self._program.process.pid
                self._record = self._read_record(self._program.end() if direct else self._program.end(0.0))
        return self._record

    def close(self) -> None:
        if self._program is not None:
            self._program.end(0.0)
        if self._watch is not None:
            self._watch.close()
        for channel in self._channels:
            channel.close()
        self._listener.close()
        for folder in (self._short_folder, self._files):
            remove(folder)
        if self._program is not None:
            root = os.path.realpath(self.command.folder or os.curdir)
            if changes := leaks.describe_changes(
                root, self.folder.spec.stat().st_ctime_ns, Overlay(str(self._files))
            ):
                notify(changes)

    # -- messages

    def _receive(self, deadline_s: float, reason: str) -> dict[str, Any]:
        while True:
            message = self._next_message(deadline_s, reason, POLL_S)
            if message is not None:
                return message

    def _next_message(self, deadline_s: float, reason: str, wait_s: float) -> dict[str, Any] | None:
        """The next message; None if none came within ``wait_s``.

        Raises ProgramGone, also after ``deadline_s``.
        """
        assert self._program is not None
        self._accept()
        for channel in [self._main] if self._main else list(self._channels):
            try:
                message = channel.receive(wait_s if channel is self._main else 0.01)
            except TimeoutError:
                continue
            except Hangup:
                self._channels.remove(channel)
                if channel is self._main:
                    raise ProgramGone(self._end_record()) from None
                continue
            if "training" in message:
                self.training = True
            elif "held" in message:
                self._held.append(channel)
                self._send_plan()
            elif "attached" not in message:
                self._main = channel
                return message
        if (self._files / ESCAPED).exists():
            self._program.end(0.0)
            change = (self._files / ESCAPED).read_text(encoding="utf-8", errors="replace")
            why = f"it was stopped before it changed a file of yours, which flatout could not keep apart: {change}"
            raise ProgramGone(self._write_end("failed", why))
        if self._program.exit_code is not None:
            self._accept()
            raise ProgramGone(self._end_record())
        assert self._watch is not None
        if not self.attached and self._watch.is_decided(self._program.process.pid) and self._watch.cause:
            self._program.end(0.0)
            raise ProgramGone(self._write_end("unattached", self._watch.cause))
        if seconds() > deadline_s:
            self._program.end(0.0)
            why = f"{reason} within {seconds() - self.started_s:.0f} s and was ended"
            raise ProgramGone(self._write_end("hung", why))
        if not self._channels:
            try:
                self._listener.settimeout(wait_s)
                self._accept(blocking=True)
            finally:
                self._listener.settimeout(0)
        return None

    def _accept(self, blocking: bool = False) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, TimeoutError):
                return
            self._channels.append(Channel(connection))
            self.attached = True
            if blocking:
                return

    # -- records

    def _end_record(self) -> TrialRecord:
        assert self._program is not None
        code = self._program.end(10.0)
        return self._read_record(code)

    def _read_record(self, code: int | None) -> TrialRecord:
        data = read_json(self.folder.result)
        if data is None:
            if self.attached and not code and not self.folder.claim.exists():
                return self._write_end("ended", "the program ended without a training step", code)
            if self.attached:
                killed = code is not None and code < 0
                ending = f"was killed by signal {-(code or 0)}" if killed else f"left with exit code {code}"
                return self._write_end(
                    "failed" if code else "ended",
                    f"the program {ending} without a message (sys.exit, os._exit, or a crash below Python)",
                    code,
                )
            why = (
                self._watch.cause_at_end() if self._watch else ""
            ) or "no Python process of it imported torch"
            return self._write_end("failed" if code else "unattached", why, code)
        record = TrialRecord.from_json(data)
        record.exit_code = code
        if record.status == "ended" and code:
            record.status, record.reason = "failed", f"the program left with exit code {code}"
        record.log_tail = self.log_tail()
        write_json(self.folder.result, record.to_json())
        return record

    def _write_end(self, status: str, reason: str, code: int | None = None) -> TrialRecord:
        record = TrialRecord(
            status=status,
            reason=reason,
            exit_code=code,
            seed=self.options.seed,
            plan=self.plan.to_json(),
            log_tail=self.log_tail(),
        )
        write_json(self.folder.result, record.to_json())
        return record

    def log_tail(self) -> str:
        """The last output of the program: stderr, or stdout if stderr is empty."""
        if self._program is None:
            return ""
        text = self._program.err.content() or self._program.out.content()
        return text[-6000:].decode("utf-8", "replace")


def measure(trial: Trial, steps: int, deadline_s: float, fetch_samples: bool = False) -> TrialRecord:
    """Run a plain trial: warm up, run ``steps`` ticks, finish.

    A program that ends earlier returns what it has.
    """
    try:
        trial.wait_ready(deadline_s)
        # A slow program returns the steps it completed in time.
        trial.ask(
            {"do": "run", "ticks": steps, "seconds": max(0.1, 0.95 * (deadline_s - seconds()))}, deadline_s
        )
    except ProgramGone as gone:
        return gone.record
    return trial.finish(deadline_s, fetch_samples)


def _process_environment(plan: Plan, facts: Facts, table: str) -> dict[str, str]:
    """The variables for the PROCESS levers of a Plan.

    Raises TrialFailed for a lever that does not apply here: the trial would measure another plan.
    """
    variables, outcomes = before_start(levers(table), plan, facts, check_machine=False)
    for outcome in outcomes:
        choice = outcome.choice
        if not outcome.applied:
            raise TrialFailed(
                f"{choice.name} = {choice.value!r} cannot be applied: {outcome.reason}. Run `flatout tune` again on this machine."
            )
    return variables
