"""`flatout kernel`: check, bench and begin kernels, our own and a person's."""

from __future__ import annotations

import click


@click.group()
def command() -> None:
    """Check and measure kernels, ours or your own, and write the beginning of a new one.

    \b
    flatout kernel check                       all of ours
    flatout kernel check path.py:function      your own, beside `function_reference` and `function_cases`
    flatout kernel bench layer_norm            against the reference, torch.compile and this device's roofline
    flatout kernel new my_kernel               a folder to start from, in CUDA C++ and Triton
    """


@command.command()
@click.argument("subjects", nargs=-1, metavar="[NAME | FOLDER | FILE.py:FUNCTION]...")
@click.option("--limit", default="10m", help="End a kernel whose checks take longer than this (10m).")
@click.option("--quiet", is_flag=True, help="Show only what did not pass.")
def check(subjects: tuple[str, ...], limit: str, quiet: bool) -> int:
    """Is it right? Values and gradients against float64, memory, determinism, registration, and known-wrong variants.

    What cannot be checked on this machine is listed as not run. Ends with 1 where a check failed.
    """
    from flatout.cli.kernel_check import check_all

    return check_all(subjects, limit, quiet)


@command.command()
@click.argument("subject", metavar="NAME | FOLDER | FILE.py:FUNCTION")
@click.option("--rounds", default=8, show_default=True, help="Turns of every contestant.")
@click.option("--case", "only", default="", help="Only cases whose title contains this.")
def bench(subject: str, rounds: int, only: str) -> None:
    """How fast is it? Against the reference, torch.compile of the reference, and what this device can move and multiply."""
    from flatout.cli.kernel_bench import show

    show(subject, rounds, only)


@command.command()
@click.argument("name")
@click.option("--triton", "way", flag_value="triton", help="In Triton only.")
@click.option("--cuda", "way", flag_value="cuda", help="In CUDA C++ only.")
@click.option("--both", "way", flag_value="both", default="both", help="In both (the default).")
def new(name: str, way: str) -> None:
    """Write a folder NAME with a working kernel to start from: reference, Triton, CUDA C++, operator, cases, wrong variants, test."""
    from flatout.cli.kernel_new import write

    write(name, way)
