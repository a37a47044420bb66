"""Figures of a running program between two moments, from the counters of its steps and from the machine."""

import ctypes
import resource
import threading
from collections.abc import Callable
from types import ModuleType

from flatout.agent.heartbeat import StepCounters
from flatout.measure.clock import seconds
from flatout.measure.cores import usable_cores

Reading = tuple[float, int, int, float]  # seconds, steps, nanoseconds of waiting for data, CPU seconds


class LiveFigures:
    """``gpu_busy`` is the mean share of the samples that ``sample`` took through NVML; None without a GPU or NVML."""

    def __init__(self, torch: ModuleType, counts: StepCounters) -> None:
        self.torch, self.counts = torch, counts
        self.cores = usable_cores()
        self._gpu_samples: list[float] = []
        self._no_nvml = False

    def now(self) -> Reading:
        # CPU seconds: of this process and of its loader workers that have ended
        cpu_s = sum(
            sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return seconds(), self.counts.steps, self.counts.waited_ns, cpu_s

    def between(self, start: Reading, end: Reading) -> dict[str, float | None]:
        """Return the live figures (`schema/run_request.py`, LIVE)."""
        elapsed_s, steps, waited_ns, cpu_s = (new - old for new, old in zip(end, start, strict=True))
        elapsed_s = max(elapsed_s, 1e-9)
        return {
            "steps_per_s": steps / elapsed_s,
            "samples_per_s": steps * self.counts.samples_a_step / elapsed_s or None,
            "data_wait": min(1.0, waited_ns / 1e9 / elapsed_s),
            "cores_used": cpu_s / elapsed_s,
            "memory_bytes": self.memory_bytes,
            "gpu_busy": self.sample(),
        }

    @property
    def on_cuda(self) -> bool:
        return bool(self.torch.cuda.is_initialized())

    @property
    def memory_bytes(self) -> int:
        """The peak memory of the devices together, or of the process."""
        if self.on_cuda:
            cuda = self.torch.cuda
            return sum(map(cuda.max_memory_allocated, range(cuda.device_count())))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @property
    def gpu_busy(self) -> float | None:
        return sum(self._gpu_samples) / len(self._gpu_samples) if self._gpu_samples else None

    def sample(self) -> float | None:
        """Return how busy the GPU with most of the tensors is now. Other programs count, too."""
        if self._no_nvml or not self.on_cuda:
            return None
        try:
            self._gpu_samples.append(self._utilization() / 100)
        except Exception:  # no NVML, or a driver that does not tell
            self._no_nvml = True
            return None
        return self._gpu_samples[-1]

    def _utilization(self) -> int:
        """Ask NVML: torch does it through a package that is seldom installed, and for the current device."""
        cuda, handle, percent = self.torch.cuda, ctypes.c_void_p(), (ctypes.c_uint * 2)()  # GPU, memory
        used = max(range(cuda.device_count()), key=cuda.memory_allocated)
        nvml, uuid = ctypes.CDLL("libnvidia-ml.so.1"), f"GPU-{cuda.get_device_properties(used).uuid}".encode()
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        if failed or nvml.nvmlDeviceGetUtilizationRates(handle, percent):
            raise OSError("NVML does not tell")
        return percent[0]


class PeriodicThread:
    """Calls a function at intervals in a daemon thread, until it is stopped or the function raises OSError."""

    def __init__(self, every_s: float, call: Callable[[], object], name: str) -> None:
        self._every_s, self._call = every_s, call
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._every_s):
                self._call()
        except (OSError, ValueError):
            return  # the stream is closed, or the disk full; the program continues

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2)
