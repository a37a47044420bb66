"""Signals are observed before the program's own handlers, which it sets and reads as usual.

These are real signals, in this process.
"""

import os
import signal
from pathlib import Path

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.signals import OBSERVED_SIGNALS, Signals


@pytest.fixture
def stand():
    """``signals, observed = stand(answer)``; everything is restored when the test ends."""
    ledger, before, original = Ledger(), {}, {number: signal.getsignal(number) for number in OBSERVED_SIGNALS}

    def install(passes=True):
        observed = []
        before.update((number, signal.getsignal(number)) for number in OBSERVED_SIGNALS)
        signals = Signals(lambda number: (observed.append(number), passes)[1])
        assert signals.install(ledger)
        return signals, observed

    yield install
    ledger.restore()
    after = {number: signal.getsignal(number) for number in OBSERVED_SIGNALS}
    for number, handler in original.items():
        signal.signal(number, handler)
    assert after == before


def test_the_program_does_not_see_the_observer(stand):
    before = signal.getsignal(signal.SIGTERM)
    _, observed = stand()
    calls = []

    def mine(number, frame):
        calls.append((number, frame is not None))

    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.signal(signal.SIGTERM, mine) is before
    assert signal.getsignal(signal.SIGTERM) is mine
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == [(signal.SIGTERM, True)]
    assert observed == [signal.SIGTERM]
    with pytest.raises(TypeError):
        signal.signal(signal.SIGTERM, "no handler")
    assert signal.signal(signal.SIGTERM, before) is mine
    usr2 = signal.signal(signal.SIGUSR2, mine)  # not one that flatout observes
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (len(calls), len(observed)) == (2, 1)
    assert signal.signal(signal.SIGUSR2, usr2) is mine


def test_ignored_signals_stay_ignored(stand):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _, observed = stand()
    os.kill(os.getpid(), signal.SIGHUP)
    assert observed == []
    calls = []
    assert signal.signal(signal.SIGHUP, lambda *what: calls.append(what)) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGHUP)
    assert (len(calls), observed) == (1, [signal.SIGHUP])
    assert callable(signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.kill(os.getpid(), signal.SIGHUP)
    assert (len(calls), len(observed)) == (1, 1)


def test_a_handler_that_raises_and_one_that_waits(stand):
    signals, observed = stand(passes=False)

    def raises(number, frame):
        raise TimeoutError("mine")

    before = signal.signal(signal.SIGUSR1, raises)
    os.kill(os.getpid(), signal.SIGUSR1)  # held back
    assert observed == [signal.SIGUSR1]
    with pytest.raises(TimeoutError, match="mine"):
        signals.pass_on(signal.SIGUSR1)
    assert signal.signal(signal.SIGUSR1, before) is raises


def test_an_earlier_wrapper_of_the_function_is_found(stand):
    """That wrapper bypasses flatout.

    It finds flatout's handler where no handler existed, and is observed after the next lookup. This makes no
    cycle.
    """
    raw, calls = signal.signal, []
    signals, observed = stand()
    beneath = raw(signal.SIGUSR1, lambda number, frame: (calls.append(number), beneath(number, frame)))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (calls, len(observed)) == ([signal.SIGUSR1], 1), "and this process is still running"
    signals.recheck()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (len(calls), len(observed)) == (2, 2)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.processes
def test_a_child_has_the_programs_own_handlers(stand):
    """This holds for the kernel too: a loader worker that waits in C must end by the signal itself."""
    stand()
    child = os.fork()
    if not child:
        caught = int(
            next(
                line
                for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("SigCgt")
            ).split()[1],
            16,
        )
        os._exit(caught >> (signal.SIGTERM - 1) & 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
