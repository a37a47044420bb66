"""Machines as `flatout doctor` would see them.

The texts use the formats of the kernel, nvidia-smi and torch; names and numbers are invented.
"""

import copy

from flatout.schema.machine_snapshot import CommandResult, Disk, MachineSnapshot

GIB = 2**30

MEMINFO = """MemTotal:       131072000 kB
MemFree:        98304000 kB
MemAvailable:   120586240 kB
Buffers:          204800 kB
SwapTotal:       8388604 kB
SwapFree:        8388604 kB
HugePages_Total:       0
"""
LIMITS = """Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max file size             unlimited            unlimited            bytes     
Max data size             unlimited            unlimited            bytes     
Max stack size            8388608              unlimited            bytes     
Max core file size        0                    unlimited            bytes     
Max resident set          unlimited            unlimited            bytes     
Max processes             513000               513000               processes 
Max open files            65536                1048576              files     
Max locked memory         unlimited            unlimited            bytes     
Max address space         unlimited            unlimited            bytes     
Max file locks            unlimited            unlimited            locks     
"""  # noqa: W291 - as the kernel writes it
MOUNTINFO = """22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
23 22 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
24 22 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:2 - sysfs sysfs rw
30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
25 22 0:5 / /dev rw,nosuid,relatime shared:8 - devtmpfs udev rw,size=65515356k,nr_inodes=16378839,mode=755
27 25 0:24 / /dev/shm rw,nosuid,nodev shared:10 - tmpfs tmpfs rw
"""
STATUS = """Name:\tpython
Cpus_allowed:\tffff
Cpus_allowed_list:\t0-15
Mems_allowed_list:\t0
"""
CXX = "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.\n"
ENVIRON = "/opt/venv/lib/python3.12/site-packages"

FILES = {
    "/proc/meminfo": MEMINFO,
    "/proc/loadavg": "0.42 0.30 0.25 2/812 4711\n",
    "/proc/self/limits": LIMITS,
    "/proc/self/status": STATUS,
    "/proc/version": "Linux version 6.8.0-45-generic (buildd@lcy02-amd64-115) (x86_64-linux-gnu-gcc-13) #45-Ubuntu SMP PREEMPT_DYNAMIC\n",
    "/proc/self/mountinfo": MOUNTINFO,
    "/proc/self/cgroup": "0::/user.slice/session-2.scope\n",
    "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc\n",
    "/sys/fs/cgroup/user.slice/session-2.scope/memory.max": "max\n",
    "/sys/fs/cgroup/user.slice/session-2.scope/cpu.max": "max 100000\n",
    "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nID=ubuntu\n',
    "/sys/devices/system/cpu/online": "0-15\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: gcc 13\n",
    "/.dockerenv": None,
    "/run/.containerenv": None,
    "/sys/bus/pci/devices/0000:17:00.0/class": "0x030200\n",
    "/sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de\n",
}

GPU = """\t<gpu id="00000000:17:00.0">
\t\t<product_name>{name}</product_name>
\t\t<uuid>GPU-0000000{index}-1111-2222-3333-444444444444</uuid>
\t\t<fb_memory_usage>
\t\t\t<total>81559 MiB</total>
\t\t\t<reserved>551 MiB</reserved>
\t\t\t<used>{used} MiB</used>
\t\t</fb_memory_usage>
\t\t<processes>
{processes}\t\t</processes>
\t</gpu>
"""
PROCESS = """\t\t\t<process_info>
\t\t\t\t<pid>4242</pid>
\t\t\t\t<type>C</type>
\t\t\t\t<process_name>python</process_name>
\t\t\t\t<used_memory>30000 MiB</used_memory>
\t\t\t</process_info>
"""
FINE = {"name": "NVIDIA H100 80GB HBM3", "used": 1, "processes": ""}


def smi(*gpus, driver="580.95.05", cuda="13.0"):
    """The output of `nvidia-smi -q -x` for healthy GPUs, apart from the given values of each."""
    body = "".join(GPU.format(**{**FINE, "index": number, **gpu}) for number, gpu in enumerate(gpus))
    out = (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
        "<nvidia_smi_log>\n\t<timestamp>Sat Nov 21 10:00:00 2026</timestamp>\n"
        f"\t<driver_version>{driver}</driver_version>\n\t<cuda_version>{cuda}</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>\n{body}</nvidia_smi_log>\n"
    )
    return CommandResult(["nvidia-smi", "-q", "-x"], 0, out)


_HEALTHY = MachineSnapshot(
    flatout="0.1.0",
    created="2026-11-21T10:00:00Z",
    working_folder="/home/ada/project",
    home_cache="/home/ada/.cache",
    temporary_folder="/tmp",
    files=FILES,
    folders={
        "/sys/bus/pci/devices": ["0000:00:00.0", "0000:17:00.0"],
        "/dev": ["nvidia0", "nvidiactl"],
        ".": ["train.py"],
    },
    environment={},
    python={
        "version": "3.12.4",
        "implementation": "CPython",
        "executable": "/opt/venv/bin/python",
        "machine": "x86_64",
        "prefix": "/opt/venv",
        "path": ["/usr/lib/python3.12", ENVIRON],
        "free_threaded": False,
        "libc": ["glibc", "2.39"],
        "header": True,
        "root": False,
    },
    packages=[
        ["numpy", "2.4.6", ENVIRON],
        ["nvidia_cudnn_cu13", "9.24.0.43", ENVIRON],
        ["nvidia_nccl_cu13", "2.30.7", ENVIRON],
        ["torch", "2.14.1", ENVIRON],
        ["triton", "3.8.0", ENVIRON],
    ],
    torch={
        "found": {"origin": f"{ENVIRON}/torch/__init__.py", "places": [f"{ENVIRON}/torch"]},
        "imported": {"import_s": 1.9, "file": f"{ENVIRON}/torch/__init__.py"},
        "build": {"version": "2.14.1+cu130", "cuda": "13.0", "hip": None, "warnings": []},
        "host": {"threads": 16, "warnings": []},
        "libraries": {
            "loaded": [
                f"{ENVIRON}/nvidia/cu13/lib/libcudart.so.13",
                f"{ENVIRON}/torch/lib/libgomp.so.1",
                f"{ENVIRON}/torch/lib/libtorch_cpu.so",
            ]
        },
        "cuda": {
            "available": True,
            "devices": [
                {
                    "name": "NVIDIA H100 80GB HBM3",
                    "capability": [9, 0],
                    "memory_bytes": 80 * GIB,
                }
            ],
            "computes": True,
            "warnings": [],
        },
    },
    command_results={
        "nvidia-smi": smi({}),
        "c++": CommandResult(["g++", "--version"], 0, CXX),
        "start-up hook": CommandResult(["python", "-c", "..."], 0, "77 ok\n"),
        "import torch": CommandResult(["python", "-m", "torch_child"], 0),
    },
    disks={
        "working folder": Disk("/home/ada/project", 900 * GIB, 400 * GIB, 10**7, True),
        "temporary folder": Disk("/tmp", 900 * GIB, 400 * GIB, 10**7, True),
        "cache": Disk("/home/ada/.cache", 900 * GIB, 400 * GIB, 10**7, True),
        "/dev/shm": Disk("/dev/shm", 62 * GIB, 62 * GIB, 10**7, True),
    },
)


def healthy():
    """A machine with one GPU and nothing to fix."""
    return copy.deepcopy(_HEALTHY)


def without_gpu():
    """The same without a GPU and its driver, and with the CPU build of torch."""
    snapshot = healthy()
    for path in (
        "/proc/driver/nvidia/version",
        "/sys/bus/pci/devices/0000:17:00.0/class",
        "/sys/bus/pci/devices/0000:17:00.0/vendor",
    ):
        snapshot.files[path] = None
    snapshot.folders |= {"/sys/bus/pci/devices": ["0000:00:00.0"], "/dev": []}
    snapshot.command_results["nvidia-smi"] = CommandResult(["nvidia-smi"], installed=False)
    snapshot.torch["build"] |= {"version": "2.14.1+cpu", "cuda": None}
    snapshot.torch["cuda"] = {"available": False, "warnings": []}
    return snapshot
