"""SIGTERM ends a command in the same way as Ctrl-C: the programs are stopped, and what was measured is kept."""

import signal


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


def stop_on_sigterm() -> None:
    """Raise Terminated in the main thread when SIGTERM arrives."""

    def stop(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
