"""Checks of the settings of each GPU: partitions, persistence, compute mode."""

from __future__ import annotations

from flatout.diagnose.doctor.boards import each_board
from flatout.diagnose.doctor.check import CheckOutcome, machine_check, not_seen, note, ok, problem
from flatout.diagnose.doctor.nvidia_smi import GpuStatus
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "GPUs"
NEEDS = ["run nvidia-smi"]


@machine_check("FD035", THEME, NEEDS, gpu=True)
def partitions(snapshot: MachineSnapshot) -> CheckOutcome:
    """The GPU is not split into MIG instances by accident.

    Why it matters:
        A process sees one MIG instance, a fraction of the GPU's cores and memory. Instances cannot be joined
        for one training run.
    How to fix it:
        `sudo nvidia-smi -i N -mig 0` restores the whole GPU once its instances are unused.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.mig == "Enabled":
            if not board.mig_instances:
                return problem(
                    "MIG is on with no instance: no program can use this GPU",
                    f"sudo nvidia-smi -i {board.index} -mig 0",
                )
            return note(
                f"MIG is on, {board.mig_instances} instances: a program sees one of them",
                f"sudo nvidia-smi -i {board.index} -mig 0",
            )
        if board.mig == "Disabled":
            return ok("one whole GPU")
        return (
            ok("one whole GPU, which cannot be partitioned")
            if board.mig == "N/A"
            else not_seen("whether it is partitioned is not reported")
        )

    return each_board(snapshot, judge)


@machine_check("FD036", THEME, NEEDS, gpu=True)
def persistence(snapshot: MachineSnapshot) -> CheckOutcome:
    """The driver stays loaded between programs.

    Why it matters:
        Without persistence mode the driver sets up the GPU again for each program: seconds at every start,
        and settings are lost.
    How to fix it:
        `sudo nvidia-smi -pm 1`.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.persistence == "Enabled":
            return ok("persistence mode is on")
        if board.persistence == "Disabled":
            return note(
                "persistence mode is off: every program waits for the driver at its start",
                "sudo nvidia-smi -pm 1",
            )
        return not_seen("its persistence mode is not reported")

    return each_board(snapshot, judge)


@machine_check("FD037", THEME, NEEDS, gpu=True)
def compute_mode(snapshot: MachineSnapshot) -> CheckOutcome:
    """Programs can share the GPU.

    Why it matters:
        In exclusive mode a second process (a second rank, an evaluation) fails with "all CUDA-capable devices
        are busy or unavailable". In prohibited mode every process fails.
    How to fix it:
        `sudo nvidia-smi -c DEFAULT`.
    """

    def judge(board: GpuStatus) -> CheckOutcome:
        if board.compute_mode == "Default":
            return ok("compute mode is Default")
        if board.compute_mode == "Prohibited":
            return problem(
                "compute mode is Prohibited: no program can compute on it",
                f"sudo nvidia-smi -i {board.index} -c DEFAULT",
            )
        if board.compute_mode and board.compute_mode.startswith("Exclusive"):
            return note(
                f"compute mode is {board.compute_mode}: one process at a time",
                f"sudo nvidia-smi -i {board.index} -c DEFAULT",
            )
        return not_seen("its compute mode is not reported")

    return each_board(snapshot, judge)
