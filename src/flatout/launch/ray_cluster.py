"""`flatout run --ray`: ranks on a running Ray cluster, by its public API alone (a placement group, an actor per rank).

flatout and torch must be installed on the nodes, and the program's folder must exist there under the same path
(a shared file system). Ray is an extra: pip install flatout[ray].
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

import psutil

from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import RankEnvironment
from flatout.job.temporary import temporary
from flatout.launch.environment import SITE
from flatout.launch.failure import how_ended
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


def connect(address: str) -> Any:
    """Return Ray, connected to the cluster.

    Raises UsageError if Ray is not installed or there is no cluster."""
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray, which is not installed here: pip install flatout[ray].") from None
    if not ray.is_initialized():
        path = os.environ.get("PYTHONPATH")  # leads to flatout on a shared file system; harmless elsewhere
        try:
            # Ray does not stream the workers' output: rank 0's output is read from its file.
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": {"PYTHONPATH": path} if path else {}},
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"there is no Ray cluster at {address} ({first_line(error)}). Start one with `ray start --head` and give its address: "
                "--ray 10.0.0.1:6379, or --ray auto on one of its nodes."
            ) from None
    return ray


class RankActor:
    """One rank in a Ray worker, in a session that ends with the worker."""

    def __init__(self) -> None:
        self.home = temporary("ray")
        self._process: subprocess.Popen[bytes] | None = None
        self._store: Any = None

    def where(self) -> tuple[str, str]:
        """Return the ID and address of this node."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def serve(self) -> str:
        """Serve a store for the ranks' rendezvous, on this node's address alone (torch's own listens on all)."""
        import torch

        address = self.where()[1]
        listening = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        port = listening.getsockname()[1]
        self._store = torch.distributed.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"

    def start(self, what: RayJob, rank: RankEnvironment) -> None:
        """Start the program.

        Raises NodesApart if this node lacks its folder, ProgramNotFound if it lacks the program."""
        if not Path(what.folder).is_dir():
            raise NodesApart(
                f"the folder {what.folder} is not on the node {socket.gethostname()}. Put the program on a file system that all nodes share."
            )
        path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "GLOO_SOCKET_IFNAME": _interface_of(self.where()[1]),
            **os.environ,
            **what.extra,
            **rank.environment(),
            "PYTHONPATH": os.pathsep.join(path),
        }
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

    def output(self, offset: int) -> bytes:
        """Return the output from this offset on."""
        with (self.home / "output").open("rb") as out:
            out.seek(offset)
            return out.read()

    def end(self) -> None:
        if self._process is None:
            return
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(grace_s)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                pass


def _interface_of(address: str) -> str:
    """Return the network interface with this address.

    gloo listens on the address of the host name, which /etc/hosts often maps to 127.0.1.1."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (
            name
            for name, known in interfaces
            if any(entry.address.partition("%")[0] == address for entry in known)
        ),
        "",
    )


def run_ranks(
    address: str,
    what: RayJob,
    ranks: int,
    gpus: bool,
    show: Callable[[bytes], None] = lambda _: None,
) -> int:
    """Run the program as several ranks; return 0 if all succeed. ``show`` receives the output of rank 0.

    Raises ProgramFailed for the first rank that fails, after ending the others; NodesApart if the cluster is
    full or loses a node.
    """
    ray = connect(address)
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
    group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
    try:
        if not group.wait(PLACE_S):
            raise NodesApart(
                f"the Ray cluster has no room for {ranks} ranks of {_resources(bundle)} within {PLACE_S:.0f} s: it has {_resources(ray.cluster_resources())}. "
                f"Start fewer (--{'gpus' if gpus else 'procs'}), or run `ray status` to see what uses them."
            )
        return _Ranks(ray, group, bundle, ranks, show).run(what)
    except ray.exceptions.RayActorError as error:
        raise NodesApart(
            f"a Ray worker of this job ended before its rank started ({first_line(error)}): its node is gone or out of memory. Run "
            "`ray list actors` for details."
        ) from None
    finally:
        ray.util.remove_placement_group(group)  # ends the actors, and they their processes


class _Ranks:
    def __init__(
        self, ray: Any, group: Any, bundle: Mapping[str, float], ranks: int, show: Callable[[bytes], None]
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._show, self._shown = ray, show, 0
        # One call waits for the program, one reads its output, one ends it.
        remote = ray.remote(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0, max_concurrency=4
        )(RankActor)
        actors = [
            remote.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote()
            for number in range(ranks)
        ]
        places = ray.get([actor.where.remote() for actor in actors])
        order = sorted(range(ranks), key=lambda number: (places.index(places[number]), number))
        self._actors = [actors[number] for number in order]  # the ranks of a node are adjacent
        self._places = [places[number] for number in order]

    def run(self, what: RayJob) -> int:
        ray = self._ray
        rendezvous = ray.get(self._actors[0].serve.remote())
        try:
            ray.get(
                [
                    actor.start.remote(what, self._environment(rank, rendezvous))
                    for rank, actor in enumerate(self._actors)
                ]
            )
        except FlatoutError as error:
            # Ray's error has the class of its cause, with a long message
            raise getattr(error, "cause", error) from None
        waiting = {actor.wait.remote(): rank for rank, actor in enumerate(self._actors)}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK_S)
            self._stream()
            for task in done:
                self._ended(task, waiting.pop(task), waiting.values())
        return 0

    def _environment(self, rank: int, rendezvous: str) -> RankEnvironment:
        here = [other for other, place in enumerate(self._places) if place == self._places[rank]]
        return RankEnvironment(rank, here.index(rank), len(self._places), len(here), rendezvous)

    def _ended(self, task: Any, rank: int, others: Iterable[int]) -> None:
        """End the other ranks if this one failed. Raises ProgramFailed, NodesApart."""
        where = f"rank {rank} on {self._places[rank][1]}"
        try:
            code = int(self._ray.get(task))
        except self._ray.exceptions.RayActorError:
            self._end(others)
            raise NodesApart(
                f"{where} is lost: its Ray worker or node has exited. The other ranks were ended. Start again: "
                "the program resumes from its last checkpoint. Run `ray list actors` for details."
            ) from None
        if code:
            self._end(others)
            tail = "" if rank == 0 else self._output(rank, 0)[-TAIL_BYTES:].decode(errors="replace").rstrip()
            shown = f". The end of its output:\n{tail}" if tail else ""  # that of rank 0 was shown
            raise ProgramFailed(f"{where} failed first, {how_ended(code)}{shown}", code)

    def _end(self, ranks: Iterable[int]) -> None:
        ending = [self._actors[rank].end.remote() for rank in ranks]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=2 * GRACE_S)
        self._stream()

    def _stream(self) -> None:
        new = self._output(0, self._shown)
        self._shown += len(new)
        if new:
            self._show(new)

    def _output(self, rank: int, offset: int) -> bytes:
        try:
            return bytes(self._ray.get(self._actors[rank].output.remote(offset), timeout=10))
        except self._ray.exceptions.RayError:  # the actor is gone; another call will report that
            return b""


def _resources(amounts: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if name in ("CPU", "GPU"))
        or "nothing"
    )
