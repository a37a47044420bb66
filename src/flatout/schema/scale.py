"""Input and records of `flatout scale`: links and networks, the timing of one device, and the predictions."""

import re
from dataclasses import dataclass, field, replace

from flatout.schema.errors import UsageError
from flatout.schema.records import ProgramRecord, Record

SCALE_SCHEMA = 1
GB = 1e9
MAX_DEVICES = 1 << 20
STRATEGIES = ("ddp", "fsdp", "hybrid", "local")


@dataclass
class Link(Record):
    """A link between devices, as a collective sees it.

    ``bandwidth_bytes_per_s`` is the achieved bandwidth in one direction. ``latency_us`` is per hop,
    ``start_us`` per collective. ``nics_per_node`` is the number of network cards per node, or 0 if each
    device has its own. ``contention`` is the share of its computation that a device loses while it fills this link."""

    name: str
    bandwidth_bytes_per_s: float
    latency_us: float
    start_us: float = 0.0
    nics_per_node: int = 0
    contention: float = 0.0
    is_intra_node: bool = False  # it joins the devices of one machine


def _nccl(
    name: str, gb_per_s: float, latency_us: float, is_intra_node: bool = False, contention: float = 0.1
) -> Link:
    # 8.4 us before the first hop: NCCL's own model of a ring with its Simple protocol, baseLat in
    # src/graph/tuning.cc (NVIDIA/nccl, commit 01afd20).
    return Link(
        name, gb_per_s * GB, latency_us, start_us=8.4, is_intra_node=is_intra_node, contention=contention
    )


def _ethernet(name: str, line_gbit_per_s: float) -> Link:
    # 1448 of 1538 bytes on the wire are payload: a frame has 1500 bytes of IPv4 and TCP with time stamps, and
    # 38 of Ethernet header, checksum, preamble and gap (IEEE 802.3; RFC 9293, RFC 7323). 25 us a hop is a
    # small message of MPICH through the kernel's TCP (osu_latency, gist jfgrimm/3af692a5475b). One card per
    # node. TCP may not fill 100 Gb/s: measure with `iperf3` and set the bandwidth explicitly.
    return Link(name, line_gbit_per_s / 8 * 1448 / 1538 * GB, 25.0, start_us=8.4, nics_per_node=1)


# Bandwidths of NVLink, PCIe and InfiniBand are those that NCCL assumes: src/graph/topo.h (NVIDIA/nccl, commit
# 069a3d4), in GB/s and one direction. Hops are hwLat of src/graph/tuning.cc (commit 01afd20), ring, Simple:
# NVLink 3.4 us, PCI 5.7 us, network 9.6 us.
#
# Contention: a byte that a GPU forwards and reduces, and copies into its bucket and out, crosses its memory
# about eight times, which keeps memory as busy as NVLink.
# Calibrated on one published run: BERT-large in float32 takes 446 ms on one V100 and 495 ms on eight.
# OVERHEAD of `flatout scale` plus all 19.6 ms of its all-reduce on NVLink are those 49 ms. Other links carry
# about a tenth of NVLink, so they take a tenth of the device.
LINKS = (
    _nccl("nvlink2", 6 * 20.0, 3.4, is_intra_node=True, contention=1.0),  # V100: 6 links, SM70_NVLINK_BW
    _nccl(
        "nvlink3", 235.0, 3.4, is_intra_node=True, contention=1.0
    ),  # A100: 12 links of SM80_NVLINK_BW are 240; tuning.cc expects 235
    _nccl(
        "nvlink4", 18 * 20.6, 3.4, is_intra_node=True, contention=1.0
    ),  # H100, H200: 18 links, SM90_NVLINK_BW; "370 GB/s" in NVIDIA/nccl-tests issue 212
    _nccl("nvlink5", 18 * 40.1, 3.4, is_intra_node=True, contention=1.0),  # B200: 18 links, SM100_NVLINK_BW
    _nccl("pcie3", 12.0, 5.7, is_intra_node=True),  # x16, PCI_BW
    _nccl("pcie4", 24.0, 5.7, is_intra_node=True),  # twice the rate of the third generation (PCI-SIG)
    _nccl("pcie5", 48.0, 5.7, is_intra_node=True),  # twice the rate of the fourth
    # InfiniBand: NET_BW is 12 of a line's 12.5 GB/s; four HDR cards reach 96 of 100 in NVIDIA/nccl-tests
    # issue 119. One card per device, as in DGX A100 (8 HDR) and DGX H100 (8 NDR), unless `cards=` overrides
    # it. Rates: InfiniBand Trade Association, "InfiniBand Roadmap".
    _nccl("ib-edr", 12.0, 9.6),  # 100 Gb/s
    _nccl("ib-hdr", 24.0, 9.6),  # 200 Gb/s
    _nccl("ib-ndr", 48.0, 9.6),  # 400 Gb/s
    _nccl("ib-xdr", 96.0, 9.6),  # 800 Gb/s
    _ethernet("ethernet-1g", 1.0),
    _ethernet("ethernet-10g", 10.0),
    _ethernet("ethernet-25g", 25.0),
    _ethernet("ethernet-100g", 100.0),
    _ethernet("ethernet-200g", 200.0),
    # gloo between two processes of one machine: the fastest of 60 to 400 all-reduces each of 4 KiB to 16 MiB
    # (2 cores of an AMD EPYC 9004, torch 2.14.1, busy machine, 2026-11-22). The processes move the bytes
    # themselves; `bench/scaling.py --here` measures what is left for computation.
    Link("loopback", 1.1 * GB, 130.0, contention=0.9, is_intra_node=True),
)
NETWORKS = {link.name: link for link in LINKS}

_RATE = re.compile(r"([\d.]+)\s*([kmgt]?)(b|B|bit|byte)s?(?:/s|ps)")
_TIME = re.compile(r"([\d.]+)\s*(ns|us|µs|ms|s)")
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


def read_link(text: str, option: str = "--network") -> Link:
    """Parse ``ib-ndr``, ``ib-ndr,cards=4`` or ``bandwidth=100Gb/s,latency=5us``.

    Settings after a name change that link. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    preset = NETWORKS.get(parts[0].lower()) if parts and "=" not in parts[0] else None
    if not parts or ("=" not in parts[0] and preset is None):
        raise UsageError(
            f"{option}: unknown network {text!r}. Known names: {', '.join(NETWORKS)}; or set bandwidth=100Gb/s,latency=5us."
        )
    settings = dict(part.partition("=")[::2] for part in (parts[1:] if preset else parts))
    if preset is None and "bandwidth" not in settings:
        raise UsageError(
            f"{option} {text}: a custom network needs a bandwidth, as in bandwidth=100Gb/s,latency=5us."
        )
    link = replace(preset, name=text) if preset else Link(text, 0.0, 0.0, is_intra_node=option == "--inside")
    for name, value in settings.items():
        link = _with_setting(link, name.strip(), value.strip(), option)
    return link


def _with_setting(link: Link, name: str, value: str, option: str) -> Link:
    try:
        if name == "bandwidth":
            # Only the case of the unit distinguishes bits from bytes: 100Gb/s is an eighth of 100GB/s.
            match = _RATE.fullmatch(re.sub(r"^([\d.]+\s*)([KMGT])", lambda m: m[1] + m[2].lower(), value))
            if (
                match
                and (rate := float(match[1]) * _POWERS[match[2]] / (1 if match[3] in ("B", "byte") else 8))
                > 0
            ):
                return replace(link, bandwidth_bytes_per_s=rate)
        elif name in ("latency", "start") and (match := _TIME.fullmatch(value)):
            microseconds = float(match[1]) * _MICROSECONDS[match[2]]
            if name == "latency":
                return replace(link, latency_us=microseconds)
            return replace(link, start_us=microseconds)
        elif name == "cards" and int(value) >= 0:
            return replace(link, nics_per_node=int(value))
        elif name == "contention" and 0 <= float(value) <= 1:
            return replace(link, contention=float(value))
    except ValueError:
        pass
    raise UsageError(
        f"{option}: {name}={value} is invalid. Use bandwidth=100Gb/s (bits) or 12.5GB/s (bytes), latency=5us, start=10us, cards=8 (per node; "
        "0: one per device), contention=0.2 (share of concurrent computation that is lost)."
    )


def read_devices(text: str) -> list[int]:
    """Parse ``8``, ``1,2,6`` or ``8..1024``, which doubles. Raises UsageError."""
    counts: list[int] = []
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        if (
            not low.isdigit()
            or (dots and not high.isdigit())
            or not 1 <= int(low) <= int(high or low) <= MAX_DEVICES
        ):
            raise UsageError(
                f"--gpus {text}: {part.strip()!r} is not a number of devices. Use 8, or 1,2,4, or 8..1024, which doubles from 8."
            )
        count, last = int(low), int(high or low)
        while count <= last:
            counts.append(count)
            count *= 2
    return sorted(set(counts))


@dataclass
class Timing(Record):
    """Time of one device for one step with ``samples`` samples.

    ``other_ms`` is the wait for data, copies and everything in no other phase. ``passes`` are the backward
    passes of a step; forward and backward are sums over them."""

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    other_ms: float = 0.0
    samples: float | None = None
    passes: int = 1

    @property
    def step_ms(self) -> float:
        return self.other_ms + self.forward_ms + self.backward_ms + self.optimizer_ms


@dataclass
class ScalePoint(Record):
    """Prediction of one strategy at one number of devices.

    ``step_ms`` is the sum of computation, overhead and exposed communication. ``efficiency`` is the samples/s
    of all devices relative to the same number of independent devices. ``wire_bytes`` is what each device
    sends per step. ``why_not`` is the reason for an impossible point, whose figures are None."""

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
    """Result of `flatout scale`.

    ``timing`` is as measured. ``compute_scale`` is how many times as fast the target device is."""

    schema: int = SCALE_SCHEMA
    scaling: str = "weak"  # weak | strong
    network: Link | None = None
    intra_node_link: Link | None = None
    devices_per_node: int = 1
    timing: Timing | None = None
    fixed_share: float = 0.0  # share of a step's computation that does not shrink with the batch
    compute_scale: float = 1.0
    overhead: float = 0.0  # as a share of computation, with more than one device
    local_steps: int = 1
    parameter_bytes: float = 0.0
    # Of the gradients, in the order in which they become ready
    tensor_bytes: list[int] = field(default_factory=list)
    timing_source: str = ""
    points: list[ScalePoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self, strategy: str) -> list[ScalePoint]:
        return [point for point in self.points if point.strategy == strategy]
