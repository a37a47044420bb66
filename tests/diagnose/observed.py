"""Observes programs, each in a fork of one process that has imported torch. Reads paths and steps as JSON, prints findings.

The observer, the invariants and the programs are real; only the start of Python and of torch is shared. A program of
several ranks runs as two, and rank 0 answers.
"""

import contextlib
import io
import json
import os
import socket
import sys
import traceback
import types
from pathlib import Path


class Stop(BaseException):
    """Ends a program after its steps."""


def observed(path, steps):
    """The findings of the program at ``path``, the invariants that failed, and its error; "" without one."""
    import torch

    from flatout.diagnose.observer import Observer
    from flatout.diagnose.rules import TABLE

    observer = Observer(torch, [rule.invariant for rule in TABLE if rule.invariant is not None])
    torch.manual_seed(0)
    if steps:
        stop_after(observer, steps)
    sys.argv, error = [path], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    os.chdir(os.path.dirname(path))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(Path(path).read_text(), path, "exec"), main.__dict__)
    except (Stop, SystemExit):
        pass
    except Exception:
        error = traceback.format_exc()
    findings = [finding.to_json() for finding in observer.findings()]
    return {"findings": findings, "failed": observer.failed, "error": error}


def stop_after(observer, steps):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stop(*_):
        if observer.program.steps >= steps:
            raise Stop

    register_optimizer_step_post_hook(stop)


def serve():
    import torch
    import torch._dynamo

    import flatout.diagnose.rules  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        path, steps = json.loads(line)
        ranks = 2 if 'init_process_group("gloo")' in Path(path).read_text() else 1
        read, write = os.pipe()
        port, children = free_port(), []
        for rank in range(ranks):
            if (child := os.fork()) == 0:
                if ranks > 1:
                    os.environ.update(
                        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=port
                    )
                try:
                    answer = json.dumps(observed(path, steps))
                except BaseException:
                    answer = json.dumps({"findings": [], "failed": {}, "error": traceback.format_exc()})
                if rank == 0:
                    with os.fdopen(write, "w") as out:
                        out.write(answer)
                os._exit(0)
            children.append(child)
        os.close(write)
        with os.fdopen(read) as answer:
            print(answer.read(), flush=True)
        for child in children:
            os.waitpid(child, 0)


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return str(server.getsockname()[1])


if __name__ == "__main__":
    serve()
