"""One class for each tracker. Each imports its client when it is made, and fails there if that is missing.

tensorboard[=FOLDER]    event files, by default in the run's folder
wandb[=PROJECT]         Weights & Biases; WANDB_MODE=offline keeps the run on this machine
mlflow[=URI]            an MLflow server, folder or database; MLFLOW_TRACKING_URI by default
prometheus[=PORT]       an endpoint on the loopback interface, 9464 by default
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flatout.schema.run_summary import LIVE_FIGURES, RunSummary

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
