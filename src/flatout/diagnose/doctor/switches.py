"""Checks of variables left over from debugging and switches that cost speed."""

from __future__ import annotations

from flatout.diagnose.doctor.check import CheckOutcome, machine_check, note, ok, warning
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "switches"
OFF = (None, "", "0", "OFF", "off", "False", "false")


def _on(snapshot: MachineSnapshot, *names: str) -> list[str]:
    return [name for name in names if snapshot.variable(name) not in OFF]


def _spelled(snapshot: MachineSnapshot, names: list[str]) -> str:
    return ", ".join(f"{name}={snapshot.variable(name)}" for name in names)


@machine_check("FD100", THEME, ["environment"])
def cuda_debugging(snapshot: MachineSnapshot) -> CheckOutcome:
    """CUDA debugging is off.

    Why it matters:
        CUDA_LAUNCH_BLOCKING makes the processor wait for every kernel. The memory checks of cuda-memcheck and
        device-side assertions slow kernels down several times.
    How to fix it:
        `unset CUDA_LAUNCH_BLOCKING TORCH_USE_CUDA_DSA`.
    """
    slow = _on(
        snapshot,
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_WAITS_ON_EXCEPTION",
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
        "PYTORCH_CUDA_DSA_STACKTRACING",
    )
    if slow:
        return warning(
            f"{_spelled(snapshot, slow)}: the processor waits for every kernel", f"unset {' '.join(slow)}"
        )
    dsa = _on(snapshot, "TORCH_USE_CUDA_DSA", "CUDA_DISABLE_PTX_JIT", "CUDA_FORCE_PTX_JIT")
    if dsa:
        return note(f"{_spelled(snapshot, dsa)}: a debugging switch", f"unset {' '.join(dsa)}")
    return ok("no CUDA debugging variable is set")


@machine_check("FD101", THEME, ["environment"])
def nccl_switches(snapshot: MachineSnapshot) -> CheckOutcome:
    """NCCL uses all of its links.

    Why it matters:
        NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_IB_DISABLE, often copied from a forum to avoid a hang,
        send gradients over the slowest path. NCCL_DEBUG=TRACE writes a line for every message.
    How to fix it:
        `unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE`.
    """
    slow = _on(snapshot, "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_DISABLE")
    slow += [name for name in ("NCCL_DEBUG",) if (snapshot.variable(name) or "").upper() == "TRACE"]
    if slow:
        return warning(f"{_spelled(snapshot, slow)}: gradients take a slower path", f"unset {' '.join(slow)}")
    seen = sorted(name for name in snapshot.environment or () if name.startswith("NCCL_"))
    if seen:
        return note(_spelled(snapshot, seen), f"unset {' '.join(seen)}")
    return ok("no NCCL variable is set")


@machine_check("FD102", THEME, ["environment"])
def torch_switches(snapshot: MachineSnapshot) -> CheckOutcome:
    """torch runs without debugging switches.

    Why it matters:
        TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective. TORCHDYNAMO_DISABLE disables torch.compile.
        NVIDIA_TF32_OVERRIDE=0 disables Tensor Cores for float32 in every library.
    How to fix it:
        `unset` the named variable.
    """
    slow = _on(
        snapshot,
        "TORCHDYNAMO_DISABLE",
        "TORCH_COMPILE_DISABLE",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "TORCH_SHOW_DISPATCH_TRACE",
        "PYTORCH_JIT_LOG_LEVEL",
    )
    if snapshot.variable("NVIDIA_TF32_OVERRIDE") == "0":
        slow.append("NVIDIA_TF32_OVERRIDE")
    if (snapshot.variable("TORCH_DISTRIBUTED_DEBUG") or "").upper() == "DETAIL":
        slow.append("TORCH_DISTRIBUTED_DEBUG")
    if slow:
        return warning(
            f"{_spelled(snapshot, slow)}: a debugging switch that slows training down",
            f"unset {' '.join(slow)}",
        )
    seen = _on(
        snapshot,
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_CPP_LOG_LEVEL",
        "CUBLAS_WORKSPACE_CONFIG",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "DNNL_VERBOSE",
        "MKL_VERBOSE",
    )
    if seen:
        return note(_spelled(snapshot, seen), f"unset {' '.join(seen)}")
    return ok("no torch debugging variable is set")


QUESTIONS = (cuda_debugging, nccl_switches, torch_switches)
