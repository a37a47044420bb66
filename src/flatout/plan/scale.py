"""What `flatout scale` foretells: links and networks by name or by hand, what one device needs for a step, and the record."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from flatout.plan.errors import UsageError
from flatout.plan.records import ProgramRecord, Record

SCALE_SCHEMA = 1
GB = 1e9
MOST_DEVICES = 1 << 20
STRATEGIES = ("ddp", "fsdp", "hybrid", "local")


@dataclass
class Link(Record):
    """What carries bytes from one device to the next, as a collective sees it.

    ``bandwidth_bytes_per_s`` is what gets through in one direction; ``latency_us`` is of one hop, ``start_us`` of a whole collective. ``cards`` are the
    network cards of a node, 0 where each device has its own. ``contention`` is the share of its computing that a device loses while it fills this link.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_us: float
    start_us: float = 0.0
    cards: int = 0
    contention: float = 0.0
    inside: bool = False  # it joins the devices of one machine


def _nccl(name: str, gb_per_s: float, latency_us: float, inside: bool = False, contention: float = 0.1) -> Link:
    # 8.4 us before the first hop: NCCL's own model of a ring with its Simple protocol, baseLat in src/graph/tuning.cc (NVIDIA/nccl, commit 01afd20).
    return Link(name, gb_per_s * GB, latency_us, start_us=8.4, inside=inside, contention=contention)


def _ethernet(name: str, line_gbit_per_s: float) -> Link:
    # 1448 of 1538 bytes on the wire are the program's: 1500 bytes of IPv4 and TCP with time stamps, and 38 of Ethernet's header, check, preamble and gap
    # (IEEE 802.3; RFC 9293, RFC 7323). 25 us a hop is a small message of MPICH through the kernel's TCP (osu_latency, gist jfgrimm/3af692a5475b).
    # One card a node. TCP may not fill 100 Gb/s: what `iperf3` gives can be said by hand.
    return Link(name, line_gbit_per_s / 8 * 1448 / 1538 * GB, 25.0, start_us=8.4, cards=1)


# Bandwidths of NVLink, PCIe and InfiniBand are those that NCCL counts on: src/graph/topo.h (NVIDIA/nccl, commit 069a3d4), in GB/s and one direction. Hops
# are hwLat of src/graph/tuning.cc (commit 01afd20), ring, Simple: NVLink 3.4 us, PCI 5.7 us, network 9.6 us.
# Contention: a byte that a GPU sends on and adds up, and copies into its bucket and out, crosses its memory about eight times, which keeps it as busy as NVLink
# is. Calibrated on one published run: BERT-large in float32 takes 446 ms on one V100 and 495 on eight; OVERHEAD of `flatout scale` and the 19.6 ms of
# its all-reduce on NVLink, all of them, are those 49. Other links carry about a tenth of what NVLink does, so they take a tenth of the device.
LINKS = (
    _nccl("nvlink2", 6 * 20.0, 3.4, inside=True, contention=1.0),  # V100: 6 links, SM70_NVLINK_BW
    _nccl("nvlink3", 235.0, 3.4, inside=True, contention=1.0),  # A100: 12 links of SM80_NVLINK_BW are 240; tuning.cc expects 235
    _nccl("nvlink4", 18 * 20.6, 3.4, inside=True, contention=1.0),  # H100, H200: 18 links, SM90_NVLINK_BW; "370 GB/s" in NVIDIA/nccl-tests issue 212
    _nccl("nvlink5", 18 * 40.1, 3.4, inside=True, contention=1.0),  # B200: 18 links, SM100_NVLINK_BW
    _nccl("pcie3", 12.0, 5.7, inside=True),  # x16, PCI_BW
    _nccl("pcie4", 24.0, 5.7, inside=True),  # twice the rate of the third generation (PCI-SIG)
    _nccl("pcie5", 48.0, 5.7, inside=True),  # twice the rate of the fourth
    # InfiniBand: NET_BW is 12 of a line's 12.5 GB/s; four HDR cards come to 96 of 100 in NVIDIA/nccl-tests issue 119. A card for each device, as in DGX A100
    # (8 HDR) and DGX H100 (8 NDR); `cards=` says otherwise. Rates: InfiniBand Trade Association, "InfiniBand Roadmap".
    _nccl("ib-edr", 12.0, 9.6),  # 100 Gb/s
    _nccl("ib-hdr", 24.0, 9.6),  # 200 Gb/s
    _nccl("ib-ndr", 48.0, 9.6),  # 400 Gb/s
    _nccl("ib-xdr", 96.0, 9.6),  # 800 Gb/s
    _ethernet("ethernet-1g", 1.0),
    _ethernet("ethernet-10g", 10.0),
    _ethernet("ethernet-25g", 25.0),
    _ethernet("ethernet-100g", 100.0),
    _ethernet("ethernet-200g", 200.0),
    # gloo between two processes of one machine: the quickest of 60 to 400 all-reduces each of 4 KiB to 16 MiB (2 cores of an AMD EPYC 9004, torch 2.14.1, busy
    # machine, 2026-11-22). Processes carry the bytes themselves; `bench/scaling.py --here` measures what is left for computing.
    Link("loopback", 1.1 * GB, 130.0, contention=0.9, inside=True),
)
NETWORKS = {link.name: link for link in LINKS}

_RATE = re.compile(r"([\d.]+)\s*([kmgt]?)(b|B|bit|byte)s?(?:/s|ps)")
_TIME = re.compile(r"([\d.]+)\s*(ns|us|µs|ms|s)")
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


def read_link(text: str, option: str = "--network") -> Link:
    """``ib-ndr``; ``ib-ndr,cards=4``; ``bandwidth=100Gb/s,latency=5us``. What is written beside a name changes that link. Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = NETWORKS.get(words[0].lower()) if words and "=" not in words[0] else None
    if not words or ("=" not in words[0] and known is None):
        raise UsageError(f"{option}: {text!r} is no network that has a name here. Names: {', '.join(NETWORKS)}; or by hand, bandwidth=100Gb/s,latency=5us.")
    said = dict(word.partition("=")[::2] for word in (words[1:] if known else words))
    if known is None and "bandwidth" not in said:
        raise UsageError(f"{option} {text}: a network by hand needs its bandwidth, as in bandwidth=100Gb/s,latency=5us.")
    link = replace(known, name=text) if known else Link(text, 0.0, 0.0, inside=option == "--inside")
    for name, value in said.items():
        link = _with(link, name.strip(), value.strip(), option)
    return link


def _with(link: Link, name: str, value: str, option: str) -> Link:
    try:
        if name == "bandwidth":
            # Only the letter of the unit tells bits from bytes; 100Gb/s is an eighth of 100GB/s.
            found = _RATE.fullmatch(re.sub(r"^([\d.]+\s*)([KMGT])", lambda m: m[1] + m[2].lower(), value))
            rate = float(found[1]) * _POWERS[found[2]] / (1 if found[3] in ("B", "byte") else 8) if found else 0.0
            if rate > 0:
                return replace(link, bandwidth_bytes_per_s=rate)
        elif name in ("latency", "start"):
            found = _TIME.fullmatch(value)
            if found:
                microseconds = float(found[1]) * _MICROSECONDS[found[2]]
                return replace(link, latency_us=microseconds) if name == "latency" else replace(link, start_us=microseconds)
        elif name == "cards" and int(value) >= 0:
            return replace(link, cards=int(value))
        elif name == "contention" and 0 <= float(value) <= 1:
            return replace(link, contention=float(value))
    except ValueError:
        pass
    raise UsageError(f"{option}: {name}={value} cannot be read. Write bandwidth=100Gb/s (bits) or 12.5GB/s (bytes), latency=5us, start=10us, cards=8 (a node; "
                     "0: one a device), contention=0.2 (of the computing beside it).")


def read_devices(text: str) -> list[int]:
    """``8``; ``1,2,6``; ``8..1024``, which doubles. Raises UsageError."""
    found: list[int] = []
    for word in text.split(","):
        low, dots, high = word.strip().partition("..")
        if not low.isdigit() or (dots and not high.isdigit()) or not 1 <= int(low) <= int(high or low) <= MOST_DEVICES:
            raise UsageError(f"--gpus {text}: {word.strip()!r} is no number of devices. Write 8, or 1,2,4, or 8..1024, which doubles from 8 on.")
        count, last = int(low), int(high or low)
        while count <= last:
            found.append(count)
            count *= 2
    return sorted(set(found))


@dataclass
class Timing(Record):
    """What one device needs for one step with ``samples`` samples. ``host_ms`` is waiting for data, copies and everything in no other phase.

    ``passes`` are the backward passes of a step; forward and backward are the sum over them.
    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    host_ms: float = 0.0
    samples: float | None = None
    passes: int = 1

    @property
    def step_ms(self) -> float:
        return self.host_ms + self.forward_ms + self.backward_ms + self.optimizer_ms


@dataclass
class ScalePoint(Record):
    """One strategy on so many devices. ``step_ms`` is the sum of computing, overhead and what of the communication nothing hides.

    ``efficiency`` is the samples/s of all devices over those of as many alone. ``wire_bytes`` is what each device sends in a step. ``why_not``: a sentence
    where the point cannot be; then the figures are None.
    """

    strategy: str
    devices: int
    samples: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    overhead_ms: float | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    wire_bytes: float | None = None
    efficiency: float | None = None
    collective: str = ""
    bound: str = ""
    why_not: str = ""


@dataclass
class ScaleRecord(ProgramRecord):
    """``timing`` is as measured; ``compute_scale`` says how many times faster the device is that the prediction is for."""

    schema: int = SCALE_SCHEMA
    scaling: str = "weak"  # weak | strong
    network: Link | None = None
    inside: Link | None = None
    node: int = 1
    timing: Timing | None = None
    second: Timing | None = None  # another batch size, for strong scaling
    fixed_share: float | None = None  # of a step's computing, however small the batch; where there is no second point
    compute_scale: float = 1.0
    overhead: float = 0.0  # of the computing, where there is more than one device
    local_steps: int = 1
    parameter_bytes: float = 0.0
    tensor_bytes: list[int] = field(default_factory=list)  # of the gradients, in the order in which they become ready
    measured: str = ""  # where the times come from
    points: list[ScalePoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self, strategy: str) -> list[ScalePoint]:
        return [point for point in self.points if point.strategy == strategy]
