"""Suppresses output and blocks network connections during a replay.

The script must not repeat what it has done outside itself, and must not get new answers from the network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from flatout.agent.frames import is_user_file
from flatout.agent.ledger import Ledger

LOCAL_ADDRESSES = ("127.", "::1", "localhost")


class MutedIO:
    """Mutes output until `stop`.

    ``show_output``: output is shown again. ``refuse`` is called when the script connects to another machine; it
    does not return.
    """

    def __init__(self, refuse: Callable[[str], NoReturn], show_output: bool) -> None:
        self.refuse, self.muted = refuse, True
        self._ledger = Ledger()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not show_output:
                self._ledger.set(stream, "write", self._wrap_stream(stream.write), new=True)
        if not show_output:
            self._ledger.set(os, "write", self._wrap_os_write(os.write))
        sockets = sys.modules.get("socket")
        if sockets is not None:
            self._ledger.set(sockets.socket, "connect", self._wrap_connect(sockets.socket.connect))

    def stop(self) -> None:
        self.muted = False  # for code that holds a patched function
        self._ledger.restore()

    def _wrap_stream(self, write: Callable[[str], int]) -> Callable[[str], int]:
        return lambda text: len(text) if self.muted else write(text)

    def _wrap_os_write(self, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def written(handle: int, data: Any) -> int:
            silent = self.muted and handle in (1, 2) and is_user_file(sys._getframe(1).f_code.co_filename)
            return len(data) if silent else write(handle, data)

        return written

    def _wrap_connect(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        def connect_here(socket: object, address: object) -> Any:
            if self.muted and isinstance(address, tuple) and not str(address[0]).startswith(LOCAL_ADDRESSES):
                self.refuse(
                    f"the script connects to {address[0]} over the network, and the answer may differ from the first run"
                )
            return connect(socket, address)

        return connect_here
