"""The connection between a trial's worker and its parent: one JSON value a line over a local socket."""

from __future__ import annotations

import json
import socket
from typing import Any


class Hangup(Exception):
    """The other side closed the connection."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    @classmethod
    def connect(cls, address: str) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Hangup(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises TimeoutError, or Hangup if the connection is closed."""
        self._socket.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise Hangup(str(error)) from error
            if not data:
                raise Hangup("the program closed the connection")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()
