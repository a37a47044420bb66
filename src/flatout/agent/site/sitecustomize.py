"""Python imports this file at start-up because its folder is first on PYTHONPATH.

It must never harm a script, and runs in whatever Python the program starts: any Python since 2.7 can read it.
Without a variable of flatout that asks for something, it only runs the sitecustomize that it hides.

Each process appends a line to the file that FLATOUT_ENTERED names: its pid, then "ok", or why flatout is not in
it. The process that started the program removes the file once it knows (launch/command.py).
"""

import os
import sys

OLDEST_PYTHON = (3, 10)
SOURCE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class _FlatoutFinder(object):
    """Finds the package flatout, and nothing else of the environment in which it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name != "flatout":
            return None
        return _path_finder().find_spec(name, [SOURCE_DIR])


def _path_finder():
    # The finder that Python already has: importlib.machinery and importlib.util take milliseconds.
    return next((finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"), None)


def _enter():
    """Attach what the variables ask for. Return "ok", or why flatout is not in this process; None if nothing is asked for."""
    job, explain = os.environ.get("FLATOUT_JOB"), os.environ.get("FLATOUT_EXPLAIN")
    if job and not os.path.exists(job):  # its run is over
        job = None
    is_rank = "FLATOUT_DATA_PARALLEL" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    heartbeats = os.environ.get("FLATOUT_HEARTBEAT")
    if heartbeats and not os.path.isdir(heartbeats):  # the monitor has ended
        heartbeats = None
    device = os.environ.get("FLATOUT_DEVICE")
    files = os.environ.get("FLATOUT_FILES")
    if files and not os.path.isdir(os.path.dirname(files)):  # the trial is over
        files = None
    if not (job or explain or is_rank or heartbeats or device or files):
        return None
    if sys.version_info < OLDEST_PYTHON:
        return "old " + ".".join(str(number) for number in sys.version_info[:3])
    finder = _FlatoutFinder()
    sys.meta_path.insert(0, finder)
    if is_rank:
        # otherwise each rank would train by itself
        _enter_or_exit("become a rank", "rank_environment", os.environ)
    if files:
        _enter_or_exit("keep its files apart", "file_sandbox", files)
    why = "ok"
    try:
        if heartbeats:
            from flatout.agent import heartbeat

            heartbeat.install(heartbeats)
        if device:
            from flatout.agent import device as devices

            devices.install()
        if job:
            from flatout.agent import bootstrap

            bootstrap.install(job, _report)
    except Exception as error:
        why = "%s: %s" % (type(error).__name__, error)
        sys.stderr.write("flatout: could not attach (%s); the script runs without flatout\n" % why)
    try:
        if explain:
            from flatout.agent import crash_report

            crash_report.install(explain, finder)
    except Exception as error:  # a script that does not fail never needs it
        why = "%s: %s" % (type(error).__name__, error)
    keeps_finder = job or heartbeats or device or files
    if not keeps_finder:  # what is there for a crash alone leaves sys.meta_path unchanged
        sys.meta_path.remove(finder)
    return why


def _enter_or_exit(what, module, argument):
    try:
        name = "flatout.agent." + module
        __import__(name)
        sys.modules[name].enter(argument)
    except Exception as error:
        sys.stderr.write("flatout: this process cannot %s: %s\n" % (what, error))
        sys.stderr.flush()
        os._exit(2)


def _report(why):
    try:
        handle = os.open(os.environ["FLATOUT_ENTERED"], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):  # nobody waits for it any more
        return
    os.write(handle, ("%d %s\n" % (os.getpid(), " ".join(why.split()))).encode("utf-8", "replace"))
    os.close(handle)


def _run_hidden():
    own_folder = os.path.dirname(os.path.abspath(__file__))
    other_paths = [path for path in sys.path if os.path.abspath(path or ".") != own_folder]
    finder = _path_finder()
    spec = finder.find_spec("sitecustomize", other_paths) if finder is not None else None
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        hidden = module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if __name__ == "sitecustomize":  # launch/environment.py takes only the finder
    _entered = _enter()
    if _entered is not None:
        _report(_entered)
    _run_hidden()
