"""Python imports this file at start-up because its folder is first on PYTHONPATH.

It must never harm a script.

Without FLATOUT_JOB, FLATOUT_EXPLAIN, FLATOUT_DATA_PARALLEL, FLATOUT_HEARTBEAT and FLATOUT_DEVICE it only runs the
sitecustomize that it hides.
"""

import os
import sys


def _enter() -> None:
    job, entry = os.environ.get("FLATOUT_JOB"), os.environ.get("FLATOUT_EXPLAIN")
    if job and not os.path.exists(job):  # its run is over
        job = None
    divided = "FLATOUT_DATA_PARALLEL" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    watched = os.environ.get("FLATOUT_HEARTBEAT")
    if watched and not os.path.isdir(watched):  # the monitor has ended
        watched = None
    asked = os.environ.get("FLATOUT_DEVICE")
    if not job and not entry and not divided and not watched and not asked:
        return
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    added = home not in sys.path
    if added:  # last on the path, so that it hides no module of the script
        sys.path.append(home)
    if divided:
        _become_rank()
    try:
        if watched:
            from flatout.agent import heartbeat

            heartbeat.install(watched)
        if asked:
            from flatout.agent import device

            device.install(asked)
        if job:
            from flatout.agent import bootstrap

            bootstrap.install(job)
    except Exception as error:
        sys.stderr.write(
            f"flatout: could not attach ({type(error).__name__}: {error}); the script runs without flatout\n"
        )
    try:
        if entry:
            from flatout.agent import crash_report

            crash_report.install(entry, home)
    except Exception:
        pass  # a script that does not fail never needs it
    # hooks that act only at the end leave sys.path unchanged
    if added and not job and not watched and not asked:
        sys.path.remove(home)


def _become_rank() -> None:
    try:
        from flatout.agent import rank_environment

        rank_environment.enter(os.environ)
    except Exception as error:  # otherwise each rank would train by itself
        sys.stderr.write(f"flatout: this process cannot become a rank: {error}\n")
        sys.stderr.flush()
        os._exit(2)


def _hand_over() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != here]
    # The finder that Python already has: importlib.machinery and importlib.util take milliseconds, mostly for
    # nothing.
    finder = next(
        (finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"), None
    )
    spec = finder.find_spec("sitecustomize", elsewhere) if finder is not None else None
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        hidden = module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


_enter()
_hand_over()
