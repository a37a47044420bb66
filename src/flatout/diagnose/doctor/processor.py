"""Checks of the processor: the cores of this process, its instructions, and the thread settings."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.check import CheckOutcome, machine_check, not_seen, note, ok, problem, warning
from flatout.probe.cgroup import CgroupLimits, group
from flatout.probe.proc import numbers, processor, status
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "processor"
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "BLIS_NUM_THREADS",
)


def allowed(snapshot: MachineSnapshot) -> list[int] | None:
    """The cores that this process may run on."""
    return numbers(status(snapshot.text("/proc/self/status"), "Cpus_allowed_list"))


def groups(snapshot: MachineSnapshot) -> CgroupLimits | None:
    """The control groups of this process; None if they could not be read."""
    if snapshot.text("/proc/self/cgroup") is None or snapshot.text("/proc/self/mountinfo") is None:
        return None
    return group(snapshot.files.get)


def cores(snapshot: MachineSnapshot) -> int | None:
    """The number of cores for training, within affinity and quota."""
    here, limit = allowed(snapshot), groups(snapshot)
    if here is None:
        return None
    return max(1, min(len(here), round(limit.cores))) if limit and limit.cores else len(here)


def _threads(snapshot: MachineSnapshot) -> int | None:
    """The number of threads that torch uses per operation; if unknown, the value of OMP_NUM_THREADS."""
    seen, asked = (
        (snapshot.torch.get("host") or {}).get("threads"),
        snapshot.variable("OMP_NUM_THREADS") or "",
    )
    return seen if isinstance(seen, int) else int(asked) if asked.isdigit() else None


@machine_check("FD060", THEME, ["file /proc/self/status", "file /sys/devices/system/cpu/online"])
def core_limit(snapshot: MachineSnapshot) -> CheckOutcome:
    """The cores that libraries count are available to this process.

    Why it matters:
        Libraries count the cores they see. Under a quota of two cores on a machine with 64, they start 64
        threads, and the kernel stops all of them for the rest of each period. That is slower than two
        threads.
    How to fix it:
        Set the number of threads with `export OMP_NUM_THREADS=N`. `flatout tune` finds the best number.
    """
    online, here, limit = (
        numbers(snapshot.text("/sys/devices/system/cpu/online")),
        allowed(snapshot),
        groups(snapshot),
    )
    if online is None or here is None:
        return not_seen("the number of cores could not be read")
    if limit is None:
        return not_seen(f"{len(here)} cores by affinity; the control groups could not be read")
    seen = [f"{len(online)} online", f"{len(here)} by affinity"] + (
        [f"{limit.cores:g} by quota"] if limit.cores else []
    )
    said = f"cores: {', '.join(seen)}"
    if limit.cores and limit.cores < len(here) - 0.5:
        fitting, made = max(1, int(limit.cores)), _threads(snapshot)
        if made is None:
            return not_seen(f"{said}; the number of torch's threads could not be determined")
        if made <= fitting + 1:
            return ok(f"{said}; torch uses {made} thread(s), which fits")
        return warning(
            f"{said}: torch uses {made} threads and gets {limit.cores:g} cores",
            f"export OMP_NUM_THREADS={fitting}",
            limit.files("cpu"),
        )
    if len(here) < len(online):
        return note(f"{said}: this process is bound to part of the machine", "taskset -pc $$")
    return ok(said)


@machine_check("FD061", THEME, ["file /proc/cpuinfo"])
def instructions(snapshot: MachineSnapshot) -> CheckOutcome:
    """The processor has the instructions that fast kernels use.

    Why it matters:
        Without AVX2 torch runs its slowest kernels. bfloat16 is fast on processors with AVX-512 BF16 or AMX,
        and slower than float32 on others.
    How to fix it:
        Not possible on the machine itself. In a virtual machine, use the host's processor type (`-cpu host`).
    """
    seen = processor(snapshot.text("/proc/cpuinfo"))
    if seen is None:
        return not_seen("/proc/cpuinfo lists no instructions")
    arm = "asimd" in seen.flags
    good = (
        ("asimd", "sve", "bf16", "i8mm")
        if arm
        else ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "avx512_vnni")
    )
    have = [flag for flag in good if flag in seen.flags]
    said = f"{seen.model}: {', '.join(have) or 'no relevant vector instructions'}"
    if not arm and "avx2" not in seen.flags:
        return warning(f"{said}; without AVX2", "lscpu | grep -i -e model -e avx")
    if not any("bf16" in flag for flag in have):
        return ok(f"{said}; bfloat16 is not native: float32 is faster on this processor")
    return ok(said)


@machine_check("FD062", THEME, ["folder /sys/devices/system/cpu/cpu0"])
def governor(snapshot: MachineSnapshot) -> CheckOutcome:
    """The governor does not keep the processor at a low clock.

    Why it matters:
        Under acpi-cpufreq's powersave governor the clock stays at its lowest. Under intel_pstate's it rises
        late.
    How to fix it:
        `sudo cpupower frequency-set -g performance`.
    """
    text = snapshot.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if text is None:
        listed = snapshot.folders.get("/sys/devices/system/cpu/cpu0") or []
        if "cpufreq" in listed:
            return not_seen("the governor could not be read")
        return note("this system does not control the clock (a virtual machine)")
    name = text.strip()
    if name == "powersave":
        return warning(
            "the governor is powersave: the clock rises late or not at all",
            "sudo cpupower frequency-set -g performance",
        )
    if name in ("performance", "schedutil", "ondemand", "conservative", "userspace"):
        return ok(f"the governor is {name}")
    return not_seen(f"the governor {name[:40]!r} is unknown")


@machine_check("FD063", THEME, ["file /sys/devices/system/node/online", "file /proc/self/status"])
def numa(snapshot: MachineSnapshot) -> CheckOutcome:
    """Threads and memory stay on one NUMA node.

    Why it matters:
        Memory of another socket is slower by half. A process whose threads move between sockets has no steady
        speed.
    How to fix it:
        `numactl --cpunodebind=0 --membind=0 python train.py`, with one process per node.
    """
    nodes, cpus = numbers(snapshot.text("/sys/devices/system/node/online")), allowed(snapshot)
    memory = numbers(status(snapshot.text("/proc/self/status"), "Mems_allowed_list"))
    if nodes is None or cpus is None:
        return not_seen("the number of nodes could not be read")
    if len(nodes) == 1:
        return ok("one node")
    spread = [
        node
        for node in nodes
        if set(numbers(snapshot.text(f"/sys/devices/system/node/node{node}/cpulist")) or ()) & set(cpus)
    ]
    if not spread:
        return not_seen(f"{len(nodes)} nodes; the nodes of this process could not be read")
    if len(spread) == 1:
        held = memory is not None and memory == spread
        return ok(f"{len(nodes)} nodes, bound to node {spread[0]}" + (" with its memory" if held else ""))
    return note(
        f"{len(nodes)} nodes, and this process may run on {len(spread)} of them",
        f"numactl --cpunodebind={spread[0]} --membind={spread[0]} python train.py",
    )


@machine_check("FD064", THEME, ["environment", "file /proc/self/status"])
def threads(snapshot: MachineSnapshot) -> CheckOutcome:
    """The thread variables fit the number of cores.

    Why it matters:
        More threads than cores waste time in context switches. A single thread leaves the other cores idle.
        Launchers set OMP_NUM_THREADS=1 by default.
    How to fix it:
        `unset OMP_NUM_THREADS`, or use `flatout tune`, which measures the best number for your program.
    """
    have = cores(snapshot)
    if have is None:
        return not_seen("the number of cores for this process could not be read")
    seen = {name: value for name in THREADS if (value := snapshot.variable(name)) is not None}
    wrong = [
        f"{name}={value}"
        for name, value in seen.items()
        if not re.fullmatch(r"\d+(,\d+)*", value) or int(value.split(",")[0]) < 1
    ]
    if wrong:
        return warning(
            f"{', '.join(wrong)}: not a number of threads",
            f"unset {' '.join(word.partition('=')[0] for word in wrong)}",
        )
    many = [f"{name}={value}" for name, value in seen.items() if int(value.split(",")[0]) > have]
    if many:
        return warning(
            f"{', '.join(many)} for {have} core(s): threads compete for cores",
            f"export {many[0].partition('=')[0]}={have}",
        )
    if seen.get("OMP_NUM_THREADS") == "1" and have > 1:
        return note(
            f"OMP_NUM_THREADS=1 with {have} cores: torch computes with one thread, which suits small models but not large ones",
            "flatout tune python train.py",
        )
    return ok(
        f"{', '.join(f'{name}={value}' for name, value in seen.items()) or 'no thread variable is set'}; {have} core(s)"
    )


@machine_check("FD065", THEME, ["environment", "file /proc/self/status"])
def binding(snapshot: MachineSnapshot) -> CheckOutcome:
    """Threads are not bound to cores outside this process's affinity.

    Why it matters:
        GOMP_CPU_AFFINITY, KMP_AFFINITY and OMP_PROC_BIND bind threads to cores. Loader workers and ranks
        inherit them, and all of them share the same core.
    How to fix it:
        `unset GOMP_CPU_AFFINITY KMP_AFFINITY OMP_PROC_BIND OMP_PLACES`.
    """
    names = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "KMP_HW_SUBSET")
    here = allowed(snapshot)
    if here is None:
        return not_seen("the cores of this process could not be read")
    seen = {name: value for name in names if (value := snapshot.variable(name))}
    asked = [int(word) for word in re.findall(r"\d+", seen.get("GOMP_CPU_AFFINITY", ""))]
    outside = sorted(set(asked) - set(here))
    if outside:
        return problem(
            f"GOMP_CPU_AFFINITY={seen['GOMP_CPU_AFFINITY']!r} names core {outside[0]}, which this process may not use",
            "unset GOMP_CPU_AFFINITY",
        )
    if asked and len(set(asked)) < len(here) and not re.search(r"\d-\d", seen["GOMP_CPU_AFFINITY"]):
        return warning(
            f"GOMP_CPU_AFFINITY={seen['GOMP_CPU_AFFINITY']!r} binds all threads to {len(set(asked))} of {len(here)} cores",
            "unset GOMP_CPU_AFFINITY",
        )
    wait = {
        name: value for name in ("KMP_BLOCKTIME", "OMP_WAIT_POLICY") if (value := snapshot.variable(name))
    }
    if seen:
        return note(
            f"{', '.join(f'{n}={v}' for n, v in seen.items())}: loader workers and ranks inherit it",
            f"unset {' '.join(seen)}",
        )
    if (
        wait.get("OMP_WAIT_POLICY", "").lower() == "active"
        or wait.get("KMP_BLOCKTIME", "").lower() == "infinite"
    ):
        return note(
            f"{', '.join(f'{n}={v}' for n, v in wait.items())}: idle threads keep their cores busy",
            f"unset {' '.join(wait)}",
        )
    return ok("threads are not bound")


@machine_check("FD066", THEME, ["file /proc/loadavg", "file /proc/self/status"])
def load(snapshot: MachineSnapshot) -> CheckOutcome:
    """Other programs leave the cores to training.

    Why it matters:
        Cores used by other programs are missing for training, and every measured time varies with them.
    How to fix it:
        `top -o %CPU` shows the programs.
    """
    found, have = re.match(r"(\d+\.\d+) (\d+\.\d+) ", snapshot.text("/proc/loadavg") or ""), cores(snapshot)
    online = numbers(snapshot.text("/sys/devices/system/cpu/online"))
    if not found or have is None:
        return not_seen("the load could not be read")
    # The load is that of the whole machine, even if this process may use only part of it.
    there = len(online) if online else have
    if float(found[1]) > 0.5 * there + 1:
        return warning(
            f"other programs are busy (load {float(found[1]):.1f} on {there} cores): timings will be unreliable",
            "top -o %CPU",
        )
    return ok(f"a load of {found[1]} on {there} core(s)")


QUESTIONS = (core_limit, instructions, governor, numa, threads, binding, load)
