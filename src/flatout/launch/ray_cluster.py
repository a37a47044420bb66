"""Run ranks, or many independent programs, on a running Ray cluster.

Uses only Ray's public API: a placement group, one actor per rank, tasks. flatout and torch must be installed
on the nodes, and the program's folder must exist there under the same path (a shared file system). Ray is an
extra: pip install flatout[ray].
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import RankEnvironment
from flatout.job.temporary import temporary
from flatout.launch.elastic import interface_of
from flatout.launch.environment import SITE
from flatout.launch.failure import how_ended
from flatout.launch.nodes import Endpoint
from flatout.launch.rendezvous import claimed, served
from flatout.schema.errors import (
    FlatoutError,
    NodesApart,
    ProgramFailed,
    ProgramNotFound,
    UsageError,
    first_line,
)

PLACE_S = 60.0  # to wait for free resources before reporting that the cluster is full
GRACE_S = 5.0
TAIL_BYTES = 20_000
LOOK_S = 0.3


@dataclass(frozen=True)
class RayJob:
    """One program: ``argv`` in ``folder``, with ``extra`` added to the node's own environment.

    ``job`` is the text of flatout's job file, if there is one."""

    argv: Sequence[str]
    folder: str
    extra: Mapping[str, str] = field(default_factory=dict)
    job: str | None = None


def work(argv: Sequence[str], environment: Mapping[str, str]) -> RayJob:
    """Describe a program for a node: its command, and the part of ``environment`` that differs from ours."""
    ours = {"PYTHONPATH", "FLATOUT_JOB", "FLATOUT_CRASH_REPORTS", "FLATOUT_FIRST"}
    extra = {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value and name not in ours
    }
    job = environment.get("FLATOUT_JOB")
    return RayJob(tuple(argv), os.getcwd(), extra, Path(job).read_text(encoding="utf-8") if job else None)


class Runner:
    """Runs one process in a Ray worker, in a session that ends with the worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.home = temporary("ray")
        self._store: Any = None

    def where(self) -> tuple[str, str]:
        """Return the ID and address of this node."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def serve(self) -> str:
        """Serve a store for the ranks' rendezvous in this worker, at a port that the system chooses."""
        import torch

        listening = claimed(Endpoint(self.where()[1], 0), 0, several=False)
        assert listening is not None  # port 0 is never in use
        at = Endpoint(*listening.getsockname()[:2])
        self._store = served(torch, listening)
        return f"tcp://{at}"

    def start(self, what: RayJob, rank_variables: Mapping[str, str]) -> None:
        """Start the program.

        Raises NodesApart if this node lacks its folder, ProgramNotFound if it lacks the program."""
        if not Path(what.folder).is_dir():
            raise NodesApart(
                f"the folder {what.folder} is not on the node {socket.gethostname()}. Put the program on a file system that all nodes share."
            )
        before = os.environ.get("PYTHONPATH", "")
        environment = {
            **os.environ,
            **what.extra,
            **rank_variables,
            "PYTHONPATH": f"{SITE}{os.pathsep}{before}" if before else str(SITE),
        }
        interface = interface_of(self.where()[1]) if rank_variables else None
        if interface:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        if what.job is not None:
            (self.home / "job.json").write_text(what.job, encoding="utf-8")
            environment["FLATOUT_JOB"] = str(self.home / "job.json")
        try:
            with (self.home / "output").open("wb") as out:
                self._process = subprocess.Popen(
                    list(what.argv),
                    cwd=what.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise ProgramNotFound(
                f"{what.argv[0]} cannot be started on the node {socket.gethostname()}: {error.strerror}."
            ) from None

    def wait(self) -> int:
        """Wait for the program and return its exit code, negative for a signal."""
        assert self._process is not None  # start comes first
        return self._process.wait()

    def output(self, at: int) -> bytes:
        """Return the output from this offset on."""
        with (self.home / "output").open("rb") as out:
            out.seek(at)
            return out.read()

    def end(self) -> None:
        if self._process is None:
            return
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass


def connect(address: str) -> Any:
    """Return Ray, connected to the cluster.

    Raises UsageError if Ray is not installed or there is no cluster."""
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray, which is not installed here: pip install flatout[ray].") from None
    if not ray.is_initialized():
        try:
            # Ray does not stream the workers' output: rank 0's output is read from its file.
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": _way()},
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"there is no Ray cluster at {address} ({first_line(error)}). Start one with `ray start --head` and give its address: "
                "--ray 10.0.0.1:6379, or --ray auto on one of its nodes."
            ) from None
    return ray


def _way() -> dict[str, str]:
    """Return the path to flatout, for clusters with a shared file system; harmless if missing there."""
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}


def run_ranks(
    address: str,
    what: RayJob,
    ranks: int,
    gpus: bool,
    cpus: float = 1.0,
    show: Callable[[bytes], None] = lambda _: None,
) -> int:
    """Run the program as several ranks; return 0 if all succeed. ``show`` receives the output of rank 0.

    Raises ProgramFailed for the first rank that fails, after ending the others; NodesApart if the cluster is
    full or loses a node.
    """
    ray = connect(address)
    bundle = {"CPU": cpus, **({"GPU": 1.0} if gpus else {})}
    group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
    if not group.wait(PLACE_S):
        ray.util.remove_placement_group(group)
        raise NodesApart(
            f"the Ray cluster has no room for {ranks} ranks of {_said(bundle)} within {PLACE_S:.0f} s: it has {_said(ray.cluster_resources())}. "
            f"Start fewer (--{'gpus' if gpus else 'procs'}), or run `ray status` to see what uses them"
        )
    try:
        return _Ranks(ray, group, what, bundle, ranks, show).run()
    except ray.exceptions.RayActorError as error:
        raise NodesApart(
            f"a Ray worker of this job ended before its rank started ({first_line(error)}): its node is gone or out of memory. Run "
            "`ray list actors` for details"
        ) from None
    finally:
        ray.util.remove_placement_group(group)  # ends the actors, and they their processes


class _Ranks:
    def __init__(
        self,
        ray: Any,
        group: Any,
        what: RayJob,
        bundle: Mapping[str, float],
        ranks: int,
        show: Callable[[bytes], None],
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._what, self._show, self._shown = ray, what, show, 0
        # One call waits for the program, one reads its output, one ends it.
        actor = ray.remote(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0, max_concurrency=4
        )(Runner)
        found = [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle_index)).remote()
            for bundle_index in range(ranks)
        ]
        places = ray.get([each.where.remote() for each in found])
        order = sorted(
            range(ranks), key=lambda index: (places.index(places[index]), index)
        )  # the ranks of a node are adjacent
        self._actors = [found[index] for index in order]
        self._places = [places[index] for index in order]

    def run(self) -> int:
        ray = self._ray
        rendezvous = ray.get(self._actors[0].serve.remote())
        try:
            ray.get(
                [
                    actor.start.remote(self._what, self._rank_variables(rank, rendezvous))
                    for rank, actor in enumerate(self._actors)
                ]
            )
        except FlatoutError as error:
            raise getattr(
                error, "cause", error
            ) from None  # Ray's error has the class of its cause, with a long message
        waiting = {actor.wait.remote(): rank for rank, actor in enumerate(self._actors)}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK_S)
            self._stream()
            for each in done:
                rank = waiting.pop(each)
                code = self._code(each, rank, waiting)
                if code:
                    self._end(waiting.values())
                    raise ProgramFailed(self._words(rank, code), code)
        return 0

    def _rank_variables(self, rank: int, rendezvous: str) -> dict[str, str]:
        here = [other for other, place in enumerate(self._places) if place == self._places[rank]]
        return RankEnvironment(rank, here.index(rank), len(self._places), len(here), rendezvous).environment()

    def _code(self, each: Any, rank: int, waiting: Mapping[Any, int]) -> int:
        try:
            return int(self._ray.get(each))
        except self._ray.exceptions.RayActorError:
            self._end(waiting.values())
            raise NodesApart(
                f"rank {rank} on {self._places[rank][1]} is lost: its Ray worker or node has exited. The other ranks were ended. Start again: "
                "the program resumes from its last checkpoint. Run `ray list actors` for details"
            ) from None

    def _end(self, ranks: Iterable[int]) -> None:
        ending = [self._actors[rank].end.remote() for rank in ranks]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=2 * GRACE_S)
        self._stream()

    def _stream(self) -> None:
        try:
            new = self._ray.get(self._actors[0].output.remote(self._shown), timeout=10)
        except self._ray.exceptions.RayError:  # the actor is gone; another call will report that
            return
        self._shown += len(new)
        if new:
            self._show(new)

    def _words(self, rank: int, code: int) -> str:
        words = f"rank {rank} on {self._places[rank][1]} failed first, {how_ended(code)}"
        if rank == 0:  # its output was shown
            return words
        try:
            said = (
                self._ray.get(self._actors[rank].output.remote(0), timeout=10)[-TAIL_BYTES:]
                .decode(errors="replace")
                .rstrip()
            )
        except self._ray.exceptions.RayError:
            return words
        return f"{words}. The end of its output:\n{said}"


def _said(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if name in ("CPU", "GPU"))
        or "nothing"
    )
