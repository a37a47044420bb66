"""The state of each GPU as nvidia-smi tells it: who is on it, and what holds it back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from flatout.diagnose.doctor.check import Answer, note, ok, problem, question, unseen, warning
from flatout.diagnose.doctor.graphics import Board, listing
from flatout.plan.sight import Sight

THEME = "GPUs"
NEEDS = ["run nvidia-smi"]
HOT_C = 5  # below the temperature at which the GPU slows itself down
HELD_BACK = {"hw_slowdown": "the hardware slows it down", "hw_thermal_slowdown": "it is too hot", "sw_thermal_slowdown": "it is too hot",
             "hw_power_brake_slowdown": "the power supply asks it to slow down", "sync_boost": "it waits for the slowest GPU of its group"}


def each_board(sight: Sight, judge: Callable[[Board], Answer]) -> Answer:
    """The worst of the answers for each GPU; where all are fine, what they have in common."""
    seen = listing(sight)
    if seen is None or not seen.boards:
        return unseen("nvidia-smi did not describe the GPUs")
    answers = [(board, judge(board)) for board in seen.boards]
    order = ("problem", "warning", "not seen", "note", "ok")
    worst = min((answer for _, answer in answers), key=lambda answer: order.index(answer.verdict))
    said = list(dict.fromkeys(f"GPU {b.index}: {a.seen}" for b, a in answers if a.verdict == worst.verdict))
    return Answer(worst.verdict, _together(answers, worst, said), worst.mend, worst.evidence)


def _together(answers: Sequence[tuple[Board, Answer]], worst: Answer, said: list[str]) -> str:
    if len({answer.seen for _, answer in answers}) == 1 and len(answers) > 1:
        return f"each of {len(answers)} GPUs: {worst.seen}"
    return "; ".join(said[:4]) + (f"; and {len(said) - 4} more" if len(said) > 4 else "")


@question("FD030", THEME, NEEDS, gpu=True)
def free_memory(sight: Sight) -> Answer:
    """Nobody else is on the GPU.

    Why it matters:
        Another process takes memory and time: runs end out of memory, and every measured time is wrong.
    How to mend it:
        See who it is with `nvidia-smi`, and end it or take another GPU with CUDA_VISIBLE_DEVICES.
    """
    def judge(board: Board) -> Answer:
        if board.memory_mib is None or board.used_mib is None:
            return unseen("its memory was not told")
        others = [p for p in board.processes or () if "C" in p.kind]
        drawing = [_short(p.name) for p in board.processes or () if "C" not in p.kind]
        share = board.used_mib / board.memory_mib if board.memory_mib else 0.0
        held = f"{board.used_mib / 1024:.1f} of {board.memory_mib / 1024:.1f} GiB are used"
        if others:
            names = ", ".join(f"{_short(p.name)} ({p.number}{f', {p.used_mib:.0f} MiB' if p.used_mib else ''})" for p in others[:3])
            return warning(f"{held}, by {names}", f"ps -o pid,user,etime,args -p {','.join(str(p.number) for p in others[:8])}")
        if share > 0.1 and drawing:
            return note(f"{held}, by the display ({', '.join(dict.fromkeys(drawing))})", "sudo systemctl isolate multi-user.target")
        if share > 0.1:
            return warning(f"{held}, by processes that are not shown here (another user's, another container's, or left behind)", "sudo fuser -v /dev/nvidia*")
        return ok(f"{held}, by nobody who computes")

    return each_board(sight, judge)


def _short(name: str) -> str:
    """The program without its folder and its arguments."""
    return (name.split() or ["?"])[0].rpartition("/")[2] or "?"


@question("FD031", THEME, NEEDS, gpu=True)
def clocks(sight: Sight) -> Answer:
    """The clocks are not held down.

    Why it matters:
        Application clocks below the highest ones make every kernel that computes slower by that share. An idle GPU clocks down by itself,
        which is fine.
    How to mend it:
        `sudo nvidia-smi -rac` and `sudo nvidia-smi -rgc` give the clocks back.
    """
    def judge(board: Board) -> Answer:
        if board.max_graphics_mhz is None or board.graphics_mhz is None:
            return unseen("its clocks were not told")
        said = f"{board.graphics_mhz:.0f} MHz now, {board.max_graphics_mhz:.0f} MHz at most"
        chosen = board.application_mhz
        if chosen and board.default_application_mhz and chosen < 0.98 * board.default_application_mhz:
            return warning(f"{said}; its application clock is set to {chosen:.0f} MHz, below the default of {board.default_application_mhz:.0f} MHz",
                           "sudo nvidia-smi -rac")
        if chosen and chosen < 0.98 * board.max_graphics_mhz:
            return note(f"{said}; its application clock is {chosen:.0f} MHz", f"nvidia-smi -q -d CLOCK -i {board.index}")
        return ok(said)

    return each_board(sight, judge)


@question("FD032", THEME, NEEDS, gpu=True)
def power_cap(sight: Sight) -> Answer:
    """The power limit is the default or above.

    Why it matters:
        Under a lowered power limit a GPU lowers its clocks as soon as it has work.
    How to mend it:
        `sudo nvidia-smi -pl WATTS` with the default value.
    """
    def judge(board: Board) -> Answer:
        if board.power_limit_w is None or board.default_power_limit_w is None:
            return unseen("its power limit was not told")
        if board.power_limit_w < board.default_power_limit_w - 1:
            return warning(f"limited to {board.power_limit_w:.0f} W, by default {board.default_power_limit_w:.0f} W",
                           f"sudo nvidia-smi -i {board.index} -pl {board.default_power_limit_w:.0f}")
        return ok(f"{board.power_limit_w:.0f} W")

    return each_board(sight, judge)


@question("FD033", THEME, NEEDS, gpu=True)
def throttling(sight: Sight) -> Answer:
    """The GPU is not slowed down by heat or power.

    Why it matters:
        A GPU that is too hot or short of power lowers its clocks by itself. Steps become slower in the middle of a run.
    How to mend it:
        See which reason is active with `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`, then mend the cooling or the power supply.
    """
    def judge(board: Board) -> Answer:
        if board.reasons is None or board.temperature_c is None:
            return unseen("its temperature or the reasons of its clocks were not told")
        active = [reason for reason, on in board.reasons.items() if on]
        bad = [reason for reason in active if reason in HELD_BACK]
        said = f"{board.temperature_c:.0f} C"
        if bad:
            return warning(f"{said}; {', '.join(dict.fromkeys(HELD_BACK[reason] for reason in bad))} ({', '.join(bad)})",
                           "nvidia-smi -q -d PERFORMANCE,TEMPERATURE")
        if board.slowdown_c and board.temperature_c > board.slowdown_c - HOT_C:
            return warning(f"{said}, it slows down at {board.slowdown_c:.0f} C", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE")
        if "sw_power_cap" in active:
            return note(f"{said}; it is at its power limit just now")
        return ok(f"{said}, nothing slows it down")

    return each_board(sight, judge)


@question("FD034", THEME, NEEDS, gpu=True)
def memory_errors(sight: Sight) -> Answer:
    """The GPU's memory has no errors.

    Why it matters:
        An uncorrectable error ends the process that meets it; rows that wait to be replaced need a reset of the GPU.
    How to mend it:
        Stop what runs on it and reset it with `sudo nvidia-smi --gpu-reset -i N`; where it comes again, have the board replaced.
    """
    def judge(board: Board) -> Answer:
        if board.remap_failed == "Yes":
            return problem("a faulty row of its memory could not be replaced", f"nvidia-smi -q -d ROW_REMAPPER -i {board.index}")
        if board.remap_pending == "Yes" or board.retirement_pending == "Yes":
            return warning("faulty memory waits to be taken out of use", f"sudo nvidia-smi --gpu-reset -i {board.index}")
        if board.ecc_uncorrectable:
            return problem(f"{board.ecc_uncorrectable} uncorrectable memory errors since the driver was loaded",
                           f"sudo nvidia-smi --gpu-reset -i {board.index}")
        if board.ecc is None:
            return unseen("its memory errors were not told")
        if board.ecc == "N/A":
            return note("it has no ECC: errors in its memory cannot be counted")
        if board.ecc == "Disabled":
            return note("ECC is off: errors in its memory go unnoticed", f"sudo nvidia-smi -i {board.index} -e 1")
        if board.ecc_uncorrectable is None:
            return unseen("its memory errors were not told")
        return ok("ECC on, no uncorrectable errors")

    return each_board(sight, judge)


@question("FD035", THEME, NEEDS, gpu=True)
def partitions(sight: Sight) -> Answer:
    """The GPU is not cut into MIG instances by accident.

    Why it matters:
        A process sees one MIG instance, a fraction of the GPU's cores and memory, and instances cannot be joined for one training.
    How to mend it:
        `sudo nvidia-smi -i N -mig 0` gives the whole GPU back, when nobody uses its instances.
    """
    def judge(board: Board) -> Answer:
        if board.mig == "Enabled":
            if not board.mig_instances:
                return problem("MIG is on and no instance is made: no program can use this GPU", f"sudo nvidia-smi -i {board.index} -mig 0")
            return note(f"MIG is on, {board.mig_instances} instances: a program sees one of them", f"sudo nvidia-smi -i {board.index} -mig 0")
        if board.mig == "Disabled":
            return ok("one whole GPU")
        return ok("one whole GPU, which cannot be partitioned") if board.mig == "N/A" else unseen("whether it is partitioned was not told")

    return each_board(sight, judge)


@question("FD036", THEME, NEEDS, gpu=True)
def persistence(sight: Sight) -> Answer:
    """The driver stays loaded between programs.

    Why it matters:
        Without persistence mode the driver sets the GPU up anew for each program: seconds at every start, and settings are forgotten.
    How to mend it:
        `sudo nvidia-smi -pm 1`.
    """
    def judge(board: Board) -> Answer:
        if board.persistence == "Enabled":
            return ok("persistence mode is on")
        if board.persistence == "Disabled":
            return note("persistence mode is off: every program waits for the driver at its start", "sudo nvidia-smi -pm 1")
        return unseen("its persistence mode was not told")

    return each_board(sight, judge)


@question("FD037", THEME, NEEDS, gpu=True)
def compute_mode(sight: Sight) -> Answer:
    """Programs may share the GPU.

    Why it matters:
        In exclusive mode a second process (a second rank, an evaluation) ends with "all CUDA-capable devices are busy or unavailable"; in
        prohibited mode every process does.
    How to mend it:
        `sudo nvidia-smi -c DEFAULT`.
    """
    def judge(board: Board) -> Answer:
        if board.compute_mode == "Default":
            return ok("compute mode is Default")
        if board.compute_mode == "Prohibited":
            return problem("compute mode is Prohibited: no program may compute on it", f"sudo nvidia-smi -i {board.index} -c DEFAULT")
        if board.compute_mode and board.compute_mode.startswith("Exclusive"):
            return note(f"compute mode is {board.compute_mode}: one process at a time", f"sudo nvidia-smi -i {board.index} -c DEFAULT")
        return unseen("its compute mode was not told")

    return each_board(sight, judge)


@question("FD038", THEME, NEEDS, gpu=True)
def bus(sight: Sight) -> Answer:
    """The GPU sits on its full PCI Express link.

    Why it matters:
        Batches come over this link. Half the lanes halve the speed of every copy; a card in a slot of four lanes has a quarter.
    How to mend it:
        Look at it under load with `nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.gen.current --format=csv -l 1`; then put the card
        into a slot of its width, or take out the riser.
    """
    def judge(board: Board) -> Answer:
        if board.link_width is None or board.max_link_width is None or board.link_generation is None or board.max_link_generation is None:
            return unseen("its link was not told")
        said = f"PCIe {board.link_generation:.0f} x{board.link_width:.0f} now, {board.max_link_generation:.0f} x{board.max_link_width:.0f} at most"
        idle = board.performance_state not in ("P0", "P1", "P2")
        if board.link_width < board.max_link_width and idle:
            return note(said + ": it uses a part of its lanes while idle; look again while it trains",
                        "nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.gen.current --format=csv -l 1")
        if board.link_width < board.max_link_width:
            return warning(said + ": it uses a part of its lanes", "nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.gen.current --format=csv -l 1")
        if board.link_generation < board.max_link_generation and not idle:
            return warning(said + ": slower than it could be, though it is at work", "sudo lspci -vv | grep -i lnksta")
        return ok(said + (" (it slows its link down while idle)" if board.link_generation < board.max_link_generation else ""))

    return each_board(sight, judge)


@question("FD039", THEME, ["run nvidia-smi topology", "run nvidia-smi"], gpu=True)
def links(sight: Sight) -> Answer:
    """Several GPUs are joined by fast links.

    Why it matters:
        Gradients of all GPUs go over these links at every step. Across two processors' own bus (SYS) they are several times as slow as
        over NVLink or one PCIe switch.
    How to mend it:
        Choose GPUs that are near each other, with CUDA_VISIBLE_DEVICES and the table of `nvidia-smi topo -m`.
    """
    seen = listing(sight)
    if seen is None or not seen.boards:
        return unseen("nvidia-smi did not describe the GPUs")
    if len(seen.boards) == 1:
        return ok("one GPU: nothing to join")
    rows = [re.split(r"\s+", line.strip()) for line in sight.runs["nvidia-smi topology"].out.splitlines() if re.match(r"GPU\d+\s", line)]
    pairs = {cell for at, row in enumerate(rows) for cell in row[at + 2: 1 + len(rows)] if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)}
    if len(rows) != len(seen.boards) or not pairs:
        return unseen("`nvidia-smi topo -m` did not show how the GPUs are joined")
    if "SYS" in pairs:
        return note(f"some pairs of GPUs are joined across two processors (SYS), others by {', '.join(sorted(pairs - {'SYS'})) or 'nothing faster'}",
                    "nvidia-smi topo -m")
    return ok(f"joined by {', '.join(sorted(pairs))}")


QUESTIONS = (free_memory, clocks, power_cap, throttling, memory_errors, partitions, persistence, compute_mode, bus, links)
