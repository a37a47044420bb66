"""`flatout kernel`: check, measure and create kernels, flatout's own and the user's."""

from pathlib import Path

import click

import flatout.kernels
from flatout.cli.options.output import json_option
from flatout.schema.errors import StorageError, UsageError

TEMPLATE = Path(flatout.kernels.__file__).parent / "template"
EXAMPLE = "silu_mul"


@click.group()
def command() -> None:
    """Check and measure kernels, flatout's or your own, and create new ones.

    \b
    flatout kernel check                       all kernels of flatout
    flatout kernel check path.py:function      your own, with `function_reference` and `function_cases`
    flatout kernel bench layer_norm            against the reference, torch.compile and a copy on this device
    flatout kernel new my_kernel               a folder to start from, in CUDA C++ and Triton"""


@command.command()
@click.argument("subjects", nargs=-1, metavar="[NAME | FOLDER | FILE.py:FUNCTION]...")
@click.option("--limit", default="10m", help="Time limit for the checks of one kernel (10m).")
@json_option
def check(subjects: tuple[str, ...], limit: str, as_json: bool) -> int:
    """Check the correctness of a kernel.

    Tests values and gradients against float64, memory, determinism, registration, and known-wrong variants.
    Checks that cannot run on this machine are listed as "not run". The exit code is 1 if a check fails."""
    from flatout.cli.kernel_bench import check_all

    return check_all(subjects, limit, as_json)


@command.command()
@click.argument("subject", metavar="NAME | FOLDER | FILE.py:FUNCTION")
@click.option("--rounds", default=8, show_default=True, help="Rounds for each implementation.")
@click.option("--case", default="", help="Measure only cases whose title contains this text.")
def bench(subject: str, rounds: int, case: str) -> None:
    """Measure a kernel against its reference, torch.compile of it, and a copy on this device."""
    from flatout.cli.kernel_bench import show

    show(subject, rounds, case)


@command.command()
@click.argument("name")
def new(name: str) -> None:
    """Create the folder NAME with a working example kernel.

    It has a reference, Triton and CUDA C++ code, an operator, cases, wrong variants and a test."""
    folder = Path(name)
    stem = folder.name
    if not stem.isidentifier() or stem != stem.lower() or stem in ("torch", "triton", "flatout", "aten"):
        raise UsageError(
            f"{stem!r} cannot be a kernel's name: the name becomes a Python package. Use lower-case letters, digits and _, as in `my_kernel`."
        )
    if folder.exists():
        raise StorageError(f"{name} already exists. Choose another name, or remove it first.")
    try:
        folder.mkdir(parents=True)
        for source in sorted(TEMPLATE.iterdir()):
            if source.is_file() and source.suffix in (".py", ".cu"):
                text = source.read_text(encoding="utf-8").replace(EXAMPLE, stem)
                (folder / source.name.replace(EXAMPLE, stem)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{name} cannot be written: {error.strerror}. Choose another folder.") from None
    click.echo(
        f"{name}: a working kernel (silu(a) * b) with its reference, cases and known-wrong variants. Edit it and run:\n"
        f"    flatout kernel check {name}\n    flatout kernel bench {name}\n    python -m pytest {name}"
    )
