"""The check that the memory of each GPU is free."""

from flatout.diagnose.doctor.check import CheckOutcome, machine_check, not_checked, note, ok, warning
from flatout.diagnose.doctor.nvidia_smi import GpuStatus, smi_report
from flatout.schema.machine_snapshot import MachineSnapshot

WORST_FIRST = ("warning", "not checked", "note", "ok")


@machine_check("FD030", "GPUs", ["run nvidia-smi"], gpu=True)
def free_memory(snapshot: MachineSnapshot) -> CheckOutcome:
    """No other process uses the GPU.

    Why it matters:
        Another process takes memory and time: runs end out of memory, and every measured time is wrong.
    How to fix it:
        Find the process with `nvidia-smi`. End it, or use another GPU with CUDA_VISIBLE_DEVICES.
    """
    report = smi_report(snapshot)
    if report is None or not report.gpus:
        return not_checked("nvidia-smi did not list the GPUs")
    outcomes = [(gpu, _use_of(gpu)) for gpu in report.gpus]
    worst = min((outcome for _, outcome in outcomes), key=lambda outcome: WORST_FIRST.index(outcome.verdict))
    uses = [
        f"GPU {gpu.index}: {outcome.observed}"
        for gpu, outcome in outcomes
        if outcome.verdict == worst.verdict
    ]
    more = f"; and {len(uses) - 4} more" if len(uses) > 4 else ""
    return CheckOutcome(worst.verdict, "; ".join(uses[:4]) + more, worst.fix)


def _use_of(gpu: GpuStatus) -> CheckOutcome:
    if gpu.memory_mib is None or gpu.used_mib is None:
        return not_checked("its memory is not reported")
    computing = [process for process in gpu.processes or () if "C" in process.kind]
    displaying = [_program(process.name) for process in gpu.processes or () if "C" not in process.kind]
    share = gpu.used_mib / gpu.memory_mib if gpu.memory_mib else 0.0
    used = f"{gpu.name}, {gpu.used_mib / 1024:.1f} of {gpu.memory_mib / 1024:.1f} GiB used"
    if computing:
        names = ", ".join(f"{_program(process.name)} ({process.pid})" for process in computing[:3])
        pids = ",".join(str(process.pid) for process in computing[:8])
        return warning(f"{used}, by {names}", f"ps -o pid,user,etime,args -p {pids}")
    if share > 0.1 and displaying:
        names = ", ".join(dict.fromkeys(displaying))
        return note(f"{used}, by the display ({names})", "sudo systemctl isolate multi-user.target")
    if share > 0.1:
        return warning(
            f"{used}, by processes not shown here (of another user or container, or left behind)",
            "sudo fuser -v /dev/nvidia*",
        )
    return ok(f"{used}, by no computing process")


def _program(name: str) -> str:
    """The program's name without its folder and arguments."""
    return (name.split() or ["?"])[0].rpartition("/")[2] or "?"


CHECKS = (free_memory,)
