"""`incidents.jsonl`: the incidents of a supervised program, one JSON object per line.

If the file cannot be written, a single message says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from flatout.job.sanitize import harmless
from flatout.launch.restart_policy import Incident


class IncidentLog:
    """The incident log, created at the first incident. ``written`` counts its lines."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.say = path, say
        self.written = 0
        self._refused = False

    def write(self, incident: Incident) -> None:
        line = harmless(json.dumps(incident.to_json())) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
            self.written += 1
        except OSError as error:
            if not self._refused:
                self._refused = True
                self.say(
                    f"{self.path} cannot be written ({error.strerror}), so incidents are shown here but not saved. The program is not affected."
                )
