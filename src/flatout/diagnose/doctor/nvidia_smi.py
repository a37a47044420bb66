"""Parses what nvidia-smi and the kernel report about the GPUs. Nothing is judged here.

The XML comes from `nvidia-smi -q -x`. `flatout doctor --all` quotes the rest of what nvidia-smi says.
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import lru_cache

from flatout.schema.machine_snapshot import MachineSnapshot

NO_VALUE = {
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
    pid: int
    name: str
    kind: str  # C, G, C+G


@dataclass(frozen=True)
class GpuStatus:
    """One GPU. Values that the driver does not report are None; units are in the names."""

    index: int
    name: str
    uuid: str | None = None
    memory_mib: float | None = None
    used_mib: float | None = None
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True)
class SmiReport:
    driver: str | None
    cuda: str | None
    gpus: tuple[GpuStatus, ...]


def smi_report(snapshot: MachineSnapshot) -> SmiReport | None:
    """The output of `nvidia-smi -q -x`; None if it did not run or did not print this XML."""
    run = snapshot.command_results.get("nvidia-smi")
    return _read(run.out) if run else None


@lru_cache(maxsize=4)
def _read(text: str) -> SmiReport | None:
    """Cached, because several checks use it and eight GPUs fill half a megabyte."""
    start = text.find("<nvidia_smi_log>")
    if start < 0:
        return None
    try:
        log = ElementTree.fromstring(text[start:])
    except ElementTree.ParseError:
        return None
    gpus = tuple(_gpu_status(index, gpu) for index, gpu in enumerate(log.findall("gpu")))
    return SmiReport(_text(log, "driver_version"), _text(log, "cuda_version"), gpus)


def _gpu_status(index: int, gpu: ElementTree.Element) -> GpuStatus:
    return GpuStatus(
        index=index,
        name=_text(gpu, "product_name") or "a GPU",
        uuid=_text(gpu, "uuid"),
        memory_mib=_number(gpu, "fb_memory_usage/total"),
        used_mib=_number(gpu, "fb_memory_usage/used"),
        processes=_processes(gpu),
    )


def _text(node: ElementTree.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return None if text.lower() in NO_VALUE else text


def _number(node: ElementTree.Element, path: str) -> float | None:
    """The number in "81559 MiB"."""
    match = re.match(r"(\d+(?:\.\d+)?)", _text(node, path) or "")
    return float(match[1]) if match else None


def _processes(gpu: ElementTree.Element) -> tuple[GpuProcess, ...] | None:
    node = gpu.find("processes")
    if node is None:
        return None
    return tuple(
        GpuProcess(
            int(_number(process, "pid") or 0),
            _text(process, "process_name") or "?",
            _text(process, "type") or "?",
        )
        for process in node.findall("process_info")
    )


def driver_version(snapshot: MachineSnapshot) -> str | None:
    """The driver version from nvidia-smi, or from the kernel module's file if nvidia-smi is missing."""
    report = smi_report(snapshot)
    if report and report.driver:
        return report.driver
    match = re.search(
        r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", snapshot.text("/proc/driver/nvidia/version") or ""
    )
    return match[1] if match else None


def has_gpu(snapshot: MachineSnapshot) -> bool | None:
    """Whether nvidia-smi, torch, the kernel or the PCI bus shows an NVIDIA GPU; None if unknown."""
    report, cuda = smi_report(snapshot), snapshot.torch.get("cuda")
    if (
        (report and report.gpus)
        or (isinstance(cuda, dict) and cuda.get("devices"))
        or snapshot.text("/proc/driver/nvidia/version")
        or any(re.fullmatch(r"nvidia\d+", name) for name in snapshot.folders.get("/dev") or ())
    ):
        return True
    return snapshot.has_nvidia_on_pci
