"""The Plan: frozen, ordered, TOML both ways, a digest of its effect, and errors for broken files."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.schema.enums import Origin
from flatout.schema.errors import FlatoutError, PlanError
from flatout.schema.plan import MAX_PLAN_BYTES, Choice, Plan, format_choice

words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
names = words.filter(lambda s: s != "value")
scalars = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), words)
values = st.one_of(scalars, st.dictionaries(names, scalars, max_size=4))
choices = st.builds(Choice, words, values, st.sampled_from(Origin), words)
plans = st.lists(choices, max_size=6, unique_by=lambda c: c.name).map(lambda found: Plan(tuple(found)))


def same(a, b):
    """Equal, and True is not 1."""
    return [(c.name, repr(c.value), c.origin, c.evidence) for c in a] == [
        (c.name, repr(c.value), c.origin, c.evidence) for c in b
    ]


@given(plans, st.dictionaries(words, words, max_size=3))
def test_toml_and_back(plan, made_for):
    plan = dataclasses.replace(plan, made_for=made_for)
    read = Plan.from_toml(plan.to_toml())
    assert same(read, plan)
    assert dict(read.made_for) == made_for


@given(plans)
def test_json_and_back(plan):
    assert same(Plan.from_json(plan.to_json()), plan)


@given(plans)
def test_evidence_is_a_comment_too(plan):
    """A user who opens the file reads the evidence next to the lever."""
    text = plan.to_toml()
    for choice in plan:
        if choice.evidence.isprintable() and choice.evidence.strip():
            assert any(line.startswith("#") and choice.evidence.strip() in line for line in text.splitlines())


def test_hand_written_toml():
    plan = Plan.from_toml(
        '[levers]\nchannels_last = true\nthreads = 1\nloader = {workers = 2}\n[levers.malloc]\nvalue = "tcmalloc"\n'
    )
    assert [(c.name, c.value, c.origin) for c in plan] == [
        ("channels_last", True, Origin.FILE),
        ("threads", 1, Origin.FILE),
        ("loader", {"workers": 2}, Origin.FILE),
        ("malloc", "tcmalloc", Origin.FILE),
    ]


def test_an_empty_file_is_an_empty_plan():
    assert len(Plan.from_toml("")) == 0
    assert Plan.from_toml("").describe() == "plain"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[levers", "not valid TOML"),
        ("\x00\x01\x02", "not valid TOML"),
        ("levers = 3", "must be tables"),
        ("made_for = 'me'", "must be tables"),
        ("[levers]\ntf32 = true\ntf32 = false", "not valid TOML"),
        ("[levers.tf32]\nvalue = true\n[levers.tf32]\nvalue = true", "not valid TOML"),
        ("schema = 99", "schema 99"),
        ("schema = 'one'", "schema 'one'"),
        ("[levers]\nthreads = [1, 2]", "threads"),
        ("[levers]\nthreads = 2026-11-21", "threads"),
        ("[levers]\nloader = {workers = {a = {b = 1}}}", "loader"),
        ("[levers.threads]\nvalue = 1\norigin = 'heaven'", "heaven"),
        ("[levers.threads]\nvalue = 1\norigin = []", "unknown origin"),
        ("[levers.threads]\nvalue = 1\nevidence = 5", "threads"),
        ("[levers]\nthreads = " + "9" * 5000, "not valid TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
        ("a" + ".a" * 4_000 + " = 1", "a key has too many parts"),
        ("threads = 1", "unknown key 'threads'"),
        ("[lever.tf32]\nvalue = true", "unknown key 'lever'"),
        ("# " + "x" * MAX_PLAN_BYTES, "never that large"),
        ("[levers]\nx = '" + "y" * MAX_PLAN_BYTES + "'", "never that large"),
    ],
    ids=range(21),
)
def test_broken_and_hostile_toml(text, says):
    """Each ends in a PlanError with the file's name, whatever the file contains."""
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text, "flatout.toml")
    assert "flatout.toml" in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 7000


@given(st.text(max_size=200))
def test_any_text_is_a_plan_or_a_plan_error(text):
    plan = read_or_none(text)
    assert plan is None or Plan.from_toml(plan.to_toml()).digest == plan.digest


def read_or_none(text):
    """The plan, or None after a PlanError; any other exception passes."""
    try:
        return Plan.from_toml(text)
    except PlanError:
        return None


anything = st.recursive(
    st.one_of(st.booleans(), st.integers(-5, 5), st.floats(-1, 1), st.text("xyz", max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["value", "origin", "evidence", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), anything, max_size=3))
def test_any_toml_below_levers_is_a_plan_or_a_plan_error(levers):
    import tomlkit

    plan = read_or_none(tomlkit.dumps({"levers": levers}))
    assert plan is None or {c.name for c in plan} == set(levers)


def test_a_lever_appears_once():
    with pytest.raises(PlanError, match="tf32 twice"):
        Plan((Choice("tf32", True), Choice("tf32", False)))


@given(plans, choices)
def test_with_and_without(plan, choice):
    added = plan.with_choice(choice)
    assert added.get(choice.name) is choice
    assert [c.name for c in added].count(choice.name) == 1
    assert added.without(choice.name).get(choice.name) is None
    assert {c.name for c in added.without(choice.name)} == {c.name for c in plan} - {choice.name}


# -- digest


@given(plans, st.randoms(use_true_random=False))
def test_digest_does_not_see_order_origin_or_evidence(plan, rng):
    other = [dataclasses.replace(c, origin=Origin.FILE, evidence="other") for c in plan]
    rng.shuffle(other)
    assert Plan(tuple(other), {"command": "x"}).digest == plan.digest


@given(plans, plans)
def test_digest_sees_every_name_and_value(a, b):
    key = [
        {(c.name, repr(sorted(c.value.items()) if isinstance(c.value, dict) else c.value)) for c in plan}
        for plan in (a, b)
    ]
    assert (a.digest == b.digest) == (key[0] == key[1])


def test_digest_is_stable():
    """The digest is stored in sessions and folders, so it must be the same in every process and version."""
    plan = Plan((Choice("malloc", "tcmalloc"), Choice("threads", 1)))
    assert plan.digest == Plan((Choice("threads", 1), Choice("malloc", "tcmalloc"))).digest
    assert plan.digest == "976fd17dbb48"
    assert Plan().digest == "4f53cda18c2b"


@pytest.mark.parametrize(
    ("value", "spelled"),
    [
        (True, "x"),
        (False, "x=False"),
        (1, "x=1"),
        ("bf16", "x=bf16"),
        ({"a": 1, "b": True}, "x(a=1, b=True)"),
    ],
)
def test_spelling(value, spelled):
    assert format_choice("x", value) == spelled


# -- errors


def test_one_tree_of_errors():
    from flatout.schema import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 6
    assert all(issubclass(kind, FlatoutError) for kind in kinds)
    assert all(0 < kind.exit_code < 256 for kind in kinds)


@pytest.mark.parametrize(("code", "leaves_with"), [(1, 1), (42, 42), (-9, 137), (-15, 143)])
def test_a_failed_program_gives_its_own_exit_code(code, leaves_with):
    from flatout.schema.errors import ProgramFailed

    assert ProgramFailed("x", code).exit_code == leaves_with
