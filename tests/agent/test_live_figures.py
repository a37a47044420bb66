"""How busy the GPU is, from a driver that answers and from others."""

from types import SimpleNamespace

import pytest

from flatout.agent import live_figures
from flatout.agent.live_figures import LiveFigures


class Nvml:
    """A management library whose second GPU is busy for 37 % of the time."""

    def __init__(self, status=0):
        self.status = status

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == b"GPU-second" else 6

    def nvmlDeviceGetUtilizationRates(self, handle, percent):
        percent[:] = 37, 12
        return self.status


@pytest.mark.parametrize(("nvml", "busy"), [(Nvml(), 0.37), (Nvml(3), None), (SimpleNamespace(), None)])
def test_the_load_is_that_of_the_gpu_in_use(monkeypatch, nvml, busy):
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda device: device,
        max_memory_allocated=lambda device: 1 + device,
        get_device_properties=lambda device: SimpleNamespace(uuid=("first", "second")[device]),
    )
    monkeypatch.setattr(live_figures.ctypes, "CDLL", lambda name: nvml)
    figures = LiveFigures(SimpleNamespace(cuda=cuda), None)
    assert figures.sample() == figures.gpu_busy == busy
    assert figures.memory_bytes == 3
