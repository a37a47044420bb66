"""Every value of every lever is checked before a program starts: whichever way it comes, the error names the range."""

import json
import math
import re

import pytest
from click.exceptions import BadParameter
from hypothesis import given
from hypothesis import strategies as st
from options import as_option
from test_every_lever import BF16, OLD, WITH_GPU, values_of

from flatout.cli.options.arguments import LeverByName, read_plan
from flatout.levers import TABLE
from flatout.schema.enums import Moment
from flatout.schema.errors import PlanError
from flatout.schema.lever import Number, Options, Table, Text, describe_forms, rejection
from flatout.schema.plan import Choice, Plan

LEVERS = pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)


def wrong(forms):
    """Values of a wrong type, out of range, or unknown, for each form; of a table, with one wrong item."""
    yield from (-1e300, -(10**12), 10**12, 7.5, {"no_such_key": 1})
    yield from () if any(isinstance(form, Text) for form in forms) else ("no such word", "0")
    yield from () if False in forms else (False,)
    for form in forms:
        if isinstance(form, Number):
            yield from (form.low - 1, form.high + 1, math.nextafter(form.high, math.inf), True)
        if isinstance(form, Table):
            right = {key: right_one(form.keys[key]) for key in form.required}
            yield from ({k: v for k, v in right.items() if k != key} for key in form.required)
            for key, items in form.keys.items():
                yield from ({**right, key: item} for item in wrong(items) if not isinstance(item, dict))


def right_one(forms):
    return forms[0].low if isinstance(forms[0], Number) else forms[0]


def rejected(lever):
    """The wrong values that no form takes by chance."""
    seen = {json.dumps(value): value for value in wrong(lever.accepts)}
    if lever.bare:
        seen.pop("true", None)  # the name alone
    return [value for value in seen.values() if value != {} and not takes(lever, value)]


def takes(lever, value):
    """Such as 0 and 1 where another form of the lever has a wider range."""
    numbers = [form for form in lever.accepts if isinstance(form, Number)]
    return any(
        type(value) in (int, float) and n.low <= value <= n.high and type(value) in (int, type(n.low))
        for n in numbers
    )


@LEVERS
def test_a_wrong_value(flatout, lever):
    """As a usage error of `--with`: it names the lever, the value and what is accepted; no program is looked for."""
    values = rejected(lever)
    assert len(values) > 4
    for value in values:
        with pytest.raises(BadParameter, match=f"the value of {lever.name} must be ") as error:
            LeverByName().convert(as_option(Choice(lever.name, value)), None, None)
        said = error.value.message
        items = [value, *value.values()] if isinstance(value, dict) else [value]
        assert any(f", not {item!r}. `flatout levers {lever.name}`" in said for item in items)
        assert any(f" must be {describe_forms(forms)}, not" in said for forms in all_forms(lever.accepts))
    done = flatout.here("run", "--with", as_option(Choice(lever.name, values[0])), "no-such-program")
    assert (done.code, done.out) == (2, "")
    assert f"the value of {lever.name} must be {describe_forms(lever.accepts)}" in done.err


def all_forms(forms):
    return [forms, *(items for form in forms if isinstance(form, Table) for items in form.keys.values())]


@LEVERS
def test_a_wrong_value_in_a_plan(tmp_path, lever):
    value = rejected(lever)[0]
    (tmp_path / "plan.toml").write_text(Plan((Choice(lever.name, value),)).to_toml())
    says = f"plan.toml: the value of {lever.name} must be {describe_forms(lever.accepts)}, not {value!r}"
    with pytest.raises(PlanError, match=re.escape(says)) as error:
        read_plan(str(tmp_path / "plan.toml"))
    assert error.value.exit_code == 2


def test_every_way_to_name_a_lever(flatout):
    words = ("run", "no-such-program")
    says = "the value of threads must be a whole number from 1 to"
    assert says in flatout.here("run", "--with", "threads=99999", "no-such-program").err
    assert says in flatout.here(*words, env={"FLATOUT_RUN_WITH": "threads=99999"}).err
    (flatout.folder / "pyproject.toml").write_text('[tool.flatout.run]\nwith = ["threads=99999"]\n')
    done = flatout.here(*words)
    assert done.code == 2
    assert says in done.err
    (flatout.folder / "pyproject.toml").write_text('[tool.flatout.run]\nwith = ["threads=1"]\n')
    assert flatout.here(*words).code == 127


@LEVERS
def test_what_a_lever_offers(program, lever):
    """It accepts all that it offers a search, and all that its other tests use."""
    asked = [None] if lever.moment is Moment.PROCESS else [program().context, program(epochs=0).context]
    offers = [lever.applies(facts, context) for facts in (BF16, OLD, WITH_GPU) for context in asked]
    values = [value for offer in offers if isinstance(offer, Options) for value in offer.values]
    for value in [*values, *values_of(lever)]:
        if (
            lever.bare or value != {}
        ):  # without a value, batch_size has nothing to offer before a loader exists
            lever.check(value)


@given(
    st.integers(), st.integers(0, 10**6), st.integers() | st.floats() | st.booleans() | st.text(max_size=3)
)
def test_a_number_is_accepted_in_its_range_only(low, more, value):
    for whole in (True, False):
        form = Number(low, low + more, whole)
        assert not rejection("it", [form], low)
        assert not rejection("it", [form], low + more)
        right = type(value) in ((int,) if whole else (int, float)) and low <= value <= low + more
        assert (rejection("it", [form], value) == "") == right
