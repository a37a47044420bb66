"""`--device`: the device that a program runs on, whatever it names. What it changes is in `flatout.capture.device`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from flatout.launch.command import Command
from flatout.plan.errors import UsageError
from flatout.plan.facts import ASKED_DEVICE
from flatout.probe.gpus import devices_of_torch

SHAPE = re.compile(r"cpu|mps|(cuda|xpu)(:(0|[1-9]\d{0,2}))?")


class DeviceByName(click.ParamType):
    """``cpu``, ``cuda``, ``cuda:1``, ``xpu``, ``mps``."""

    name = "device"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        text = str(value).strip().lower()
        if not SHAPE.fullmatch(text):
            self.fail(f"{value!r} is no device; write cpu, cuda, cuda:1, xpu or mps", param, ctx)
        return text


device_option = click.option("--device", default=None, type=DeviceByName(), metavar="cpu|cuda|cuda:N|xpu|mps",
                      help="Run on this device what the script does on another: `.cuda()`, device=\"cuda\", checkpoints, autocast, DataParallel.")


def choose(device: str | None, cmd: Command, command: str, procs: int = 1, gpus: bool = False, elsewhere: str = "") -> None:
    """From here on, whatever this process starts runs on ``device``; levers see no other. ``elsewhere`` is the option that starts it on other machines.

    Raises UsageError where that cannot be.
    """
    if device is None:
        return
    if cmd.closed:
        raise UsageError(f"`python {cmd.closed}` disables flatout, so --device {device} cannot redirect anything. Remove {cmd.closed}.")
    if elsewhere:
        raise UsageError(f"--device {device} is a device of this machine, and {elsewhere} starts the program on others. Give one of them.")
    if gpus:
        raise UsageError(f"--gpus gives each rank a CUDA device of its own, and --device {device} is one device. Give one of them.")
    if procs > 1 and device != "cpu":
        raise UsageError(f"--procs {procs} would put all ranks on {device}. Use --gpus {procs} for a GPU each, or --device cpu.")
    if device != "cpu":
        _must_be_there(device, cmd, command)
    if not device.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is not redirected fails, and takes no memory of a card
    os.environ[ASKED_DEVICE] = device


def hint(device: str | None) -> str:
    """The option, as it is written in a command that is proposed."""
    return f"--device {device} " if device is not None else ""


def _must_be_there(device: str, cmd: Command, command: str) -> None:
    """As the torch of the program sees it; where no torch answers, the program itself will say so."""
    is_python = Path(cmd.argv[0]).name.startswith("python")
    found = devices_of_torch(cmd.argv[0] if is_python else None)
    if found is None or device in found or any(name.partition(":")[0] == device for name in found):
        return
    shown = ", ".join(f"{name} ({title})" if title else name for name, title in found.items())
    raise UsageError(f"this machine has no device {device}. torch sees {shown}. Try `flatout {command} --device {[*found][-1]} {' '.join(cmd.shown)}`.")
