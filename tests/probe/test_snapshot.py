"""The inputs of a Sight, below a root that is a folder here: a container's own files, and nothing secret."""

import json

import pytest

from flatout.probe.snapshot import environment, gather, packages, space
from flatout.schema.machine_snapshot import MachineSnapshot

GROUP = "/sys/fs/cgroup"
V2 = {
    "/proc/self/mountinfo": f"1 0 0:1 / / rw - overlay overlay rw\n"
    f"2 1 0:2 / {GROUP} ro - cgroup2 cgroup rw\n3 1 0:3 / /dev/shm rw - tmpfs shm rw,size=65536k\n",
    "/proc/self/cgroup": "0::/pod/c1\n",
    f"{GROUP}/cgroup.controllers": "cpu memory pids\n",
    f"{GROUP}/pod/c1/memory.max": "max\n",
    f"{GROUP}/pod/memory.max": "2147483648\n",
    f"{GROUP}/pod/c1/cpu.max": "50000 100000\n",
    "/proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n",
    "/sys/bus/pci/devices/0000:01:00.0/class": "0x030000\n",
    "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:02:00.0/class": "0x020000\n",
    "/sys/bus/pci/devices/0000:02:00.0/vendor": "0x10de\n",
}


@pytest.fixture
def container(tmp_path):
    for path, text in V2.items():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    (tmp_path / "dev" / "nvidia0").parent.mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "sda").touch()
    return tmp_path


def test_the_files_with_limits(container):
    """The files of the own group and of all groups above it, found from the kernel's text; each under its
    path inside the container.
    """
    snapshot = gather(MachineSnapshot(), container)
    assert {path: snapshot.files[path] for path in V2 if "0000:02:00.0/vendor" not in path} == {
        path: text for path, text in V2.items() if "0000:02:00.0/vendor" not in path
    }
    assert snapshot.files[f"{GROUP}/pod/c1/memory.max"] == "max\n"
    assert snapshot.files["/.dockerenv"] is None
    assert snapshot.has_nvidia_on_pci is True
    assert snapshot.folders["/dev"] == ["nvidia0"]
    assert "/sys/bus/pci/devices/0000:02:00.0/vendor" not in snapshot.files  # a network card is not inspected


def test_a_sight_survives_json(container):
    snapshot = gather(MachineSnapshot(created="2026-11-21T10:00:00Z"), container)
    again = MachineSnapshot.from_json(json.loads(json.dumps(snapshot.to_json())))
    assert again.to_json() == snapshot.to_json() | {
        "folders": {name: found for name, found in snapshot.folders.items() if found is not None}
    }


def test_an_empty_root(tmp_path):
    snapshot = gather(MachineSnapshot(), tmp_path / "none")
    assert set(snapshot.files.values()) == {None}
    assert snapshot.has_nvidia_on_pci is None


def test_no_secret_is_kept():
    given = {
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "CUDA_API_KEY": "x",
        "PYTORCH_TOKEN": "x",
        "HOME": "/home/ada",
        "LD_PRELOAD": "",
        "SSH_AUTH_SOCK": "x",
    }
    assert environment(given) == {"LD_PRELOAD": "", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_packages_in_the_order_of_the_path(tmp_path):
    for folder, names in (
        ("a", ("torch-2.14.1.dist-info", "nvidia_cudnn_cu13-9.24.0.43.dist-info", "click-8.1.dist-info")),
        ("b", ("torch-2.11.0+cpu.dist-info", "numpy-2.4.6-py3.12.egg-info")),
    ):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert packages([a, b, a, str(tmp_path / "none")]) == [
        ["nvidia_cudnn_cu13", "9.24.0.43", a],
        ["torch", "2.14.1", a],
        ["numpy", "2.4.6", b],
        ["torch", "2.11.0+cpu", b],
    ]


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path):
    found = space(str(tmp_path / "a" / "b"))
    assert found.path == str(tmp_path / "a" / "b")
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.writable
