"""Tests a training over two hosts with a cut link and a killed host: does it continue, restart or end, and when?

The hosts are network namespaces of this machine with separate addresses. A third namespace is the router
between them, with ports limited to 100 Mbit/s. A cut stops the router's forwarding, so neither host sees its
own link go down. Each host runs `flatout run --procs 1 torchrun --nnodes 2 ...` of a small training for one
device. flatout splits it over the two ranks; torchrun finds the other host, and ends or restarts its rank. This
is no comparison of times: seconds are from the fault to the result, measured once each.
"""

from __future__ import annotations

import argparse
import itertools
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


PLAN = """
[levers.data_parallel.value]
reduction = "mean"
batches = "index"
loaders = "0"
batchnorm = "own"
draws = "own"
"""


class Job:
    """One training over both hosts, in a folder that both can access."""

    def __init__(self, hosts: Hosts, nodes: str, restarts: int) -> None:
        self.hosts, self.folder = hosts, Path(tempfile.mkdtemp(prefix="flatout-two-hosts-"))
        (self.folder / "plan.toml").write_text(PLAN)
        self.agents: list[list[Any]] = [[], []]
        for host in (0, 1):
            self.start(host, nodes, restarts)

    def start(self, host: int, nodes: str, restarts: int) -> None:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            nodes,
            "--max-restarts",
            str(restarts),
        ]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.hosts.addresses[0]}:{PORT}"]
        # Both hosts have the name of this machine, so torchrun cannot tell which one has the address.
        torchrun += ["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", self.hosts.addresses[host]]
        flatout = [sys.executable, "-m", "flatout", "run", "--plan", "plan.toml", "--procs", "1"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(SRC),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        said = (self.folder / f"host{host}.{len(self.agents[host])}.txt").open("w")
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self.hosts.names[host],
                *flatout,
                *torchrun,
                str(PROGRAM),
                str(self.folder),
                str(STEPS),
            ],
            env=environment,
            cwd=self.folder,
            stdout=said,
            stderr=said,
        )
        self.agents[host].append((process, said.name))

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "steps.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

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
        """The last line that names an error."""
        lines = whole(self, host).splitlines()
        return next((line.strip() for line in reversed(lines) if "Error: " in line), "")

    def end(self) -> None:
        for host in (0, 1):
            self.hosts.kill(host)
        for agent, _ in (each for agents in self.agents for each in agents):
            agent.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def undisturbed(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, "2", 0)
    try:
        job.until(job.over)
        return ended(
            job, "undisturbed, two nodes", None, ["both nodes end with 0"], [job.code(0) == job.code(1) == 0]
        )
    finally:
        job.end()


def cut_5s(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, "2", 0)
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


def killed(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, "2", 0)
    try:
        at = reached(job, 15)
        hosts.kill(1)
        job.until(job.over)
        return ended(
            job,
            "all processes of host 1 killed, --nnodes 2",
            at,
            ["host 0 exits with an error", "its error names host 1"],
            [job.code(0) not in (None, 0), hosts.addresses[1] in job.said(0)],
        )
    finally:
        job.end()


def killed_elastic(hosts: Hosts) -> dict[str, Any]:
    job = Job(hosts, "1:2", 2)
    try:
        at = reached(job, 15)
        hosts.kill(1)
        job.until(job.over)
        return ended(
            job,
            "all processes of host 1 killed, --nnodes 1:2 --max-restarts 2",
            at,
            ["host 0 finishes as a single node", "its error names host 1"],
            [job.code(0) == 0, hosts.addresses[1] in job.said(0)],
        )
    finally:
        job.end()


CASES = {"undisturbed": undisturbed, "cut_5s": cut_5s, "killed": killed, "killed_elastic": killed_elastic}


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
    times = [line["at"] for line in steps]
    per_step = sorted(b - a for a, b in itertools.pairwise(times)) if at is None else []
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
            else "different rounding: fewer ranks"
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
