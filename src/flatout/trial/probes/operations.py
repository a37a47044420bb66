"""A probe that runs torch's profiler, with the line of each operator."""

from __future__ import annotations

from typing import Any

from flatout.agent.frames import location_parts, place_at
from flatout.agent.lines import OperatorLines
from flatout.measure.clock import HostClock
from flatout.measure.operations import ProfilerRecording
from flatout.trial.probes.probe import Probe


class OperationsProbe(Probe):
    """Runs torch's profiler for ``active`` ticks, after ``wait`` undisturbed and ``warmup`` discarded ones.

    One tick before them records the lines of the operators. The profiler's own stacks are off: started in the
    middle of a step, as here, it takes half a minute to stop (torch 2.14), and it names functions instead of
    lines.
    """

    def begin(self) -> None:
        wait, warmup, self.active = (int(n) for n in self.requested["schedule"])
        self.ticks = 1 + wait + warmup + self.active
        profiler = self.torch.profiler
        self.profile = profiler.profile(
            activities=self.tools.activities(),
            schedule=profiler.schedule(wait=wait, warmup=warmup, active=self.active, repeat=1),
            on_trace_ready=self._on_trace,
            record_shapes=True,
            profile_memory=True,
        )
        self.recorded: dict[str, Any] = {}
        self.started = False
        self.lines = OperatorLines(self.torch, self.ledger, HostClock.mark)
        if not self.context.compiled_by_script:  # compilers do not compile under a dispatch mode
            self.lines.install()

    def tick(self) -> None:
        if self.started:
            self.profile.step()
        else:
            self.ledger.restore()
            self.started = True
            self.profile.start()
            self.ledger.on_restore("profiler", self.profile.stop)

    def _on_trace(self, profile: Any) -> None:
        trace = self.requested.get("trace")
        if trace:
            with self.tools.real_files():
                profile.export_chrome_trace(trace)
        lines = {
            key: [location_parts(line) if line is not None else None for line in found]
            for key, found in self.lines.by_operator.items()
        }
        recorded = ProfilerRecording(
            profile.profiler.kineto_results.events(), self.active, lines, place_at
        ).summarise()
        self.recorded = {
            "operations": [operation.to_json() for operation in recorded.operations],
            "operators": recorded.operators / self.active,
            "operators_ms": recorded.operators_ns / 1e6 / self.active,
            "python_share": recorded.python_share,
            "busy_ms": None if recorded.busy_ns is None else recorded.busy_ns / 1e6 / self.active,
            "device_ms": {work: ns / 1e6 / self.active for work, ns in recorded.device_ns.items()},
            "gaps": [gap.to_json() for gap in recorded.gaps],
        }

    def end(self) -> dict[str, Any]:
        super().end()
        return self.recorded
