"""The gate itself: its rejections, shown by kernels with one fault each."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from flatout.kernels.gate import checks, run  # noqa: E402
from flatout.kernels.kernel import Case, Implementation, Kernel  # noqa: E402
from flatout.kernels.subject import SubjectError, find  # noqa: E402


def double(x):
    return x * 2


def make(draw):
    return {"x": torch.randn(5, 7, generator=draw)}


CASES = [
    Case("5x7", make, differentiate=("x",)),
    Case("strided", lambda draw: {"x": torch.randn(7, 6, generator=draw).t()[::2]}, differentiate=("x",)),
]
GOOD = Kernel(
    "double",
    "",
    double,
    (Implementation("double", double, dtypes=(torch.float32, torch.float64)),),
    lambda: CASES,
    {"half": lambda x: x * 0.5},
)


def outcome(kernel, name):
    return run(name, dict(checks(kernel))[name])


def with_call(call, **more):
    return replace(GOOD, implementations=(replace(GOOD.implementations[0], call=call),), **more)


def test_a_good_kernel_passes():
    assert {run(name, check).status for name, check in checks(GOOD)} == {"ok"}


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g


COUNT = itertools.count()


@pytest.mark.parametrize(
    ("call", "check", "says"),
    [
        (lambda x: x * 2.00001, "values", "times the allowed error"),
        (lambda x: (x * 2).reshape(-1), "values", "has shape"),
        (lambda x: (x * 2, x), "values", "3 results, but the reference has 2"),
        (lambda x: x * 2 + torch.where(x > 2, torch.nan, 0.0), "values", "is nan"),
        (lambda x: HalfGradient.apply(x), "values", "gradient of x"),
        (lambda x: HalfGradient.apply(x), "gradcheck", "Jacobian mismatch"),
        (lambda x: 1 / 0, "values", "it raised ZeroDivisionError"),
        (lambda x: x * 2 + next(COUNT) * 1e-9, "determinism", "differs between two calls"),
    ],
)
def test_a_fault_is_detected(call, check, says):
    found = outcome(with_call(call), f"double: {check}")
    assert found.status == "failed"
    assert says in found.why


class Centred(torch.autograd.Function):
    """x minus its mean over one element, with a gradient that is off by rounding or more."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.error, None


@pytest.mark.parametrize(("error", "status"), [(3e-8, "ok"), (1e-3, "failed")])
def test_a_result_of_zero_may_be_off_by_the_rounding_of_its_terms(error, status):
    case = Case("3x1", lambda draw: {"x": torch.randn(3, 1, generator=draw)}, differentiate=("x",))
    kernel = replace(
        GOOD,
        reference=lambda x: (x - x.mean(-1, keepdim=True), 2 * x.detach()),
        cases=lambda: [case],
        implementations=(Implementation("double", lambda x: (Centred.apply(x, error), 2 * x.detach())),),
    )
    assert outcome(kernel, "double: values").status == status


def test_a_gate_that_lets_a_wrong_variant_pass_has_failed():
    found = outcome(replace(GOOD, wrong={"same": double}), "rejects same")
    assert found.status == "failed"
    assert "add a case" in found.why
    raising = outcome(replace(GOOD, wrong={"raises": lambda x: 1 / 0}), "rejects raises")
    assert raising.status == "failed"  # an exception shows nothing about the bounds


def test_a_missing_wrong_variant_is_reported():
    assert outcome(replace(GOOD, wrong={}), "rejects wrong variants").status == "not run"


def test_a_wrong_registration_is_detected():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    operator = torch.library.custom_op("flatout_test::double", function, mutates_args=())
    operator.register_fake(lambda x: x.new_empty(3))
    kernel = with_call(operator, operators={"flatout_test::double": function})
    plain = [replace(case, differentiate=()) for case in CASES]
    found = outcome(replace(kernel, cases=lambda: plain), "opcheck flatout_test::double")
    assert found.status == "failed"
    assert "FakeTensor" in found.why or "fake" in found.why
    unused = outcome(
        replace(GOOD, operators={"flatout_test::double": function}), "opcheck flatout_test::double"
    )
    assert "no case calls" in unused.why


# -- naming the kernel to check


def test_a_function_next_to_its_reference(tmp_path):
    path = tmp_path / "mine_to_check.py"
    path.write_text(
        "import torch\nfrom flatout.kernels.kernel import Case\n\n"
        "def twice(x):\n    '''Doubles.'''\n    return x + x\n\ndef twice_reference(x):\n    return 2 * x\n\n"
        "def twice_cases():\n    return [Case('five', lambda draw: {'x': torch.randn(5, generator=draw)}, differentiate=('x',))]\n\n"
        "twice_wrong = {'once': lambda x: x}\n"
    )
    kernel = find(f"{path}:twice")
    assert (kernel.name, kernel.page, list(kernel.wrong)) == ("twice", "Doubles.", ["once"])
    assert {run(name, check).status for name, check in checks(kernel)} == {"ok"}


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        ("x = 1", "", "has no KERNEL. Name a function"),
        ("def f(): pass", "g", "has no function 'g'. It has f."),
        ("def f(): pass", "f", "has no reference for 'f'. Add `f_reference`"),
        ("def f(): pass\ndef f_reference(): pass", "f", "has no cases for 'f'"),
        ("import nothing_of_this_name", "f", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_unsupported_checks_are_explained(tmp_path, source, name, says):
    path = tmp_path / f"subject_{abs(hash((source, name)))}.py"
    path.write_text(source)
    with pytest.raises(SubjectError) as error:
        find(f"{path}:{name}" if name else str(path))
    assert says in str(error.value)


def test_an_unknown_name():
    with pytest.raises(SubjectError, match="The built-in kernels are layer_norm"):
        find("layernorm")
    with pytest.raises(SubjectError, match="Check the path"):
        find("no/such/file.py:f")
