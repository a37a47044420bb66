"""One comparison of a search, run on a cluster node. `flatout tune --ray` starts it; it is not a command.

It reads the comparison's description from a file and writes the result to another."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from flatout.job.folder import write_json
from flatout.probe.machine import look
from flatout.schema.errors import FlatoutError
from flatout.tune.remote_worker import hold


def main() -> int:
    order, answer = Path(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        write_json(answer, hold(json.loads(order.read_text(encoding="utf-8")), look()))
    except FlatoutError as error:
        sys.stderr.write(f"{str(error).splitlines()[0]}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
