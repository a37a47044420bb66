"""Checks of the NVIDIA driver: whether it answers, fits torch's CUDA build and the GPUs, and has free memory."""

import re

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    first_command,
    machine_check,
    not_checked,
    note,
    ok,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.nvidia_smi import GpuStatus, driver_version, has_gpu, smi_report
from flatout.diagnose.doctor.system import in_container, newer_driver
from flatout.diagnose.doctor.torch_import import build_of, cuda_build
from flatout.diagnose.doctor.versions import versions
from flatout.diagnose.explain import explain_text
from flatout.schema.machine_snapshot import CommandResult, MachineSnapshot, Verdict

THEME = "driver"
# Failures of nvidia-smi: the pattern of its message, the meaning, the command.
SMI_FAILURES = {
    "Driver/library version mismatch": (
        "the driver's libraries were updated, but the loaded kernel module is still the old one",
        "sudo reboot",
    ),
    "couldn't communicate with the NVIDIA driver": (
        "the driver's kernel module is not loaded",
        "sudo modprobe nvidia && sudo dmesg | grep -i nvidia",
    ),
    "GPU is lost|fallen off the bus": ("a GPU no longer answers on its bus", "sudo dmesg | grep -i xid"),
    r"couldn't find libnvidia-ml|libnvidia-ml\.so: cannot open": (
        "the driver's library is missing: the container was started without the GPU",
        "docker run --gpus all ...",
    ),
    "No devices were found": (
        "the driver runs but finds no usable GPU",
        "sudo dmesg | grep -i nvidia",
    ),
    "(?i)Insufficient Permissions": (
        "this user has no permission to use the GPU",
        "ls -l /dev/nvidia*",
    ),
    "Failed to initialize NVML: Unknown Error": (
        "the container has lost access to the devices (as after `systemctl daemon-reload` on the host)",
        "docker restart CONTAINER",
    ),
}


@machine_check("FD020", THEME, ["run nvidia-smi"])
def driver(snapshot: MachineSnapshot) -> CheckOutcome:
    """The NVIDIA driver answers.

    Without a working driver no program reaches the GPU, whatever else is installed.
    """
    run, report, gpu = snapshot.command_results["nvidia-smi"], smi_report(snapshot), has_gpu(snapshot)
    if report is not None and report.gpus:
        names = [gpu.name for gpu in report.gpus]
        gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return (
            ok(f"driver {report.driver or 'of unknown version'}, {gpus}")
            if report.driver
            else not_checked(f"{gpus}; the driver's version is not reported")
        )
    if run.timed_out:
        return problem(
            "nvidia-smi did not answer: the driver or a GPU hangs", "sudo dmesg | grep -i xid", _tail(run)
        )
    if not run.installed:
        if gpu:
            loaded = driver_version(snapshot)
            if loaded is None and snapshot.torch.get("cuda", {}).get("computes") is True:
                return note("torch reaches the GPU, but nvidia-smi is not available")
            if loaded:
                return note(
                    f"driver {loaded} is loaded, but nvidia-smi is not available", "docker run --gpus all ..."
                )
            return problem(
                "there is an NVIDIA GPU on the bus, but neither a driver nor nvidia-smi",
                "docker run --gpus all ..." if in_container(snapshot) else newer_driver(snapshot),
            )
        if gpu is None:
            return not_checked("there is no nvidia-smi, and the PCI bus could not be read")
        return note("no NVIDIA GPU: training runs on the processor")
    for pattern, (meaning, fix) in SMI_FAILURES.items():
        if match := re.search(pattern, run.output):
            return problem(f"nvidia-smi: {match[0]}: {meaning}", fix, _tail(run))
    if run.code not in (0, None):
        return problem(f"nvidia-smi exited with code {run.code}", "nvidia-smi", _tail(run))
    return not_checked("nvidia-smi answered in an unknown format")


def _tail(run: CommandResult) -> list[str]:
    return [line for line in run.output.splitlines() if line.strip()][-4:]


@machine_check("FD021", THEME, gpu=True)
def driver_for_cuda(snapshot: MachineSnapshot) -> CheckOutcome:
    """The driver is new enough for torch's CUDA.

    A program built with CUDA 13 needs driver 580 or newer, a program built with CUDA 12 driver 525 or newer.
    With an older driver torch warns once, "The NVIDIA driver on your system is too old", and trains on the
    processor.
    """
    driver_text, build = driver_version(snapshot), build_of(snapshot)
    installed = version(driver_text)
    if installed is None:
        return not_checked("the driver's version could not be determined")
    if build is None:
        return not_checked(
            f"driver {driver_text}; the CUDA version of the torch build could not be determined"
        )
    cuda, torch, table = build.get("cuda"), build["version"], versions()
    if cuda is None:
        return note(f"driver {driver_text}; torch {torch} is a CPU build and does not use it")
    oldest = table.driver_for(cuda)
    if oldest is None:
        return not_checked(
            f"driver {driver_text}; flatout's version table does not list the driver for CUDA {cuda}"
        )
    if installed < oldest:
        if (snapshot.torch.get("cuda") or {}).get("computes") is True:
            return ok(
                f"driver {driver_text} and a forward compatibility package: torch reaches the GPU with CUDA {cuda}"
            )
        release = table.release(torch)
        supported = table.cuda_for_driver(release, installed) if release else None
        why = f"driver {driver_text} is too old for CUDA {cuda}, which torch {torch} was built with: it needs {dotted(oldest)} or newer"
        if supported:
            return problem(
                f"{why}. A build of the same torch for CUDA {supported} works with this driver",
                table.install_command(torch, supported),
            )
        return problem(
            f"{why}. No build of this torch in flatout's version table supports it", newer_driver(snapshot)
        )
    report = smi_report(snapshot)
    newest_cuda = version(report.cuda) if report else None
    requirement = f"driver {driver_text}, CUDA {cuda} needs {dotted(oldest)} or newer"
    if newest_cuda and newest_cuda < (version(cuda) or ()):
        return note(
            f"{requirement}; it supports CUDA {report.cuda if report else ''}, so it cannot use PTX code for later GPUs",
            "nvidia-smi",
        )
    return ok(requirement)


@machine_check("FD022", THEME, ["environment"])
def visible_devices(snapshot: MachineSnapshot) -> CheckOutcome:
    """CUDA_VISIBLE_DEVICES names existing GPUs.

    CUDA stops reading the list at the first entry that is not a GPU: "0,7" on a machine with two GPUs leaves
    one, "7" none. An empty list hides all GPUs.
    """
    value, report = snapshot.variable("CUDA_VISIBLE_DEVICES"), smi_report(snapshot)
    if value is None:
        return ok("CUDA_VISIBLE_DEVICES is not set: every GPU is visible")
    if not has_gpu(snapshot):
        return note(f"CUDA_VISIBLE_DEVICES={value!r}; no GPU was found")
    entries = [entry.strip() for entry in value.split(",")]
    show_all = "unset CUDA_VISIBLE_DEVICES"
    if value.strip() in ("", "-1", "NoDevFiles"):
        return warning(f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU", show_all)
    if report is None or not report.gpus:
        return not_checked(
            f"CUDA_VISIBLE_DEVICES={value!r}; nvidia-smi did not list the GPUs to compare it with"
        )
    count = len(report.gpus)
    uuids = [gpu.uuid or "" for gpu in report.gpus]
    for number, entry in enumerate(entries):
        if (
            entry.startswith("MIG-")
            or (entry.isdigit() and int(entry) < count)
            or (entry.startswith("GPU-") and any(uuid.startswith(entry) for uuid in uuids))
        ):
            continue
        used = f"{number} of {len(entries)} are used" if number else "none is used"
        return problem(
            f"CUDA_VISIBLE_DEVICES={value!r}: {entry!r} is not a GPU of this machine (it has {count}), so {used}",
            "nvidia-smi -L",
        )
    if len(set(entries)) < len(entries):
        return problem(f"CUDA_VISIBLE_DEVICES={value!r} names a GPU twice; CUDA then uses none", show_all)
    if len(entries) < count:
        return note(f"CUDA_VISIBLE_DEVICES={value!r}: {len(entries)} of {count} GPUs are visible")
    return ok(f"CUDA_VISIBLE_DEVICES={value!r}: all {count} GPUs")


@machine_check("FD024", THEME, ["torch cuda"])
def torch_computes(snapshot: MachineSnapshot) -> CheckOutcome:
    """torch reaches the GPU, if there is one.

    `torch.cuda.is_available()` is False if driver, build and variables do not fit. Many scripts then silently
    train on the processor.
    """
    cuda, gpu = snapshot.torch["cuda"], has_gpu(snapshot)
    warnings = [str(text).splitlines()[0] for text in cuda.get("warnings") or () if text]
    if build_of(snapshot) is None and cuda.get("raised"):
        return not_checked("the imported module is not torch")
    if cuda.get("raised"):
        for explanation in explain_text(str(cuda["raised"])):
            return problem(explanation.finding.message, first_command(explanation.finding), warnings)
        return problem(f"using the GPU raised {cuda['raised']}", "nvidia-smi", warnings)
    if cuda.get("computes") is True:
        return ok(f"{len(cuda.get('devices') or ())} GPU(s) reached, and a test sum on the first is correct")
    if cuda.get("available") is True:
        return problem(
            "torch sees the GPU, but a test computation was wrong or did not finish",
            "compute-sanitizer python train.py",
            warnings,
        )
    if cuda.get("available") is not False:
        return not_checked("whether torch reaches a GPU was not recorded")
    if gpu is None:
        return not_checked(
            "torch.cuda.is_available() is False; whether there is a GPU could not be determined"
        )
    if not gpu:
        return ok("torch trains on the processor: there is no GPU")
    for cause in (cuda_build, driver, driver_for_cuda, visible_devices):
        result = cause.run(snapshot)
        if result.verdict in (Verdict.PROBLEM, Verdict.WARNING):
            return CheckOutcome(
                Verdict(result.verdict),
                f"torch.cuda.is_available() is False; {cause.code} gives the reason",
                result.fix,
                tuple(warnings),
            )
    return problem(
        "torch.cuda.is_available() is False although there is an NVIDIA GPU"
        + (f": {warnings[0]}" if warnings else ""),
        "nvidia-smi",
        warnings,
    )


WORST_FIRST = ("warning", "not checked", "note", "ok")


@machine_check("FD030", "GPUs", ["run nvidia-smi"], gpu=True)
def free_memory(snapshot: MachineSnapshot) -> CheckOutcome:
    """No other process uses the GPU.

    Another process takes memory and time: runs end out of memory, and every measured time is wrong.
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
        return note(f"{used}, by the display ({names})")
    if share > 0.1:
        return warning(
            f"{used}, by processes not shown here (of another user or container, or left behind)",
            "sudo fuser -v /dev/nvidia*",
        )
    return ok(f"{used}, by no computing process")


def _program(name: str) -> str:
    """The program's name without its folder and arguments."""
    return (name.split() or ["?"])[0].rpartition("/")[2] or "?"
