"""Every check of `flatout doctor` on a machine with one fault: the verdict, the text, and the command that
fixes it.
"""

from collections.abc import Callable

import pytest
from machines import ENVIRON, GIB, PROCESS, healthy, smi, without_gpu

from flatout.diagnose.doctor.checks import TABLE, run_checks
from flatout.diagnose.doctor.versions import versions
from flatout.schema.machine_snapshot import CommandResult, Disk, MachineSnapshot, Verdict

Change = Callable[[MachineSnapshot], object]


def checked(snapshot):
    return {check.code: check for check in run_checks(snapshot)}


def test_a_healthy_machine_is_fine():
    assert {
        code: (check.verdict, check.observed)
        for code, check in checked(healthy()).items()
        if check.verdict != Verdict.OK
    } == {}
    assert len(checked(healthy())) == len(TABLE)


def test_a_machine_without_a_gpu_is_fine():
    """Checks about GPUs are skipped; a missing GPU is a note."""
    found = checked(without_gpu())
    assert {code: check.verdict for code, check in found.items() if check.verdict != Verdict.OK} == {
        "FD020": "note"
    }
    assert not {"FD021", "FD030"} & set(found)


def test_an_empty_record_is_not_fine():
    assert {check.verdict for check in run_checks(MachineSnapshot())} == {"not checked"}
    assert not [check.observed for check in run_checks(MachineSnapshot()) if "mistake" in check.observed]


def cannot_import(message, kind="ImportError", trace=""):
    def change(snapshot):
        snapshot.torch = {
            "found": snapshot.torch["found"],
            "import failed": {
                "kind": kind,
                "message": message,
                "traceback": trace
                or "Traceback (most recent call last):\n"
                f'  File "{ENVIRON}/torch/__init__.py", line 427, in <module>\n    from torch._C import *\n{kind}: {message}\n',
            },
        }

    return change


def other_python(snapshot):
    """PYTHONPATH leads to the packages of a Python 3.11."""
    cannot_import(
        "\nFailed to load PyTorch C extensions:\n    It appears that PyTorch has loaded the `torch/_C` folder\n ..."
    )(snapshot)
    snapshot.torch["found"] = {
        "origin": "/opt/py311/torch/__init__.py",
        "places": ["/opt/py311/torch"],
        "compiled": ["_C.cpython-311-x86_64-linux-gnu.so"],
    }
    snapshot.environment["PYTHONPATH"] = "/opt/py311"


def gpu(*boards, **options):
    return lambda snapshot: snapshot.command_results.__setitem__("nvidia-smi", smi(*boards, **options))


def files(**changes):
    """``files(**{"/proc/x": text})``"""
    return lambda snapshot: snapshot.files.update(changes)


def variables(**changes):
    return lambda snapshot: snapshot.environment.update(changes)


def old_driver(snapshot):
    """Driver 535 with CUDA 12.2 under a torch built for CUDA 13.0: torch warns, and CUDA is unavailable."""
    snapshot.command_results["nvidia-smi"] = smi(
        {"name": "NVIDIA A100-SXM4-80GB"}, driver="535.54.03", cuda="12.2"
    )
    snapshot.files["/proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"
    )
    snapshot.torch["cuda"] |= {
        "available": False,
        "devices": [],
        "computes": None,
        "warnings": [
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading ..."
        ],
    }


def ancient_driver(snapshot: MachineSnapshot) -> None:
    """Driver 470 with CUDA 11.4: too old for every build of this torch."""
    old_driver(snapshot)
    snapshot.command_results["nvidia-smi"] = smi(
        {"name": "Tesla V100-SXM2-32GB"}, driver="470.82.01", cuda="11.4"
    )


def driverless(snapshot):
    """A container started without the GPU; sysfs still shows it on the bus."""
    run("nvidia-smi", installed=False)(snapshot)
    snapshot.files |= {"/proc/driver/nvidia/version": None, "/.dockerenv": ""}
    snapshot.folders["/dev"] = []
    snapshot.torch["cuda"] |= {"available": False, "computes": None, "devices": []}


def docker(snapshot: MachineSnapshot) -> None:
    """`docker run --cpus 2 --memory 3g` on a machine of 16 cores, with cgroups v2 in their own namespace."""
    snapshot.files |= {
        "/.dockerenv": "",
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/cpu.max": "200000 100000\n",
        "/sys/fs/cgroup/memory.max": "3221225472\n",
        "/sys/fs/cgroup/memory.current": "1073741824\n",
        "/sys/fs/cgroup/pids.max": "512\n",
        "/proc/self/mountinfo": DOCKER_MOUNTS,
    }
    snapshot.disks["/dev/shm"] = Disk("/dev/shm", 64 * 2**20, 64 * 2**20, None, True)


DOCKER_MOUNTS = """1201 1120 0:84 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A:/var/lib/docker/overlay2/l/B,upperdir=/u,workdir=/w
1202 1201 0:87 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1203 1201 0:88 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
1205 1204 0:27 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw
1207 1203 0:86 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
"""


def limit(name, soft, hard):
    def change(snapshot):
        text = snapshot.files["/proc/self/limits"] or ""
        given = f"Max {name:<22}{soft:<21}{hard:<21}units"
        snapshot.files["/proc/self/limits"] = "\n".join(
            given if line.startswith(f"Max {name} ") else line for line in text.splitlines()
        )

    return change


def no_torch(snapshot):
    snapshot.packages = [each for each in snapshot.packages or [] if each[0] != "torch"]
    snapshot.torch = {"found": {"origin": None, "places": []}}


def set_python(**changes):
    return lambda snapshot: snapshot.python.update(changes)


def run(name, **changes):
    return lambda snapshot: snapshot.command_results.__setitem__(name, CommandResult([name], **changes))


def disk(name, free, **more):
    return lambda snapshot: snapshot.disks.__setitem__(
        name, Disk(f"/{name}", 900 * GIB, free, **{"free_files": 10**6, "writable": True, **more})
    )


def torch_stage(stage: str, **changes: object) -> Change:
    return lambda snapshot: snapshot.torch[stage].update(changes)


OLDER = "pip install --force-reinstall torch==2.14.1 --index-url https://download.pytorch.org/whl/cu126"
FAULTS = [
    # Python
    ("FD001", "problem", set_python(version="3.9.18"), "needs 3.10", "-m venv"),
    ("FD001", "note", set_python(version="3.15.0"), "experimental", "python3.14 -m venv .venv"),
    (
        "FD001",
        "warning",
        set_python(version="3.16.0"),
        "wheels of torch 2.14 are for 3.10 to 3.14",
        "python3.14 -m venv .venv",
    ),
    (
        "FD003",
        "problem",
        lambda s: s.folders.__setitem__(".", ["torch.py"]),
        "hides the installed module",
        "mv torch.py my_torch.py",
    ),
    (
        "FD003",
        "warning",
        lambda s: s.folders.__setitem__(".", ["random.py", "train.py"]),
        "random",
        "mv random.py my_random.py",
    ),
    (
        "FD005",
        "problem",
        run("start-up hook", code=0, out=""),
        "was not loaded",
        "pip install --force-reinstall",
    ),
    # torch that cannot be imported, by the family of the message
    ("FD010", "problem", no_torch, "torch is not installed", "pip install torch"),
    (
        "FD010",
        "problem",
        cannot_import("libcudnn.so.9: cannot open shared object file: No such file or directory"),
        "libcudnn.so.9 was not found",
        "torch==2.14.1",
    ),
    (
        "FD010",
        "problem",
        other_python,
        "was built for another Python",
        "unset PYTHONPATH",
    ),
    (
        "FD010",
        "problem",
        cannot_import("something that nobody has seen", "RuntimeError"),
        "RuntimeError: something that nobody has seen",
        "--force-reinstall",
    ),
    (
        "FD010",
        "problem",
        lambda s: (
            s.torch.clear(),
            s.command_results.update({"import torch": CommandResult(["python"], -4)}),
        ),
        "SIGILL",
        "--force-reinstall",
    ),
    (
        "FD010",
        "problem",
        lambda s: (
            s.torch.clear(),
            s.command_results.update({"import torch": CommandResult(["python"], None, timed_out=True)}),
        ),
        "did not finish",
        "faulthandler",
    ),
    (
        "FD010",
        "problem",
        lambda s: (
            s.torch.clear(),
            s.command_results.update(
                {
                    "import torch": CommandResult(
                        ["python"], 1, err="AttributeError: module 'types' has no x\n"
                    )
                }
            ),
        ),
        "module 'types'",
        "import torch",
    ),
    ("FD010", "problem", torch_stage("imported", file=None), "an empty folder", "pip install"),
    ("FD010", "warning", torch_stage("imported", import_s=44.0), "took 44 s", "venv"),
    (
        "FD011",
        "warning",
        torch_stage("build", version="2.3.1+cu121"),
        "2.11 to 2.14",
        'pip install "torch>=2.11"',
    ),
    (
        "FD011",
        "note",
        torch_stage("build", version="2.99.0"),
        "newer than 2.14, the newest release that flatout was tested with",
        "--upgrade flatout",
    ),
    (
        "FD012",
        "problem",
        torch_stage("build", version="2.14.1+cpu", cuda=None),
        "built for the CPU only",
        "whl/cu132",
    ),
    (
        "FD018",
        "warning",
        torch_stage(
            "libraries",
            loaded=["/usr/local/cuda/lib64/libcudart.so.13", f"{ENVIRON}/torch/lib/libtorch_cpu.so"],
        ),
        "not torch's own",
        'echo "$LD_LIBRARY_PATH"',
    ),
    (
        "FD018",
        "note",
        torch_stage(
            "libraries",
            loaded=[
                f"{ENVIRON}/torch/lib/libtorch_cpu.so",
                f"{ENVIRON}/torch/lib/libgomp.so.1",
                "/opt/intel/libiomp5.so",
            ],
        ),
        "two OpenMP",
        "",
    ),
    # the driver
    (
        "FD020",
        "problem",
        run(
            "nvidia-smi",
            code=18,
            out="Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183\n",
        ),
        "old one",
        "sudo reboot",
    ),
    (
        "FD020",
        "problem",
        run(
            "nvidia-smi",
            code=9,
            out="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
        ),
        "kernel module is not loaded",
        "modprobe nvidia",
    ),
    (
        "FD020",
        "problem",
        run(
            "nvidia-smi",
            code=15,
            out="Unable to determine the device handle for GPU0000:17:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
        ),
        "no longer answers",
        "dmesg",
    ),
    ("FD020", "problem", run("nvidia-smi", timed_out=True), "did not answer", "dmesg"),
    ("FD020", "problem", driverless, "on the bus", "docker run --gpus all"),
    (
        "FD020",
        "note",
        run("nvidia-smi", installed=False),
        "driver 580.95.05 is loaded",
        "docker run --gpus all",
    ),
    (
        "FD020",
        "note",
        lambda s: (
            run("nvidia-smi", installed=False)(s),
            s.files.update({"/proc/driver/nvidia/version": None}),
        ),
        "torch reaches the GPU",
        "",
    ),
    ("FD021", "problem", old_driver, "535.54.03 is too old for CUDA 13.0", OLDER),
    ("FD024", "problem", old_driver, "FD021", OLDER),
    ("FD021", "problem", ancient_driver, "No build of this torch", "drivers install"),
    ("FD021", "note", gpu({}, driver="580.65.06", cuda="12.9"), "PTX", "nvidia-smi"),
    (
        "FD022",
        "problem",
        variables(CUDA_VISIBLE_DEVICES="0,3"),
        "'3' is not a GPU of this machine (it has 1), so 1 of 2 are used",
        "nvidia-smi -L",
    ),
    ("FD022", "problem", variables(CUDA_VISIBLE_DEVICES="0,0"), "twice", "unset"),
    ("FD022", "warning", variables(CUDA_VISIBLE_DEVICES=""), "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    (
        "FD024",
        "problem",
        torch_stage("cuda", available=False, computes=None, warnings=["CUDA unknown error"]),
        "CUDA unknown error",
        "nvidia-smi",
    ),
    (
        "FD024",
        "problem",
        torch_stage(
            "cuda",
            raised="RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
        "a kernel was launched that was not built for this GPU",
        "torch.cuda.get_device_capability(), torch.cuda.get_arch_list()",
    ),
    (
        "FD024",
        "warning",
        lambda s: (
            variables(CUDA_VISIBLE_DEVICES="-1")(s),
            torch_stage("cuda", available=False, computes=None)(s),
        ),
        "FD022",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    # the GPUs
    ("FD030", "warning", gpu({"used": 31000, "processes": PROCESS}), "by python (4242)", "ps -o"),
    (
        "FD030",
        "note",
        gpu({"used": 31000, "processes": PROCESS.replace(">C<", ">G<").replace("python", "Xorg")}),
        "by the display (Xorg)",
        "",
    ),
    # compilers and the system
    (
        "FD040",
        "warning",
        run("c++", code=0, out="g++ (GCC) 4.8.5 20150623 (Red Hat 4.8.5-44)\n"),
        "4.8.5 is too old",
        "apt-get install g++",
    ),
    ("FD041", "warning", set_python(header=False), "Python.h is missing", "apt-get install python3.12-dev"),
    ("FD050", "problem", set_python(libc=["glibc", "2.17"]), "the last torch for it is 2.6", "docker run"),
    ("FD050", "warning", set_python(libc=["", ""]), "musl", "docker run"),
    # the processor
    (
        "FD060",
        "ok",
        lambda s: (docker(s), torch_stage("host", threads=2)(s)),
        "torch uses 2 thread(s), which fits",
        "",
    ),
    ("FD060", "not checked", lambda s: (docker(s), s.torch.pop("host")), "could not be determined", ""),
    (
        "FD060",
        "note",
        files(**{"/proc/self/status": "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n"}),
        "bound to part",
        "taskset",
    ),
    (
        "FD064",
        "warning",
        variables(OMP_NUM_THREADS="64"),
        "OMP_NUM_THREADS=64 for 16 core(s)",
        "export OMP_NUM_THREADS=16",
    ),
    (
        "FD064",
        "warning",
        variables(MKL_NUM_THREADS="four"),
        "not a number of threads",
        "unset MKL_NUM_THREADS",
    ),
    (
        "FD066",
        "warning",
        files(**{"/proc/loadavg": "31.50 30.00 25.00 9/812 4711\n"}),
        "other programs are busy (load 31.5 on 16 cores): timings will be unreliable",
        "top",
    ),
    # memory
    (
        "FD070",
        "warning",
        docker,
        "3.00 GiB by the control group's limit (2.00 GiB unused)",
        "docker run --memory",
    ),
    ("FD071", "problem", docker, "64.0 MiB", "docker run --shm-size=8g ..."),
    (
        "FD071",
        "problem",
        files(**{"/proc/self/mountinfo": DOCKER_MOUNTS.replace("/dev/shm", "/dev/other")}),
        "not a separate file system",
        "mount -t tmpfs",
    ),
    (
        "FD071",
        "warning",
        lambda s: s.disks.update({"/dev/shm": Disk("/dev/shm", 62 * GIB, GIB // 4, None, True)}),
        "256 MiB of the 62.0 GiB",
        "ls -lS /dev/shm",
    ),
    # limits, disks, switches
    ("FD080", "warning", limit("open files", "1024", "1048576"), "1024 files may be open", "ulimit -n 65536"),
    ("FD080", "warning", limit("open files", "1024", "4096"), "1024 files may be open", "limits.d"),
    ("FD080", "problem", limit("open files", "64", "64"), "64 files may be open", "limits.d"),
    ("FD090", "problem", disk("working folder", GIB // 4), "256 MiB left", "du -xh"),
    ("FD090", "problem", disk("working folder", 90 * GIB, free_files=3), "inodes", "du -xh"),
    ("FD090", "problem", disk("working folder", 90 * GIB, writable=False), "cannot be written", "du -xh"),
    ("FD090", "warning", disk("working folder", 4 * GIB), "4.00 GiB of 900 GiB left", "du -xh"),
    ("FD090", "problem", disk("temporary folder", 100), "100 bytes left", "export TMPDIR"),
    ("FD090", "problem", disk("cache", 90 * GIB, writable=False), "cannot be written", "XDG_CACHE_HOME"),
    (
        "FD100",
        "warning",
        variables(CUDA_LAUNCH_BLOCKING="1"),
        "CUDA_LAUNCH_BLOCKING=1",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    ("FD100", "ok", variables(CUDA_LAUNCH_BLOCKING="0"), "", ""),
    ("FD100", "warning", variables(PYTHONDEVMODE="1"), "slows every line", "unset PYTHONDEVMODE"),
    ("FD100", "warning", variables(NCCL_P2P_DISABLE="1"), "slower path", "unset NCCL_P2P_DISABLE"),
    ("FD100", "warning", variables(NVIDIA_TF32_OVERRIDE="0"), "Tensor Cores", "unset NVIDIA_TF32_OVERRIDE"),
]


@pytest.mark.parametrize(
    ("code", "verdict", "change", "seen", "fix"),
    FAULTS,
    ids=[f"{code}-{seen[:24]}" for code, _, _, seen, _ in FAULTS],
)
def test_a_fault_is_named(code, verdict, change, seen, fix):
    snapshot = healthy()
    change(snapshot)
    found = checked(snapshot)[code]
    assert (found.verdict, found.code) == (verdict, code), found
    assert seen in found.observed, found
    assert fix in found.fix, found
    if verdict in ("problem", "warning"):
        assert found.fix, found
        assert found.why, found


def test_no_advice_takes_the_gpu_away():
    """The driver's libcuda may be reached through LD_LIBRARY_PATH alone, and another node may have the GPU."""
    for _, _, change, *_ in FAULTS:
        snapshot = healthy()
        change(snapshot)
        fixes = [found.fix for found in checked(snapshot).values()]
        assert not [fix for fix in fixes if "unset LD_LIBRARY_PATH" in fix or "whl/cpu" in fix]


def test_every_check_has_a_fault_that_it_names():
    """A check that no fault in the table turns red would prove nothing."""
    assert {check.code for check in TABLE} - {
        code for code, verdict, *_ in FAULTS if verdict != "ok"
    } == set()


def test_one_fault_is_one_alarm():
    """A fault in one place does not make unrelated checks red; checks that cannot reach torch say so and name
    the cause.
    """
    expected = {"FD021", "FD024"}
    snapshot = healthy()
    old_driver(snapshot)
    assert {
        code for code, check in checked(snapshot).items() if check.verdict in ("problem", "warning")
    } == expected


def test_root_needs_no_sudo():
    snapshot = healthy()
    gpu({"used": 30000})(snapshot)
    assert checked(snapshot)["FD030"].fix == "sudo fuser -v /dev/nvidia*"
    snapshot.python["root"] = True
    assert checked(snapshot)["FD030"].fix == "fuser -v /dev/nvidia*"


@pytest.mark.parametrize(
    ("release", "fix"),
    [
        ("ID=debian\n", "sudo apt-get install g++"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "sudo dnf install gcc-c++"),
        ('ID="centos"\nVERSION_ID="7"\n', "sudo yum install gcc-c++"),
        ("ID=arch\n", "sudo pacman -S g++"),
        ("", "sudo apt-get install g++"),
    ],
)
def test_the_command_is_of_this_system(release, fix):
    snapshot = healthy()
    snapshot.files["/etc/os-release"] = release
    snapshot.command_results["c++"] = CommandResult(["g++"], installed=False)
    assert checked(snapshot)["FD040"].fix == fix
    snapshot.environment["CONDA_PREFIX"] = "/opt/conda"
    assert checked(snapshot)["FD040"].fix == "conda install -c conda-forge gxx"


def test_a_broken_torch_leaves_the_rest():
    snapshot = healthy()
    cannot_import("libcudnn.so.9: cannot open shared object file: No such file or directory")(snapshot)
    found = checked(snapshot)
    assert {code for code, check in found.items() if check.verdict == "problem"} == {"FD010"}
    assert found["FD024"].verdict == "not checked"
    assert found["FD011"].verdict == "ok"  # the installed distribution still reports its version
    assert found["FD020"].verdict == "ok"


def test_the_table_of_versions():
    """Every row names its source and date; a fix installs only builds that the release really has."""
    import json

    from flatout.diagnose.doctor.versions import TABLE_FILE

    data = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    for row in (*data["drivers"], *data["torch"]):
        sources = row.get("sources") or [row["source"]]
        assert all(source.startswith("https://") for source in sources)
        assert len(row["date"]) == 10
    assert [release.torch for release in versions().releases] == sorted(
        (r.torch for r in versions().releases), key=lambda t: int(t.split(".")[1]), reverse=True
    )
    assert versions().cuda_for_driver(versions().release("2.14.1"), (535, 54)) == "12.6"
    assert versions().cuda_for_driver(versions().release("2.14.1"), (470, 82)) is None
