"""`--device`: the device that a program runs on.

For the CPU `flatout.agent.device` redirects the program; a card is chosen by CUDA_VISIBLE_DEVICES.
"""

import os
import re

import click

from flatout.job.interpreter import python_of
from flatout.launch.command import Command
from flatout.probe.gpus import devices_of_torch
from flatout.render.formatting import shell
from flatout.schema.errors import UsageError
from flatout.schema.facts import DEVICE_VARIABLE

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_PATTERN = re.compile(r"cpu|cuda(:(0|[1-9]\d{0,2}))?")


class DeviceByName(click.ParamType):
    """A device name: ``cpu``, ``cuda`` or ``cuda:1``."""

    name = "device"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip().lower()
        if not DEVICE_PATTERN.fullmatch(text):
            self.fail(f"{value!r} is not a device; write cpu, cuda or cuda:1", param, ctx)
        return text


device_option = click.option(
    "--device",
    type=DeviceByName(),
    metavar="cpu|cuda|cuda:N",
    help='Run on the CPU, whichever device the script names (`.cuda()`, device="cuda"), or on card N alone.',
)


def apply_device(
    device: str | None,
    cmd: Command,
    command: str,
    procs: int = 1,
    gpus: bool = False,
    remote_option: str = "",
) -> None:
    """Make the programs that this process starts run on ``device``; they and the levers see no other card.

    ``remote_option`` is the one that starts the program on other machines. Raises UsageError if ``device`` is
    unavailable or contradicts another option."""
    if device is None:
        return
    if cmd.disabled_by:
        raise UsageError(
            f"`python {cmd.disabled_by}` disables flatout, so --device {device} cannot redirect anything. Remove {cmd.disabled_by}."
        )
    if remote_option:
        raise UsageError(
            f"--device {device} is a device of this machine, but {remote_option} starts the program on others. Use one of them."
        )
    if gpus:
        raise UsageError(
            f"--gpus gives each rank its own CUDA device, but --device {device} is a single device. Use one of them."
        )
    if procs > 1 and device != "cpu":
        raise UsageError(
            f"--procs {procs} would put all ranks on {device}. Use --gpus {procs} for a GPU each, or --device cpu."
        )
    if device == "cpu":
        os.environ[VISIBLE_DEVICES] = ""  # a call that is not redirected fails and takes no GPU memory
        os.environ[DEVICE_VARIABLE] = device
        return
    _require_device(device, cmd, command)
    if number := device.partition(":")[2]:
        visible = os.environ.get(VISIBLE_DEVICES)
        os.environ[VISIBLE_DEVICES] = visible.split(",")[int(number)].strip() if visible else number


def device_hint(device: str | None) -> str:
    """Return the option as text for a suggested command."""
    return f"--device {device} " if device is not None else ""


def _require_device(device: str, cmd: Command, command: str) -> None:
    """Check that the program's torch sees the device.

    Without torch, the program itself reports the failure."""
    devices = devices_of_torch(python_of(cmd.argv))
    if devices is None or device in devices or any(name.partition(":")[0] == device for name in devices):
        return
    shown = ", ".join(f"{name} ({title})" if title else name for name, title in devices.items())
    raise UsageError(
        f"this machine has no device {device}. torch sees {shown}. Try `flatout {command} --device {[*devices][-1]} {shell(cmd.shown)}`."
    )
