"""`flatout run --ray`: ranks on a running Ray cluster, by its public API alone (a placement group, a task per rank).

flatout and torch must be installed on the nodes, and the program's folder must exist there under the same path
(a shared file system). Ray is an extra: pip install flatout[ray].
"""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import RankEnvironment
from flatout.job.temporary import remove, temporary
from flatout.launch.environment import SITE
from flatout.launch.failure import how_ended
from flatout.schema.errors import (
    FlatoutError,
    NodesUnreachable,
    ProgramFailed,
    ProgramNotFound,
    UsageError,
    first_line,
)

PLACEMENT_S = 60.0  # to wait for free resources before reporting that the cluster is full
GRACE_S = 5.0
TAIL_BYTES = 20_000
POLL_S = 0.3


@dataclass(frozen=True)
class RayJob:
    """One program: ``argv`` in ``folder``, with ``extra`` added to the node's own environment.

    ``job`` is the text of flatout's job file, if there is one."""

    argv: Sequence[str]
    folder: str
    extra: Mapping[str, str] = field(default_factory=dict)
    job: str | None = None


def ray_job(argv: Sequence[str], environment: Mapping[str, str]) -> RayJob:
    """Describe a program for a node: its command, and the part of ``environment`` that differs from ours."""
    own_variables = {"PYTHONPATH", "FLATOUT_JOB", "FLATOUT_CRASH_REPORTS", "FLATOUT_FIRST"}
    changed = dict(environment.items() - os.environ.items())
    extra = {name: value for name, value in changed.items() if name not in own_variables}
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


class Rendezvous:
    """An actor on the node of rank 0 that serves a store for the ranks."""

    def serve(self) -> str:
        """Serve on this node's address alone (torch's own listens on all), and return where."""
        import ray
        import torch

        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        port = listening.getsockname()[1]
        self._store = torch.distributed.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"


def run_rank(job: RayJob, rank: RankEnvironment, output: Any) -> tuple[int, str]:
    """Run one rank in a Ray worker; return its exit code, negative for a signal, and the end of its output.

    ``output`` is a queue for its output, or None. The program ends with the worker, and if the task is cancelled.
    Raises NodesUnreachable if this node lacks its folder, ProgramNotFound if it lacks the program."""
    import ray

    host, folder, pause = socket.gethostname(), temporary("ray"), threading.Event()
    if not Path(job.folder).is_dir():
        raise NodesUnreachable(
            f"the folder {job.folder} is not on the node {host}. Put the program on a file system that all nodes share."
        )
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "GLOO_SOCKET_IFNAME": _interface_of(ray.util.get_node_ip_address()),
        **os.environ,
        **job.extra,
        **rank.environment(),
        "PYTHONPATH": os.pathsep.join(path),
    }
    if job.job is not None:
        (folder / "job.json").write_text(job.job, encoding="utf-8")
        environment["FLATOUT_JOB"] = str(folder / "job.json")
    with (folder / "output").open("wb") as out, (folder / "output").open("rb") as log:
        try:
            process = subprocess.Popen(
                list(job.argv),
                cwd=job.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise ProgramNotFound(
                f"{job.argv[0]} cannot be started on the node {host}: {error.strerror}."
            ) from None
        tail, exited = b"", False
        try:
            while not exited:
                pause.wait(POLL_S)
                exited = process.poll() is not None
                chunk = log.read()
                tail = (tail + chunk)[-TAIL_BYTES:]
                if output is not None and chunk:
                    output.put(chunk)
        finally:
            _end(process)
    remove(folder)
    return process.returncode, tail.decode(errors="replace").rstrip()


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        try:
            if process.poll() is None:
                os.killpg(process.pid, number)
                process.wait(grace_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def _interface_of(address: str) -> str:
    """The network interface with this address.

    gloo listens on the address of the host name, which /etc/hosts often maps to 127.0.1.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return ""


def run_ranks(
    address: str, job: RayJob, ranks: int, gpus: bool, show: Callable[[bytes], None] = lambda _: None
) -> int:
    """Run the program as several ranks; return 0 if all succeed. ``show`` receives the output of rank 0.

    Raises ProgramFailed for the first rank that fails, after ending the others; NodesUnreachable if the cluster is
    full or loses a node."""
    ray = connect(address)
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
    group, tasks = ray.util.placement_group([bundle] * ranks, strategy="PACK"), {}
    output = Queue(actor_options={"num_cpus": 0})

    def stream() -> None:
        while not output.empty():
            show(output.get())

    try:
        if not group.wait(PLACEMENT_S):
            raise NodesUnreachable(
                f"the Ray cluster has no room for {ranks} ranks of {_resources(bundle)} within {PLACEMENT_S:.0f} s: it has {_resources(ray.cluster_resources())}. "
                f"Start fewer (--{'gpus' if gpus else 'procs'}), or run `ray status` to see what uses them."
            )
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        order = sorted(nodes, key=lambda index: (list(nodes.values()).index(nodes[index]), index))
        node_of_rank = [nodes[index] for index in order]  # the ranks of a node are adjacent
        strategies = [PlacementGroupSchedulingStrategy(group, index) for index in order]
        server = ray.remote(num_cpus=0)(Rendezvous).options(scheduling_strategy=strategies[0]).remote()
        rendezvous = ray.get(server.serve.remote())
        task = ray.remote(num_cpus=1, num_gpus=int(gpus), max_retries=0)(run_rank)
        for rank, node in enumerate(node_of_rank):
            rank_env = RankEnvironment(
                rank, rank - node_of_rank.index(node), ranks, node_of_rank.count(node), rendezvous
            )
            task_ref = task.options(scheduling_strategy=strategies[rank])
            tasks[task_ref.remote(job, rank_env, None if rank else output)] = rank
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        pending = list(tasks)
        while pending:
            finished_tasks, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            stream()
            for finished in finished_tasks:
                rank = tasks[finished]
                _check_exit(ray, finished, f"rank {rank} on {hosts[node_of_rank[rank]]}", rank)
        return 0
    finally:
        for task_ref in tasks:
            ray.cancel(task_ref, force=False)
        if tasks:
            ray.wait(list(tasks), num_returns=len(tasks), timeout=2 * GRACE_S)
        stream()
        output.shutdown()
        ray.util.remove_placement_group(group)


def _check_exit(ray: Any, finished: Any, title: str, rank: int) -> None:
    try:
        code, tail = ray.get(finished)
    except FlatoutError as error:
        raise getattr(error, "cause", error) from None  # Ray's error has the class of its cause
    except ray.exceptions.RayError:
        raise NodesUnreachable(
            f"{title} is lost: its Ray worker or node has exited. The other ranks were ended. Start again: "
            "the program resumes from its last checkpoint. Run `ray list tasks` for details."
        ) from None
    if code:
        shown = f". The end of its output:\n{tail}" if tail and rank else ""  # that of rank 0 was shown
        raise ProgramFailed(f"{title} failed first, {how_ended(code)}{shown}", code)


def _resources(amounts: Mapping[str, float]) -> str:
    known = [f"{amount:g} {name}" for name, amount in amounts.items() if name in ("CPU", "GPU")]
    return ", ".join(known) or "nothing"
