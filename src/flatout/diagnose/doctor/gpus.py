"""Checks of the state of each GPU as reported by nvidia-smi: who uses it, and what slows it down."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.boards import each_board, short_name
from flatout.diagnose.doctor.check import CheckOutcome, machine_check, not_seen, note, ok, problem, warning
from flatout.diagnose.doctor.gpu_settings import NEEDS, THEME, compute_mode, partitions, persistence
from flatout.diagnose.doctor.nvidia_smi import GpuStatus, listing
from flatout.schema.machine_snapshot import MachineSnapshot

HOT_C = 5  # degrees below the temperature at which the GPU lowers its clocks
HELD_BACK = {
    "hw_slowdown": "the hardware slows it down",
    "hw_thermal_slowdown": "it is too hot",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the power supply requests a slowdown",
    "sync_boost": "it waits for the slowest GPU of its group",
}


@machine_check("FD030", THEME, NEEDS, gpu=True)
def free_memory(snapshot: MachineSnapshot) -> CheckOutcome:
    """No other process uses the GPU.

    Why it matters:
        Another process takes memory and time: runs end out of memory, and every measured time is wrong.
    How to fix it:
        Find the process with `nvidia-smi`. End it, or use another GPU with CUDA_VISIBLE_DEVICES.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.memory_mib is None or board.used_mib is None:
            return not_seen("its memory is not reported")
        others = [p for p in board.processes or () if "C" in p.kind]
        drawing = [short_name(p.name) for p in board.processes or () if "C" not in p.kind]
        share = board.used_mib / board.memory_mib if board.memory_mib else 0.0
        held = f"{board.used_mib / 1024:.1f} of {board.memory_mib / 1024:.1f} GiB used"
        if others:
            names = ", ".join(
                f"{short_name(p.name)} ({p.number}{f', {p.used_mib:.0f} MiB' if p.used_mib else ''})"
                for p in others[:3]
            )
            return warning(
                f"{held}, by {names}",
                f"ps -o pid,user,etime,args -p {','.join(str(p.number) for p in others[:8])}",
            )
        if share > 0.1 and drawing:
            return note(
                f"{held}, by the display ({', '.join(dict.fromkeys(drawing))})",
                "sudo systemctl isolate multi-user.target",
            )
        if share > 0.1:
            return warning(
                f"{held}, by processes not shown here (of another user or container, or left behind)",
                "sudo fuser -v /dev/nvidia*",
            )
        return ok(f"{held}, by no computing process")

    return each_board(snapshot, judge)


@machine_check("FD031", THEME, NEEDS, gpu=True)
def clocks(snapshot: MachineSnapshot) -> CheckOutcome:
    """The clocks are not lowered.

    Why it matters:
        Application clocks below the maximum slow every compute-bound kernel down by that share. An idle GPU
        lowers its clocks on its own, which is fine.
    How to fix it:
        `sudo nvidia-smi -rac` and `sudo nvidia-smi -rgc` restore the clocks.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.max_graphics_mhz is None or board.graphics_mhz is None:
            return not_seen("its clocks are not reported")
        said = f"{board.graphics_mhz:.0f} MHz now, {board.max_graphics_mhz:.0f} MHz at most"
        chosen = board.application_mhz
        if chosen and board.default_application_mhz and chosen < 0.98 * board.default_application_mhz:
            return warning(
                f"{said}; its application clock is set to {chosen:.0f} MHz, below the default of {board.default_application_mhz:.0f} MHz",
                "sudo nvidia-smi -rac",
            )
        if chosen and chosen < 0.98 * board.max_graphics_mhz:
            return note(
                f"{said}; its application clock is {chosen:.0f} MHz",
                f"nvidia-smi -q -d CLOCK -i {board.index}",
            )
        return ok(said)

    return each_board(snapshot, judge)


@machine_check("FD032", THEME, NEEDS, gpu=True)
def power_cap(snapshot: MachineSnapshot) -> CheckOutcome:
    """The power limit is at least the default.

    Why it matters:
        Under a lowered power limit a GPU lowers its clocks as soon as it has work.
    How to fix it:
        `sudo nvidia-smi -pl WATTS` with the default value.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.power_limit_w is None or board.default_power_limit_w is None:
            return not_seen("its power limit is not reported")
        if board.power_limit_w < board.default_power_limit_w - 1:
            return warning(
                f"limited to {board.power_limit_w:.0f} W, default {board.default_power_limit_w:.0f} W",
                f"sudo nvidia-smi -i {board.index} -pl {board.default_power_limit_w:.0f}",
            )
        return ok(f"{board.power_limit_w:.0f} W")

    return each_board(snapshot, judge)


@machine_check("FD033", THEME, NEEDS, gpu=True)
def throttling(snapshot: MachineSnapshot) -> CheckOutcome:
    """Heat or power does not slow the GPU down.

    Why it matters:
        A GPU that is too hot or short of power lowers its clocks. Steps become slower in the middle of a run.
    How to fix it:
        `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` shows the active reason. Then fix the cooling or the power
        supply.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.reasons is None or board.temperature_c is None:
            return not_seen("its temperature or the reasons for its clocks are not reported")
        active = [reason for reason, on in board.reasons.items() if on]
        bad = [reason for reason in active if reason in HELD_BACK]
        said = f"{board.temperature_c:.0f} C"
        if bad:
            return warning(
                f"{said}; {', '.join(dict.fromkeys(HELD_BACK[reason] for reason in bad))} ({', '.join(bad)})",
                "nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
            )
        if board.slowdown_c and board.temperature_c > board.slowdown_c - HOT_C:
            return warning(
                f"{said}; it slows down at {board.slowdown_c:.0f} C",
                "nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
            )
        if "sw_power_cap" in active:
            return note(f"{said}; it is at its power limit now")
        return ok(f"{said}, nothing slows it down")

    return each_board(snapshot, judge)


@machine_check("FD034", THEME, NEEDS, gpu=True)
def memory_errors(snapshot: MachineSnapshot) -> CheckOutcome:
    """The GPU's memory has no errors.

    Why it matters:
        An uncorrectable error ends the process that meets it. Rows that wait for replacement need a reset of
        the GPU.
    How to fix it:
        Stop all work on the GPU and reset it with `sudo nvidia-smi --gpu-reset -i N`. If the error returns,
        have the board replaced.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.remap_failed == "Yes":
            return problem(
                "a faulty row of its memory could not be replaced",
                f"nvidia-smi -q -d ROW_REMAPPER -i {board.index}",
            )
        if board.remap_pending == "Yes" or board.retirement_pending == "Yes":
            return warning(
                "faulty memory waits for replacement", f"sudo nvidia-smi --gpu-reset -i {board.index}"
            )
        if board.ecc_uncorrectable:
            return problem(
                f"{board.ecc_uncorrectable} uncorrectable memory errors since the driver was loaded",
                f"sudo nvidia-smi --gpu-reset -i {board.index}",
            )
        if board.ecc is None:
            return not_seen("its memory errors are not reported")
        if board.ecc == "N/A":
            return note("it has no ECC: memory errors cannot be counted")
        if board.ecc == "Disabled":
            return note("ECC is off: memory errors go unnoticed", f"sudo nvidia-smi -i {board.index} -e 1")
        if board.ecc_uncorrectable is None:
            return not_seen("its memory errors are not reported")
        return ok("ECC on, no uncorrectable errors")

    return each_board(snapshot, judge)


@machine_check("FD038", THEME, NEEDS, gpu=True)
def bus(snapshot: MachineSnapshot) -> CheckOutcome:
    """The GPU uses its full PCI Express link.

    Why it matters:
        Batches travel over this link. Half the lanes halve the speed of every copy; a slot with four lanes
        gives a quarter.
    How to fix it:
        Monitor the link under load with `nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.gen.current
        --format=csv -l 1`. Then move the card to a slot of its width, or remove the riser.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if (
            board.link_width is None
            or board.max_link_width is None
            or board.link_generation is None
            or board.max_link_generation is None
        ):
            return not_seen("its link is not reported")
        said = f"PCIe {board.link_generation:.0f} x{board.link_width:.0f} now, {board.max_link_generation:.0f} x{board.max_link_width:.0f} at most"
        idle = board.performance_state not in ("P0", "P1", "P2")
        if board.link_width < board.max_link_width and idle:
            return note(
                said + ": it uses only some of its lanes while idle; check again during training",
                "nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.gen.current --format=csv -l 1",
            )
        if board.link_width < board.max_link_width:
            return warning(
                said + ": it uses only some of its lanes",
                "nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.gen.current --format=csv -l 1",
            )
        if board.link_generation < board.max_link_generation and not idle:
            return warning(
                said + ": below its maximum although it is under load", "sudo lspci -vv | grep -i lnksta"
            )
        return ok(
            said
            + (
                " (the link slows down while idle)"
                if board.link_generation < board.max_link_generation
                else ""
            )
        )

    return each_board(snapshot, judge)


@machine_check("FD039", THEME, ["run nvidia-smi topology", "run nvidia-smi"], gpu=True)
def links(snapshot: MachineSnapshot) -> CheckOutcome:
    """Several GPUs are connected by fast links.

    Why it matters:
        The gradients of all GPUs go over these links in every step. The bus between two processors (SYS) is
        several times slower than NVLink or a single PCIe switch.
    How to fix it:
        Choose adjacent GPUs with CUDA_VISIBLE_DEVICES, from the table of `nvidia-smi topo -m`.
    """
    seen = listing(snapshot)
    if seen is None or not seen.boards:
        return not_seen("nvidia-smi did not list the GPUs")
    if len(seen.boards) == 1:
        return ok("one GPU: no links needed")
    rows = [
        re.split(r"\s+", line.strip())
        for line in snapshot.runs["nvidia-smi topology"].out.splitlines()
        if re.match(r"GPU\d+\s", line)
    ]
    pairs = {
        cell
        for at, row in enumerate(rows)
        for cell in row[at + 2 : 1 + len(rows)]
        if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)
    }
    if len(rows) != len(seen.boards) or not pairs:
        return not_seen("`nvidia-smi topo -m` did not show how the GPUs are connected")
    if "SYS" in pairs:
        return note(
            f"some pairs of GPUs are connected across two processors (SYS), others by {', '.join(sorted(pairs - {'SYS'})) or 'nothing faster'}",
            "nvidia-smi topo -m",
        )
    return ok(f"connected by {', '.join(sorted(pairs))}")


QUESTIONS = (
    free_memory,
    clocks,
    power_cap,
    throttling,
    memory_errors,
    partitions,
    persistence,
    compute_mode,
    bus,
    links,
)
