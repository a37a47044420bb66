"""Parses what nvidia-smi and the kernel report about the GPUs. Nothing is judged here.

The XML comes from `nvidia-smi -q -x`. Its names changed over the years (nvsmi_device_v10 to v13), so each
value has its known spellings.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from functools import lru_cache

from flatout.schema.machine_snapshot import MachineSnapshot

NONE = {
    "n/a",
    "[n/a]",
    "none",
    "unknown error",
    "requested functionality has been deprecated",
    "not supported",
    "insufficient permissions",
    "",
}


@dataclass(frozen=True)
class GpuProcess:
    number: int
    name: str
    kind: str  # C, G, C+G
    used_mib: float | None


@dataclass(frozen=True)
class GpuStatus:
    """One GPU. Values that the driver does not report are None; units are in the names."""

    index: int
    name: str
    uuid: str | None = None
    memory_mib: float | None = None
    used_mib: float | None = None
    capability: tuple[int, int] | None = None
    graphics_mhz: float | None = None
    max_graphics_mhz: float | None = None
    application_mhz: float | None = None
    default_application_mhz: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None
    slowdown_c: float | None = None
    performance_state: str | None = None
    reasons: dict[str, bool] | None = None  # why clocks are below their maximum: reason -> active
    ecc: str | None = None
    ecc_uncorrectable: int | None = None
    remap_pending: str | None = None
    remap_failed: str | None = None
    retirement_pending: str | None = None
    mig: str | None = None
    mig_instances: int = 0
    persistence: str | None = None
    compute_mode: str | None = None
    link_generation: float | None = None
    max_link_generation: float | None = None
    link_width: float | None = None
    max_link_width: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class SmiReport:
    driver: str | None
    cuda: str | None
    boards: tuple[GpuStatus, ...]


def listing(snapshot: MachineSnapshot) -> SmiReport | None:
    """The output of `nvidia-smi -q -x`; None if it did not run or did not print this XML."""
    run, info = snapshot.runs.get("nvidia-smi"), snapshot.runs.get("nvidia-smi capability")
    return _read(run.out, info.out if info else "") if run else None


@lru_cache(maxsize=4)
def _read(text: str, capabilities: str) -> SmiReport | None:
    """Cached, because a dozen checks use it and eight GPUs fill half a megabyte."""
    start = text.find("<nvidia_smi_log>")
    if start < 0:
        return None
    try:
        log = ElementTree.fromstring(text[start:])
    except ElementTree.ParseError:
        return None
    known = _capabilities(capabilities)
    boards = tuple(_board(at, gpu, known) for at, gpu in enumerate(log.findall("gpu")))
    return SmiReport(_word(log, "driver_version"), _word(log, "cuda_version"), boards)


def _board(index: int, gpu: ElementTree.Element, capabilities: dict[str, tuple[int, int]]) -> GpuStatus:
    power = "gpu_power_readings" if gpu.find("gpu_power_readings") is not None else "power_readings"
    uuid = _word(gpu, "uuid")
    return GpuStatus(
        index=index,
        name=_word(gpu, "product_name") or "a GPU",
        uuid=uuid,
        where=gpu.get("id", ""),
        memory_mib=_number(gpu, "fb_memory_usage/total"),
        used_mib=_number(gpu, "fb_memory_usage/used"),
        capability=capabilities.get(uuid or "") or capabilities.get(str(index)),
        graphics_mhz=_number(gpu, "clocks/graphics_clock"),
        max_graphics_mhz=_number(gpu, "max_clocks/graphics_clock"),
        application_mhz=_number(gpu, "applications_clocks/graphics_clock"),
        default_application_mhz=_number(gpu, "default_applications_clocks/graphics_clock"),
        power_limit_w=_number(
            gpu, f"{power}/current_power_limit", f"{power}/enforced_power_limit", f"{power}/power_limit"
        ),
        default_power_limit_w=_number(gpu, f"{power}/default_power_limit"),
        temperature_c=_number(gpu, "temperature/gpu_temp"),
        slowdown_c=_number(gpu, "temperature/gpu_temp_slow_threshold"),
        performance_state=_word(gpu, "performance_state"),
        reasons=_reasons(gpu),
        ecc=_setting(gpu, "ecc_mode/current_ecc"),
        ecc_uncorrectable=_uncorrectable(gpu),
        remap_pending=_word(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_word(gpu, "remapped_rows/remapped_row_failure"),
        retirement_pending=_word(gpu, "retired_pages/pending_retirement"),
        mig=_setting(gpu, "mig_mode/current_mig"),
        mig_instances=len(gpu.findall("mig_devices/mig_device")),
        persistence=_word(gpu, "persistence_mode"),
        compute_mode=_word(gpu, "compute_mode"),
        link_generation=_number(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        max_link_generation=_number(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        link_width=_number(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        max_link_width=_number(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        processes=_processes(gpu),
    )


def _word(node: ElementTree.Element, *paths: str) -> str | None:
    """The first of several spellings with a value."""
    for path in paths:
        text = (node.findtext(path) or "").strip()
        if text.lower() not in NONE:
            return text
    return None


def _setting(node: ElementTree.Element, path: str) -> str | None:
    """A setting that this GPU may not have: "N/A" is a value, a missing line is not."""
    text = (node.findtext(path) or "").strip()
    return text if text in ("Enabled", "Disabled", "N/A") else None


def _number(node: ElementTree.Element, *paths: str) -> float | None:
    """The number in "230.00 W", "16x", "4"."""
    for path in paths:
        found = re.match(r"(\d+(?:\.\d+)?)", _word(node, path) or "")
        if found:
            return float(found[1])
    return None


def _reasons(gpu: ElementTree.Element) -> dict[str, bool] | None:
    for kind in ("event", "throttle"):
        node = gpu.find(f"clocks_{kind}_reasons")
        if node is not None:
            start = f"clocks_{kind}_reason_"
            return {
                each.tag.removeprefix(start): (each.text or "").strip() == "Active"
                for each in node
                if each.tag.startswith(start)
            }
    return None


def _uncorrectable(gpu: ElementTree.Element) -> int | None:
    """Uncorrectable errors since the driver was loaded; the spelling depends on the architecture."""
    node = gpu.find("ecc_errors/volatile")
    if node is None:
        return None
    counts = [
        number
        for each in node.iter()
        if "uncorrectable" in each.tag and (number := _number(each, ".")) is not None
    ]
    total = [
        number for each in node.findall("double_bit/total") if (number := _number(each, ".")) is not None
    ]
    return int(sum(counts or total)) if counts or total else None


def _processes(gpu: ElementTree.Element) -> tuple[GpuProcess, ...] | None:
    node = gpu.find("processes")
    if node is None:
        return None
    return tuple(
        GpuProcess(
            int(_number(each, "pid") or 0),
            _word(each, "process_name") or "?",
            _word(each, "type") or "?",
            _number(each, "used_memory"),
        )
        for each in node.findall("process_info")
    )


def _capabilities(text: str) -> dict[str, tuple[int, int]]:
    """Compute capability by UUID and by index. Drivers before 510 do not report it."""
    found: dict[str, tuple[int, int]] = {}
    for m in re.finditer(r"^(\d+), (\S+), (\d+)\.(\d+)$", text, re.MULTILINE):
        found[m[1]] = found[m[2]] = (int(m[3]), int(m[4]))
    return found


def driver_version(snapshot: MachineSnapshot) -> str | None:
    """The driver version from nvidia-smi, or from the kernel module's file if nvidia-smi is missing."""
    seen = listing(snapshot)
    if seen and seen.driver:
        return seen.driver
    found = re.search(
        r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", snapshot.text("/proc/driver/nvidia/version") or ""
    )
    return found[1] if found else None


def gpu_is_here(snapshot: MachineSnapshot) -> bool | None:
    """Whether nvidia-smi, torch, the kernel or the PCI bus shows an NVIDIA GPU; None if unknown."""
    seen, torch = listing(snapshot), snapshot.torch.get("cuda")
    if seen and seen.boards:
        return True
    if isinstance(torch, dict) and torch.get("devices"):
        return True
    if snapshot.text("/proc/driver/nvidia/version") or [
        n for n in snapshot.folders.get("/dev") or () if re.fullmatch(r"nvidia\d+", n)
    ]:
        return True
    return snapshot.pci_nvidia
