"""The clock of a CUDA device, on a stand-in whose events know their stream and can be read only
after a wait.
"""

from types import SimpleNamespace

import pytest

from flatout.measure.clock import clock_for


class Device:
    type = "cuda"

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name


FIRST, SECOND = Device("cuda:0"), Device("cuda:1")


def cuda():
    """Like torch.cuda: the current device is the first."""

    class Event:
        def __init__(self, enable_timing=False):
            self.stream, self.timed, self.done = None, enable_timing, False

        def record(self, stream=None):
            self.stream = stream or f"stream of {FIRST}"

        def synchronize(self):
            self.done = True

        def elapsed_time(self, end):
            if not end.done:
                raise RuntimeError("CUDA error: device not ready")
            if self.stream != end.stream:
                raise RuntimeError("events of different devices")
            return 1.5

    waited = []
    found = SimpleNamespace(
        Event=Event, waited=waited, current_stream=lambda device=None: f"stream of {device or FIRST}"
    )
    found.synchronize = lambda device=None: waited.append(device or FIRST)
    return found


@pytest.mark.parametrize("device", [FIRST, SECOND])
def test_time_is_that_of_the_stream_of_the_models_device(device):
    stand_in = cuda()
    clock = clock_for(SimpleNamespace(cuda=stand_in), device)
    start, end = clock.mark(), clock.mark()
    assert start.stream == end.stream == f"stream of {device}"
    assert clock.elapsed_ms(start, end) == 1.5
    clock.synchronize()
    assert stand_in.waited == [device]


def test_a_profile_that_replaces_the_programs_waits_leaves_the_clock_its_own():
    stand_in = cuda()
    clock = clock_for(SimpleNamespace(cuda=stand_in), "cuda")
    counted = []
    stand_in.Event.synchronize = lambda self: counted.append(self)  # it no longer waits
    stand_in.synchronize = lambda device=None: counted.append(device)
    assert clock.elapsed_ms(clock.mark(), clock.mark()) == 1.5
    clock.synchronize()
    assert (counted, stand_in.waited) == ([], [FIRST])
