"""The agent of one node. `flatout run --nodes`, Slurm's srun or a pod starts it; it is not a command.

It runs torch's elastic agent in this process, with a rendezvous of our own. It reports the address of the
rendezvous, the rank that failed first on this node, and why the agent exits. Its exit code is that rank's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from flatout.job.claims import speaks_first
from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import of_other_launchers
from flatout.job.streams import open_closed_streams
from flatout.job.temporary import remove, temporary
from flatout.launch.elastic import (
    asked_of_agent,
    end_descendants,
    for_ranks,
    own_address,
    torchrun_words,
)
from flatout.launch.failure import headline, shown
from flatout.launch.node_heartbeats import LOST_S, HeartbeatMonitor
from flatout.launch.nodes import Endpoint, Nodes
from flatout.launch.rank_variables import launch_environment
from flatout.launch.rendezvous import (
    RoundRendezvous,
    claimed,
    client,
    reached_from_elsewhere,
    register,
    served,
    wait_for,
)
from flatout.schema.errors import FlatoutError, NodesApart, ProgramFailed

GRACE_S = 10.0  # for the ranks of a disconnected node, after SIGTERM


def main() -> int:
    open_closed_streams()
    try:
        if sys.argv[1:2] == ["--serve"]:
            return _serve(sys.argv[2])
        nodes, divided, command = asked_of_agent(sys.argv[1:])
        return _run(nodes, divided, command)
    except FlatoutError as error:
        _say(str(error))
        return error.exit_code


def _run(nodes: Nodes, divided: bool, command: list[str]) -> int:
    listening = claimed(nodes.rendezvous, nodes.node_rank, nodes.most > 1)
    at = Endpoint(nodes.rendezvous.host, listening.getsockname()[1]) if listening else nodes.rendezvous
    several = nodes.most > 1
    if several:
        _say(_greeting(nodes, at, serves=listening is not None))
    if listening is None:
        wait_for(at)
    own = own_address(at)
    folder = temporary("node")
    os.environ.update(for_ranks(nodes, own, os.environ))
    if divided:
        _divide(nodes, folder)
    import torch

    store = served(torch, listening) if listening else client(torch, at)
    heartbeats: list[HeartbeatMonitor] = []

    def begin(rounds: RoundRendezvous) -> None:
        heartbeats.append(
            HeartbeatMonitor(store, rounds, at, listening is not None, _end_round, lambda: _give_up(at))
        )
        heartbeats[0].start()

    register(torch, own, begin)
    try:
        _launch(torchrun_words(nodes, at, own, command), at, folder)
    except ProgramFailed as error:
        if heartbeats[0].ended_round:  # this agent ended it, not the program
            return NodesApart.exit_code
        _say(str(error))
        return error.exit_code
    finally:
        if "FLATOUT_JOB" in os.environ and heartbeats and not heartbeats[0].rounds.has_rank_0:
            speaks_first(os.environ["FLATOUT_JOB"])  # the node of rank 0 reports what was applied
    heartbeats[0].finish()
    remove(folder)
    return 0


def _divide(nodes: Nodes, folder: Path) -> None:
    """Set the environment that makes each process a rank, without the variables of other launchers."""
    for name in of_other_launchers(os.environ):
        del os.environ[name]
    # A failing rank writes to this file. Nothing reads it here: torch's agent waits for the process to exit.
    (folder / "event_fifo").touch()
    os.environ.update(
        launch_environment(folder) | {"FLATOUT_DATA_PARALLEL": "gpus" if nodes.gpus else "procs"}
    )


def _serve(host: str) -> int:
    """Serve only a rendezvous, for a batch script: print HOST:PORT, and serve until that script ends."""
    die_with_parent(signal.SIGTERM)
    here = reached_from_elsewhere(host)
    listening = claimed(Endpoint(here, 0), 0, several=True)
    assert listening is not None  # port 0 is never in use
    at = Endpoint(here, listening.getsockname()[1])
    import torch

    store = served(torch, listening)
    sys.stdout.write(f"{at}\n")
    sys.stdout.flush()
    while store is not None:
        signal.pause()
    return 0


def _greeting(nodes: Nodes, at: Endpoint, serves: bool) -> str:
    many = f"{nodes.most} nodes" if nodes.fewest == nodes.most else f"{nodes.fewest} to {nodes.most} nodes"
    where = f"this node serves the rendezvous at {at}" if serves else f"the rendezvous is at {at}"
    return (
        f"{many} of {nodes.procs} {'rank' if nodes.procs == 1 else 'ranks'}; {where}. It has no authentication: anyone who can reach it can run code here. "
        "Keep it inside a private network"
    )


def _launch(words: list[str], at: Endpoint, folder: Path) -> None:
    """Run the ranks of this node until they are done.

    Raises ProgramFailed if a rank fails, NodesApart if the rendezvous fails."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        log = folder / f"rank{rank}.log"  # of a rank whose output did not go to the terminal
        printed = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        told = headline(rank, socket.gethostname(), first.pid, first.exitcode, False, " on this node")
        output = f" The end of its output ({log}):\n{shown('', printed)}" if printed else ""
        raise ProgramFailed(told + output, first.exitcode) from None
    except SignalException as ended:
        raise ProgramFailed(f"ended by {ended.sigval.name}", -int(ended.sigval)) from None
    except RendezvousTimeoutError:
        raise NodesApart(
            f"not enough nodes joined {at} in time. Start the others with the same command, or allow fewer: --nodes 1:4."
        ) from None
    except RendezvousClosedError:
        raise NodesApart(
            f"the job at {at} is over and accepts no more nodes. Start all nodes again."
        ) from None
    except RendezvousError as error:
        said = error.__cause__ or error
        raise NodesApart(
            f"the rendezvous at {at} was lost ({type(said).__name__}). The node that serves it has exited: read its output, then start "
            "all nodes again. The program resumes from its last checkpoint."
        ) from None


def _end_round(node: str) -> None:
    """End the ranks here when a node of the round sends no heartbeat: they would wait for it in a collective.

    Runs in the heartbeat thread."""
    _say(
        f"node {node} has sent no heartbeat for {LOST_S:.0f} s: it has exited or lost its network. Ending the ranks of this node. They start again with the "
        "remaining nodes if --restarts and --nodes allow it"
    )
    end_descendants(GRACE_S)


def _give_up(at: Endpoint) -> None:
    """Exit when this node is disconnected: the agent's own thread may wait 15 minutes in a store operation.

    Runs in the heartbeat thread."""
    _say(
        f"the rendezvous at {at} has not answered for {LOST_S:.0f} s: this node lost its network, or the serving node has exited. Ending its ranks. Start all "
        "nodes again once the network is back; the program resumes from its last checkpoint"
    )
    end_descendants(GRACE_S)
    sys.stderr.flush()
    os._exit(NodesApart.exit_code)


def _say(sentence: str) -> None:
    sys.stderr.write(f"flatout: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
