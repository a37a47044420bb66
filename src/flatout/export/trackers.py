"""One class for each tracker. Each imports its client when it is made, and fails there if that is missing.

tensorboard[=FOLDER]    event files, by default in the run's folder
wandb[=PROJECT]         Weights & Biases; WANDB_MODE=offline keeps the run on this machine
mlflow[=URI]            an MLflow server, folder or database; MLFLOW_TRACKING_URI by default
prometheus[=PORT]       an endpoint on the loopback interface, 9464 by default
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from flatout.measure.clock import seconds, sleep
from flatout.schema.run_request import EXPORT_FAILED, LIVE_FIGURES, RunSummary

PORT = 9464
PREFIX = "flatout"
DATABASES = {"sqlite", "mysql", "postgresql", "mssql"}  # of MLflow, which needs SQLAlchemy for them
HELP = {
    "steps_per_s": "optimizer steps a second",
    "samples_per_s": "training samples a second",
    "data_wait": "share of the time spent waiting for data",
    "cores_used": "CPU cores used",
    "memory_bytes": "peak memory in bytes",
    "gpu_busy": "share of the time in which the GPU was busy",
}


class Tracker(Protocol):
    """Gets the figures of a moment from each rank, and each rank's record at its end."""

    def log(self, rank: int, step: int, figures: Mapping[str, float]) -> None: ...
    def finish(self, record: RunSummary) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, target: str, folder: Path, command: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.home = Path(target) if target else folder / "tensorboard"
        self.writer: Callable[[str], Any] = SummaryWriter
        self.writers: dict[int, Any] = {}

    def log(self, rank: int, step: int, figures: Mapping[str, float]) -> None:
        if rank not in self.writers:
            self.writers[rank] = self.writer(str(self.home / f"rank{rank}"))
        for name, value in figures.items():
            self.writers[rank].add_scalar(f"{PREFIX}/{name}", value, step)
        self.writers[rank].flush()

    def finish(self, record: RunSummary) -> None:
        if record.rank in self.writers:
            self.writers[record.rank].add_text(f"{PREFIX}/limited_by", record.limited_by, record.steps)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class WeightsAndBiases:
    def __init__(self, target: str, folder: Path, command: str) -> None:
        import wandb

        self.run = wandb.init(
            project=target or os.environ.get("WANDB_PROJECT") or PREFIX,
            dir=str(folder),
            config={"command": command},
            job_type="flatout",
        )

    def log(self, rank: int, step: int, figures: Mapping[str, float]) -> None:
        metrics = {f"{PREFIX}/rank{rank}/{name}": value for name, value in figures.items()}
        self.run.log({**metrics, f"{PREFIX}/rank{rank}/step": step})

    def finish(self, record: RunSummary) -> None:
        for name in ("steps", "steps_per_s", "samples_per_s", "data_wait", "peak_memory_bytes", "limited_by"):
            self.run.summary[f"{PREFIX}/rank{record.rank}/{name}"] = getattr(record, name)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    def __init__(self, target: str, folder: Path, command: str) -> None:
        import mlflow

        if "://" not in target or target.startswith("file:"):  # MLflow 3 accepts folders only on request
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        if target:
            mlflow.set_tracking_uri(target)
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PREFIX)
        self.mlflow = mlflow
        mlflow.start_run()
        mlflow.log_param("command", command[:500])

    def log(self, rank: int, step: int, figures: Mapping[str, float]) -> None:
        self.mlflow.log_metrics({f"rank{rank}/{name}": value for name, value in figures.items()}, step=step)

    def finish(self, record: RunSummary) -> None:
        self.mlflow.set_tag(f"rank{record.rank}.limited_by", record.limited_by)

    def close(self) -> None:
        self.mlflow.end_run()


class Prometheus:
    def __init__(self, target: str, folder: Path, command: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()
        self.gauges = {
            name: Gauge(f"{PREFIX}_{name}", HELP[name], ["rank"], registry=registry) for name in LIVE_FIGURES
        }
        self.step = Gauge(f"{PREFIX}_step", "optimizer steps so far", ["rank"], registry=registry)
        self.server, _ = start_http_server(int(target or PORT), "127.0.0.1", registry)

    def log(self, rank: int, step: int, figures: Mapping[str, float]) -> None:
        self.step.labels(rank).set(step)
        for name, value in figures.items():
            self.gauges[name].labels(rank).set(value)

    def finish(self, record: RunSummary) -> None:
        self.step.labels(record.rank).set(record.steps)

    def close(self) -> None:
        self.server.shutdown()


TRACKERS: dict[str, type[TensorBoard | WeightsAndBiases | MLflow | Prometheus]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "prometheus": Prometheus,
}
MODULES = {  # of the clients; their packages have the same names with hyphens
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}


def wrong_target(name: str, target: str) -> str:
    """Why a tracker cannot use this target, as far as that shows before the run; "" if nothing does."""
    if name == "prometheus" and target and not (target.isdecimal() and 0 < int(target) < 1 << 16):
        return f"{target!r} is not a port. Give a number from 1 to 65535: --export prometheus={PORT}."
    uri = target or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"  # MLflow's own default
    if (
        name == "mlflow"
        and uri.partition(":")[0].partition("+")[0] in DATABASES
        and not find_spec("sqlalchemy")
    ):
        return (
            "MLflow needs its whole package for a database: pip install mlflow. Without it, give a server or a "
            "folder: --export mlflow=http://127.0.0.1:5000, --export mlflow=mlruns."
        )
    return ""


# Follows the live figures of a run, and passes them to one tracker, in a process of its own.
#
# python -m flatout.export.trackers TRACKER[=TARGET] FOLDER PID COMMAND
#
# The program writes a file for each rank into FOLDER and never waits for this process. A tracker that is slow
# or down delays only what is sent here. It ends once every rank has ended, or when process PID is gone.

POLL_S = 0.5
GRACE_S = 3.0  # for the last lines, after the program is gone
CLOSE_TIMEOUT_S = 120.0  # for the tracker to take the rest and to close


class Follower:
    """Reads new lines of all ranks and passes them on."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self.folder, self.tracker = folder, tracker
        self.files: dict[int, TextIO] = {}
        self.partial_lines: dict[int, str] = {}
        self.ended: set[int] = set()
        self.failures = 0

    def forward_new_lines(self) -> int:
        """Pass on what is new; return the number of lines."""
        for path in self.folder.glob("rank*.jsonl"):
            rank = int(path.stem.removeprefix("rank"))
            if rank not in self.files:
                self.files[rank] = path.open(encoding="utf-8")
        count = 0
        for rank, file in self.files.items():
            text = self.partial_lines.pop(rank, "") + file.read()
            *lines, partial = text.split("\n")
            self.partial_lines[rank] = partial  # an incomplete line
            for line in lines:
                count += 1
                self._forward(rank, json.loads(line))
        return count

    def _forward(self, rank: int, data: dict[str, Any]) -> None:
        try:
            if "end" in data:
                self.ended.add(rank)
                self.tracker.finish(RunSummary.from_json(data["end"]))
            else:
                figures = {name: float(data[name]) for name in LIVE_FIGURES if data.get(name) is not None}
                self.tracker.log(rank, data["step"], figures)
        except Exception as error:  # the tracker's own; what comes later may arrive
            self.failures += 1
            if self.failures == 1:
                _report(
                    f"{type(self.tracker).__name__} did not take a figure ({type(error).__name__}: {error})"
                )

    def run(self, pid: int) -> None:
        threading.Thread(target=_exit_when_overdue, args=(pid,), daemon=True).start()
        ended_s: float | None = None
        while ended_s is None or seconds() < ended_s + GRACE_S:
            self.forward_new_lines()
            if self.files and self.ended >= self.files.keys():
                break
            if ended_s is None and not _is_running(pid):
                ended_s = seconds()
            sleep(POLL_S)
        self.forward_new_lines()
        try:
            self.tracker.close()
        except Exception as error:
            _report(f"{type(self.tracker).__name__} did not close ({type(error).__name__}: {error})")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exit_when_overdue(pid: int) -> None:
    while _is_running(pid):
        sleep(POLL_S)
    sleep(CLOSE_TIMEOUT_S)
    _report(f"the tracker did not answer within {CLOSE_TIMEOUT_S:.0f} s")
    os._exit(1)


def _report(sentence: str) -> None:
    sys.stderr.write(f"{EXPORT_FAILED}{sentence}; the training is not affected\n")
    sys.stderr.flush()


def main() -> None:
    name, _, target = sys.argv[1].partition("=")
    folder, pid, command = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        tracker = TRACKERS[name](target, folder, command)
    except Exception as error:
        _report(f"{name} cannot be started ({type(error).__name__}: {error})")
        return
    Follower(folder, tracker).run(pid)


if __name__ == "__main__":
    main()
