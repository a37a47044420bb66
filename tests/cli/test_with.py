"""`flatout run --with`: a lever by name for this run, on one process and on several ranks, and errors for
invalid names.
"""

import os
import re

import pytest
from click.exceptions import BadParameter
from options import as_option

from flatout.cli.options.arguments import LeverByName
from flatout.schema.enums import Origin

pytestmark = pytest.mark.timeout(150)


@pytest.mark.processes
def test_it_is_a_choice_of_this_run(flatout):
    """The choice adds to the plan's levers and names the user as its origin.

    The program learns of it, whether or not it uses it.
    """
    (flatout.folder / "plan.toml").write_text("schema = 1\n[levers]\ngc_pause = true\nthreads = 2\n")
    shown = "import json, os; print([(c['name'], c['value'], c['origin']) for c in json.load(open(os.environ['FLATOUT_JOB']))['plan']['choices']])"
    done = flatout(
        "run",
        "--plan",
        "plan.toml",
        "--with",
        "comm_compression=bf16",
        "--with",
        "threads=1",
        "python",
        "-c",
        shown,
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "[('gc_pause', True, 'file'), ('comm_compression', 'bf16', 'user'), ('threads', 1, 'user')]"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("comm_compression=bf16", "bf16"),
        ('comm_compression="bf16"', "bf16"),
        ("memory_budget=0.5", 0.5),
        ("batch_size={size=8}", {"size": 8}),
        ('comm_compression={kind = "powersgd", rank = 1}', {"kind": "powersgd", "rank": 1}),
        ("gc_pause = true", True),
        ("compile=max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_texts_that_name_a_lever(text, value):
    choice = LeverByName().convert(text, None, None)
    assert (choice.value, choice.origin) == (value, Origin.USER)
    assert LeverByName().convert(as_option(choice), None, None) == choice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("autocats", "no lever 'autocats'; did you mean autocast?"),
        ("nothing_like_it=3", "`flatout levers` lists them"),
        ("threads=", "not a value for threads"),
        ("threads=2\nother=1", "not a value for threads"),
        (
            "batch_size={size=0}",
            "'size' in the value of batch_size must be a whole number from 1 to 2147483647, not 0",
        ),
        ("gradient_buckets=-1", "a number from 1e-06 to 1048576, not -1"),
        (
            "data_parallel={reduction='product'}",
            ' in the value of data_parallel must be "mean" or "sum", not',
        ),
        ("batch_size", "a table {size = a whole number from 1 to 2147483647, loader ="),
        ("threads=99999", f"must be a whole number from 1 to {os.cpu_count()}, not 99999"),
        ("memory_budget=nan", "must be a number from 0 to 1, not 'nan'"),
        ("ddp_flags={}", "gradient_as_bucket_view = true"),
    ],
)
def test_texts_that_name_no_lever(text, says):
    with pytest.raises(BadParameter, match=re.escape(says)):
        LeverByName().convert(text, None, None)
