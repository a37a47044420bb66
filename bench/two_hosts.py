"""Tests a training over two hosts with link cuts and kills: does it continue, restart or end, and when?

The hosts are network namespaces of this machine with separate addresses. A third namespace is the router
between them, with ports limited to 100 Mbit/s. A cut stops the router's forwarding, so neither host sees its
own link go down. Each host runs an agent as `flatout run --nodes` does, with one rank of a small DDP training
over gloo whose group has torch's own timeout of half an hour. This is no comparison of times: seconds are
from the fault to the result, measured once each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import HERE, RESULTS, SRC, markdown_table, stamp, write_result

from flatout.launch.command import Command
from flatout.launch.elastic import agent_command
from flatout.launch.environment import SITE
from flatout.launch.nodes import Endpoint, Nodes

PROGRAM = HERE / "programs" / "two_hosts.py"
RATE = "100mbit"
PORT = 29400
STEPS = 60
TIMEOUT_S = 180.0  # longer than this is a hang


def sh(words: str) -> str:
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"`{words}` failed: {done.stderr.strip()}. This bench needs root, iproute2, network namespaces, veth and the tbf queue (sch_tbf)."
        )
    return done.stdout


class Hosts:
    """Two hosts and the router between them. Host 0 serves the rendezvous."""

    def __init__(self) -> None:
        mark = os.getpid() % 10000
        self.names, self.router = [f"fo{mark}h{n}" for n in (0, 1)], f"fo{mark}r"
        self.addresses = ["10.77.0.2", "10.77.1.2"]
        sh(f"ip netns add {self.router}")
        for n, name in enumerate(self.names):
            sh(f"ip netns add {name}")
            sh(f"ip -n {name} link add eth0 type veth peer name port{n} netns {self.router}")
            sh(f"ip -n {name} addr add 10.77.{n}.2/24 dev eth0")
            sh(f"ip -n {self.router} addr add 10.77.{n}.1/24 dev port{n}")
            for at, device in ((name, "lo"), (name, "eth0"), (self.router, f"port{n}")):
                sh(f"ip -n {at} link set {device} up")
            sh(f"ip -n {name} route add default via 10.77.{n}.1")
            for at, device in ((name, "eth0"), (self.router, f"port{n}")):
                sh(
                    f"ip netns exec {at} tc qdisc add dev {device} root tbf rate {RATE} burst 64kb latency 50ms"
                )
        self.fix()

    def fix(self) -> None:
        sh(f"ip netns exec {self.router} sysctl -q -w net.ipv4.ip_forward=1")

    def cut(self) -> None:
        sh(f"ip netns exec {self.router} sysctl -q -w net.ipv4.ip_forward=0")

    def processes(self, host: int) -> list[int]:
        return [int(number) for number in sh(f"ip netns pids {self.names[host]}").split()]

    def kill(self, host: int) -> None:
        for number in self.processes(host):
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def remove(self) -> None:
        for host in (0, 1):
            self.kill(host)
        for name in (*self.names, self.router):
            sh(f"ip netns del {name}")


class Job:
    """One training over both hosts, in a folder that both can access."""

    def __init__(self, hosts: Hosts, fewest: int, restarts: int) -> None:
        self.hosts, self.folder = hosts, Path(tempfile.mkdtemp(prefix="flatout-two-hosts-"))
        self.nodes = Nodes(fewest, 2, 1, Endpoint(hosts.addresses[0], PORT), None, restarts)
        self.agents: list[list[Any]] = [[], []]
        for host in (0, 1):
            self.start(host)

    def start(self, host: int) -> None:
        argv = agent_command(
            self.nodes,
            Command((), (sys.executable, str(PROGRAM), str(self.folder), str(STEPS))),
            divided=True,
        )
        environment = {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{SRC}", "OMP_NUM_THREADS": "1"}
        said = (self.folder / f"host{host}.{len(self.agents[host])}.txt").open("w")
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.hosts.names[host], *argv], env=environment, stdout=said, stderr=said
        )
        self.agents[host].append((process, said.name))

    def steps(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("steps*.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return sorted(found, key=lambda line: line["at"])

    def until(self, true: Callable[[], Any], seconds: float = TIMEOUT_S) -> float | None:
        """Returns the seconds until the condition was true, or None."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if true():
                return time.monotonic() - begun
            time.sleep(0.1)
        return None

    def code(self, host: int) -> int | None:
        return self.agents[host][-1][0].poll()

    def over(self) -> bool:
        return all(self.code(host) is not None for host in (0, 1))

    def said(self, host: int) -> str:
        lines = Path(self.agents[host][-1][1]).read_text(errors="replace").splitlines()
        ours = [
            line.removeprefix("flatout: ")
            for line in lines
            if line.startswith("flatout: ") and "no authentication" not in line
        ]
        return ours[-1] if ours else ""

    def end(self) -> None:
        for host in (0, 1):
            self.hosts.kill(host)
        for agent, _ in (each for agents in self.agents for each in agents):
            agent.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def undisturbed(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, 2, 0)
    try:
        job.until(job.over)
        return ended(
            job, "undisturbed, two nodes", None, ["both nodes end with 0"], [job.code(0) == job.code(1) == 0]
        )
    finally:
        job.end()


def cut_5s(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, 2, 0)
    try:
        at = reached(job, 15)
        hosts.cut()
        time.sleep(5)
        hosts.fix()
        job.until(job.over)
        return ended(
            job,
            "link cut for 5 s",
            at,
            ["both nodes exit with 0", "no new round"],
            [job.code(0) == job.code(1) == 0, rounds(job) == 1],
        )
    finally:
        hosts.fix()
        job.end()


def cut_for_good(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, 2, 0)
    try:
        at = reached(job, 15)
        hosts.cut()
        job.until(job.over)
        return ended(
            job,
            "link cut permanently, --nodes 2",
            at,
            ["both nodes exit, neither with 0", "both report the other"],
            [
                job.over() and job.code(0) != 0 != job.code(1),
                "no heartbeat" in whole(job, 0) and "has not answered" in whole(job, 1),
            ],
        )
    finally:
        hosts.fix()
        job.end()


def cut_elastic(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, 1, 2)
    try:
        at = reached(job, 15)
        hosts.cut()
        job.until(job.over)
        return ended(
            job,
            "link cut permanently, --nodes 1:2 --restarts 2",
            at,
            ["host 0 finishes as a single node", "host 1 exits with an error"],
            [job.code(0) == 0, job.code(1) not in (None, 0)],
        )
    finally:
        hosts.fix()
        job.end()


def killed_elastic(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, 1, 2)
    try:
        at = reached(job, 15)
        hosts.kill(1)
        job.until(job.over)
        return ended(
            job,
            "all processes of host 1 killed, --nodes 1:2 --restarts 2",
            at,
            ["host 0 finishes as a single node"],
            [job.code(0) == 0],
        )
    finally:
        job.end()


def power_and_back(hosts: Hosts) -> dict[str, Any]:
    """Cuts the link first, so that no packet reports the loss of the host."""
    job = Job(hosts, 2, 2)
    try:
        at = reached(job, 15)
        hosts.cut()
        hosts.kill(1)
        time.sleep(20)
        hosts.fix()
        job.start(1)
        job.until(job.over)
        return ended(
            job,
            "host 1 loses power, back after 20 s, --nodes 2 --restarts 2",
            at,
            ["both finish with exit code 0"],
            [job.code(0) == job.code(1) == 0],
        )
    finally:
        hosts.fix()
        job.end()


def serving_killed(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, 1, 2)
    try:
        at = reached(job, 15)
        hosts.cut()
        hosts.kill(0)
        job.until(job.over)
        return ended(
            job,
            "host 0, which serves the rendezvous, loses power",
            at,
            ["host 1 exits with an error that says why"],
            [job.code(1) not in (None, 0) and "has not answered" in whole(job, 1)],
        )
    finally:
        hosts.fix()
        job.end()


CASES = {
    "undisturbed": undisturbed,
    "cut_5s": cut_5s,
    "cut_for_good": cut_for_good,
    "cut_elastic": cut_elastic,
    "killed": killed_elastic,
    "back": power_and_back,
    "serving": serving_killed,
}


def reached(job: Job, step: int) -> float:
    """Waits until this step is done and returns the time."""
    if job.until(lambda: any(line["step"] >= step for line in job.steps())) is None:
        raise SystemExit(f"the training did not reach step {step}: " + whole(job, 0) + whole(job, 1))
    return time.monotonic()


def whole(job: Job, host: int) -> str:
    return "".join(Path(name).read_text(errors="replace") for _, name in job.agents[host])


def rounds(job: Job) -> int:
    return len({line["rendezvous"] for line in job.steps()})


def ended(job: Job, name: str, at: float | None, expected: list[str], held: list[bool]) -> dict[str, Any]:
    """Returns the record of a case. ``at`` is the time of the fault."""
    steps = job.steps()
    after = [line["at"] - at for line in steps if at is not None and line["at"] > at + 0.5]
    times = [line["at"] for line in steps if line["world"] == 2]
    per_step = sorted(b - a for a, b in zip(times[::2], times[2::2], strict=False)) if at is None else []
    weights = job.folder / "weights.json"
    return {
        "case": name,
        "expected": expected,
        "held": held,
        "codes": [job.code(0), job.code(1)],
        "rounds": rounds(job),
        "longest_pause_s": max((b - a for a, b in zip([0.0, *after], after, strict=False)), default=None),
        "ended_s": None if at is None or not job.over() else time.monotonic() - at,
        "last_step": max(line["step"] for line in steps) + 1,
        "said": [job.said(0), job.said(1)],
        "step_ms": 1000 * per_step[len(per_step) // 2] if per_step else None,
        "weights": json.loads(weights.read_text()) if weights.exists() else None,
    }


def page(found: list[dict[str, Any]]) -> str:
    first = next((each for each in found if each["case"].startswith("undisturbed")), None)
    right = first["weights"]["digest"] if first and first["weights"] else None

    def weights(each: dict[str, Any]) -> str:
        if each["weights"] is None:
            return "no end"
        return (
            "bit for bit"
            if each["weights"]["digest"] == right
            else "other rounding: fewer ranks"
            if each["weights"]["world"] == 1
            else "**other**"
        )

    rows = [
        (
            each["case"],
            "; ".join(
                f"{'yes' if held else '**no**'}: {what}"
                for what, held in zip(each["expected"], each["held"], strict=True)
            ),
            "/".join("hangs" if code is None else str(code) for code in each["codes"]),
            each["rounds"],
            _seconds(each["longest_pause_s"]),
            _seconds(each["ended_s"]),
            f"{each['last_step']} of {STEPS}",
            weights(each),
        )
        for each in found
    ]
    said = [(each["case"], host, words) for each in found for host, words in enumerate(each["said"]) if words]
    held = sum(all(each["held"]) for each in found)
    hangs = sum(code is None for each in found for code in each["codes"])
    table = markdown_table(
        (
            "fault",
            "expected behaviour",
            "exit codes",
            "rounds",
            "longest pause",
            "all ended after",
            "steps",
            "final weights",
        ),
        rows,
    )
    return f"""# A training over two hosts under faults

{(__doc__ or "").strip()}

**{held} of {len(found)}** cases ended as expected; **{hangs}** hung (no end within {TIMEOUT_S:.0f} s).
A step takes {first["step_ms"] if first else float("nan"):.0f} ms over {RATE} without a fault.

{table}

Final weights are compared with those of the undisturbed run. No latency is added (this kernel may lack sch_netem).

## Last messages of the nodes

{markdown_table(("fault", "host", "message"), said)}
"""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"{', '.join(CASES)}, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made, found = stamp(), []
    hosts = Hosts()
    try:
        for name in args.only.split(",") if args.only else CASES:
            found.append(CASES[name](hosts))
            print(json.dumps(found[-1], indent=1), flush=True)
    finally:
        hosts.remove()
    text, _ = write_result("two_hosts", made, page(found), {"cases": found}, folder=args.out)
    print(text)


if __name__ == "__main__":
    main()
