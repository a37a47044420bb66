"""Install commands for this system: its package manager, or conda in a conda environment."""

from flatout.probe.proc import os_release
from flatout.schema.machine_snapshot import MachineSnapshot

MANAGERS = {
    "debian": "apt-get",
    "ubuntu": "apt-get",
    "fedora": "dnf",
    "rhel": "dnf",
    "centos": "dnf",
    "suse": "zypper",
    "arch": "pacman",
    "alpine": "apk",
}


def manager(snapshot: MachineSnapshot) -> str:
    """The package manager; apt-get if unknown, because most containers are Debian."""
    release = os_release(snapshot.text("/etc/os-release"))
    for name in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        if name in MANAGERS:
            return "yum" if name == "centos" and release.get("VERSION_ID") == "7" else MANAGERS[name]
    return "apt-get"


def install_command(snapshot: MachineSnapshot, debian: str, fedora: str, conda: str = "") -> str:
    if conda and snapshot.variable("CONDA_PREFIX"):
        return f"conda install -c conda-forge {conda}"
    name = manager(snapshot)
    if name == "pacman":
        return f"sudo pacman -S {debian}"
    if name == "apk":
        return f"sudo apk add {debian}"
    return f"sudo {name} install {debian if name == 'apt-get' else fedora}"


def newer_driver(snapshot: MachineSnapshot) -> str:
    """The command for a newer driver, to run on the host: a container uses the host's driver."""
    ubuntu = os_release(snapshot.text("/etc/os-release")).get("ID") == "ubuntu"
    return (
        "sudo ubuntu-drivers install"
        if ubuntu and not in_container(snapshot)
        else "xdg-open https://www.nvidia.com/drivers"
    )


def in_container(snapshot: MachineSnapshot) -> bool:
    """Whether a container identifies itself as one."""
    return (
        snapshot.text("/.dockerenv") is not None
        or snapshot.text("/run/.containerenv") is not None
        or snapshot.variable("KUBERNETES_SERVICE_HOST") is not None
    )
