"""Install commands for this system: its package manager, or conda in a conda environment."""

from __future__ import annotations

from flatout.plan.sight import Sight
from flatout.probe.proc import os_release

MANAGERS = {"debian": "apt-get", "ubuntu": "apt-get", "fedora": "dnf", "rhel": "dnf", "centos": "dnf", "suse": "zypper", "arch": "pacman", "alpine": "apk"}


def manager(sight: Sight) -> str:
    """The package manager; apt-get if unknown, because most containers are Debian."""
    release = os_release(sight.text("/etc/os-release"))
    for name in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        if name in MANAGERS:
            return "yum" if name == "centos" and release.get("VERSION_ID") == "7" else MANAGERS[name]
    return "apt-get"


def install(sight: Sight, debian: str, fedora: str, conda: str = "") -> str:
    if conda and sight.variable("CONDA_PREFIX"):
        return f"conda install -c conda-forge {conda}"
    name = manager(sight)
    if name == "pacman":
        return f"sudo pacman -S {debian}"
    if name == "apk":
        return f"sudo apk add {debian}"
    return f"sudo {name} install {debian if name == 'apt-get' else fedora}"


def upgrade(sight: Sight) -> str:
    name = manager(sight)
    return {"apt-get": "sudo apt-get dist-upgrade", "pacman": "sudo pacman -Syu", "apk": "sudo apk upgrade"}.get(name, f"sudo {name} upgrade")


def newer_driver(sight: Sight) -> str:
    """The command for a newer driver, to run on the host: a container uses the host's driver."""
    ubuntu = os_release(sight.text("/etc/os-release")).get("ID") == "ubuntu"
    return "sudo ubuntu-drivers install" if ubuntu and not contained(sight) else "xdg-open https://www.nvidia.com/drivers"


def contained(sight: Sight) -> bool:
    """Whether a container identifies itself as one."""
    return sight.text("/.dockerenv") is not None or sight.text("/run/.containerenv") is not None or sight.variable("KUBERNETES_SERVICE_HOST") is not None
