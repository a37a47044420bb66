"""The limits of the step replica, against the rules of docs/explanation/guard.md computed once more."""

import itertools
import math

import pytest
import torch

from flatout.guard.captured_steps import StepResults
from flatout.guard.rounding import compare, largest, later_checks

STEPS = 3


def relative(a, b):
    """The distance of two lists of tensors, as a share of the second."""
    squares = [
        sum(float(t.double().square().sum()) for t in side)
        for side in ([x - y for x, y in zip(a, b, strict=True)], b)
    ]
    return math.sqrt(squares[0] / squares[1])


def spread(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / (b - b.mean()).norm())


class Case:
    """Plays of three steps with two parameters and a buffer; every error is a draw of the given size."""

    def __init__(self, error=1e-3, f32=1e-5, alike=0.0, f32_buffers=1e-6):
        self.draw = torch.Generator().manual_seed(0)
        base = [[self.normal(200), self.normal(20)] for _ in range(STEPS)]
        gradients = [
            [alike * b + (1 - alike) * g for g, b in zip(step, base[0], strict=True)] for step in base
        ]
        outputs, updates = [[self.normal(64)] for _ in range(STEPS)], [self.normal(200), self.normal(20)]
        changes = [[self.normal(8)] for _ in range(STEPS)]
        self.plain = StepResults(outputs, gradients, changes, updates, [3.0, 4.0])
        self.levers = StepResults(
            self.off(outputs, error),
            self.off(gradients, error),
            self.off(changes, error),
            self.off([updates], error)[0],
            [3.0, 4.0],
        )
        self.double = StepResults(
            self.off(outputs[:1], f32),
            self.off(gradients[:1], f32),
            self.off(changes[:1], f32_buffers),
            self.off([updates], f32)[0],
        )
        self.nudged = StepResults(self.off(outputs[:1], 1e-2), self.off(gradients[:1], 1e-2))

    def normal(self, n):
        return torch.randn(n, generator=self.draw, dtype=torch.float64)

    def off(self, steps, size):
        return [[t + size * self.normal(len(t)) for t in step] for step in steps]

    def checks(self, **options):
        found = compare(self.plain, self.levers, self.double, self.nudged, torch, **options)
        return {each["name"]: each for each in found["checks"]}, found

    @property
    def noise(self):
        """The median over pairs of batches that follow each other."""
        steps = self.plain.gradients
        return sorted(relative(a, b) / math.sqrt(2) for a, b in itertools.pairwise(steps))[1]

    @property
    def outputs_error(self):
        reference = [
            self.double.outputs[0] if self.double.outputs else self.plain.outputs[0],
            *self.plain.outputs[1:],
        ]
        return max(spread(a[0], b[0]) for a, b in zip(self.levers.outputs, reference, strict=True))


def arithmetic(f32):
    return max(1e-5, min(20 * f32, f32 + 0.02))


@pytest.mark.parametrize("f32", [1e-8, 1e-6, 3e-4])
@pytest.mark.parametrize("same_format", [True, False])
def test_outputs_may_differ_by_the_error_of_the_number_format(f32, same_format):
    case = Case(f32=f32)
    own = spread(case.plain.outputs[0][0], case.double.outputs[0][0])
    least, factor = (2**-12, 64) if same_format else (2**-7, 2**16)
    found = case.checks(same_format=same_format)[0]["outputs"]
    assert found["limit"] == pytest.approx(min(0.15, max(least, factor * own)))
    assert found["value"] == pytest.approx(case.outputs_error)
    case.double = StepResults()
    assert case.checks(same_format=same_format)[0]["outputs"]["limit"] == 0.15


@pytest.mark.parametrize("spread", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize(("factor", "passed"), [(1 + 2**-9, True), (0.98, False)])
def test_outputs_that_are_all_alike_are_judged_by_their_size(spread, factor, passed):
    """As behind a last layer that starts at zero. A spread beyond rounding is a signal, and stays the measure."""
    case = Case()
    outputs = 0.5 + spread * torch.linspace(-1, 1, 64, dtype=torch.float64)
    for play, scale in ((case.plain, 1.0), (case.double, 1 + 1e-8), (case.levers, factor)):
        play.outputs = [[scale * outputs] for _ in play.outputs]
    found = case.checks()[0]["outputs"]
    assert found["passed"] == (passed and spread < 1e-6)
    if spread < 1e-6:
        assert found["value"] == pytest.approx(abs(factor - 1), rel=1e-3)


@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("same_format", [True, False])
@pytest.mark.parametrize(("share", "factor"), [(1.0, 1.0), (0.25, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("f32", [1e-7, 5e-4, 9e-3])
def test_gradients_may_differ_by_a_share_of_the_distance_of_batches_or_by_float32s_own_error(
    alike, same_format, share, factor, f32
):
    case = Case(error=1e-2, f32=f32, alike=alike)
    checks, found = case.checks(share=share, batch_factor=factor, same_format=same_format)
    kinks = max(2**-8, 10 * math.sqrt(case.outputs_error / share))
    floor = 0.0 if same_format else 2**-7
    noise = case.noise * math.sqrt(share)
    assert found["noise"] == pytest.approx(noise)
    own = relative(case.plain.gradients[0], case.double.gradients[0])
    expected = max(arithmetic(own), min(max(0.75 * noise / factor, floor), kinks))
    assert checks["gradient"]["limit"] == pytest.approx(expected)
    reference = [case.double.gradients[0], *case.plain.gradients[1:]]
    assert checks["gradient"]["value"] == pytest.approx(
        max(relative(a, b) for a, b in zip(case.levers.gradients, reference, strict=True))
    )
    assert checks["gradient"]["why"].endswith(f"batches differ by {noise / factor:.2g}")


@pytest.mark.parametrize(("share", "factor"), [(1.0, 1.0), (0.25, 2.0)])
def test_the_worst_parameter_is_judged_by_its_own_batches(share, factor):
    case = Case(f32=1e-7)
    for step in case.levers.gradients:
        step[1] += 0.5 * step[1]
    checks, _ = case.checks(share=share, batch_factor=factor)
    own = [step[1] for step in case.plain.gradients]
    size = math.sqrt(sum(float(g.square().sum()) for g in own))
    apart = math.sqrt(sum(float((a - b).square().sum()) for a, b in itertools.pairwise(own)))
    # The mean square over steps, and over pairs of steps that follow each other; a pair has the errors of two
    noise = math.sqrt(share * STEPS / (2 * (STEPS - 1))) * apart / size / factor
    kinks = max(2**-8, 10 * math.sqrt(case.outputs_error / share))
    assert checks["parameters"]["limit"] == pytest.approx(max(1e-5, min(0.75 * noise, kinks)), rel=1e-4)
    wrong = [a[1] - b for a, b in zip(case.levers.gradients, own, strict=True)]
    assert checks["parameters"]["value"] == pytest.approx(
        math.sqrt(sum(float(x.square().sum()) for x in wrong)) / size
    )


def test_a_parameter_without_gradients_or_whose_gradient_is_rounding_is_left_out():
    case = Case()
    for results in (case.plain, case.levers, case.double, case.nudged):
        for step in results.gradients:
            step.append(None)
    assert case.checks()[0]["parameters"]["passed"]
    for step in case.levers.gradients:
        step[1] *= 3
    assert not case.checks()[0]["parameters"]["passed"]
    case.double.gradients[0][1] = 1.02 * case.plain.gradients[0][1]
    assert case.checks()[0]["parameters"]["passed"]


def test_float64_that_drew_other_numbers_is_no_reference():
    case = Case(f32=0.02)
    assert "float64 is not comparable" in case.checks()[0]["gradient"]["why"]
    assert "against float64 is" in Case(f32=0.009).checks()[0]["gradient"]["why"]


@pytest.mark.parametrize("f32", [1e-8, 1e-4, 5e-3])
def test_updates_may_differ_by_a_multiple_of_float32s_own_error(f32):
    case = Case(error=1e-5, f32=f32)
    found = case.checks()[0]["update"]
    rows = [
        (relative([lever], [double]), arithmetic(relative([plain], [double])))
        for plain, lever, double in zip(
            case.plain.updates, case.levers.updates, case.double.updates, strict=True
        )
    ]
    assert (found["value"], found["limit"]) == pytest.approx(max(rows, key=lambda row: row[0] / row[1]))


@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_the_errors_of_updates_average_away(shift):
    """In units of plain float32's error of each parameter; chance may add four standard errors."""
    case = Case(error=1e-5, f32=1e-5)
    rows = list(zip(case.plain.updates, case.levers.updates, case.double.updates, strict=True))
    units = [(plain - double).square().mean().sqrt() for plain, _, double in rows]
    case.levers.updates = [
        lever + shift * unit * double.sign() for (_, lever, double), unit in zip(rows, units, strict=True)
    ]
    expected = []
    for against in (case.double.updates, case.plain.updates):
        errors = [
            (lever - other) / unit
            for lever, other, unit in zip(case.levers.updates, against, units, strict=True)
        ]
        signs = [double.sign() for double in case.double.updates]
        sums = (
            sum(float(e.sum()) for e in errors),
            sum(float((e * s).sum()) for e, s in zip(errors, signs, strict=True)),
        )
        bias, squares = max(map(abs, sums)) / 220, sum(float(e.square().sum()) for e in errors) / 220
        expected.append((bias, 0.75 + 4 * math.sqrt(max(squares - bias**2, 1.0) / 220)))
    found = case.checks()[0]["bias"]
    assert (found["value"], found["limit"]) == pytest.approx(min(expected, key=lambda row: row[0] / row[1]))
    assert found["passed"] is (shift < 1)


def test_clipped_gradients_may_differ_by_one_part_in_100_000():
    case = Case()
    for share, passes in ((0.9e-5, True), (1.1e-5, False)):
        case.levers.clipped = [3.0, 4.0 * (1 + share)]
        assert case.checks()[0]["clipping"]["passed"] is passes


@pytest.mark.parametrize(("f32", "share"), [(1e-9, 1.0), (1e-7, 1.0), (1e-4, 1.0), (1e-4, 1e-4)])
def test_running_statistics_follow_the_outputs_the_batches_and_float32(f32, share):
    case = Case(error=1e-5, f32_buffers=f32)
    changes = case.plain.buffer_changes
    noise = sorted(relative(a, b) / math.sqrt(2) for a, b in itertools.pairwise(changes))[1]
    own = relative(changes[0], case.double.buffer_changes[0])
    expected = max(
        1e-5,
        min(max(2**-8, 256 * case.outputs_error), 0.75 * noise * math.sqrt(share), max(2**-8, 2**16 * own)),
    )
    assert case.checks(share=share)[0]["buffers"]["limit"] == pytest.approx(expected)
    case.plain.buffer_changes[1][0].zero_()
    assert "buffers" not in case.checks()[0]


def test_a_network_is_smooth_where_gradients_follow_the_outputs():
    for ratio, smooth in ((4.0, True), (6.0, False)):
        case = Case()
        outputs, gradients = case.plain.outputs[0][0], case.plain.gradients[0]
        case.nudged = StepResults(
            [[outputs + 0.01 * (outputs - outputs.mean())]], [[g * (1 + 0.01 * ratio) for g in gradients]]
        )
        assert case.checks()[1]["smooth"] is smooth


def test_outputs_of_another_shape_or_with_other_infinities_fail():
    for change in (lambda t: t[:-1], lambda t: torch.where(t == t.max(), math.inf, t)):
        case = Case()
        case.levers.outputs[1] = [change(case.levers.outputs[1][0])]
        assert not case.checks()[0]["outputs"]["passed"]
    case = Case()
    for results in (case.plain, case.levers, case.double):
        for (output,) in results.outputs:
            output[3] = -math.inf  # a mask
    assert case.checks()[0]["outputs"]["passed"]


@pytest.mark.parametrize(
    ("response", "error", "found"),
    [(1e-3, 0.03, True), (1e-3, 0.05, False), (0.02, 0.15, True), (0.02, 0.25, False), (0.6, 9.0, None)],
)
def test_the_later_gradient_may_differ_by_ten_times_its_response_to_half_precision(response, error, found):
    case = Case(error=1e-6)
    later = [list(case.plain.gradients[0])]
    case.plain.later = StepResults([], later)
    case.levers.later = StepResults([], [[g * (1 + error) for g in later[0]]])
    nudged = StepResults([], [[g * (1 + response) for g in later[0]]])
    checks = {each["name"]: each for each in later_checks(case.plain, case.levers, nudged, True, torch)}
    if found is None:
        assert "later gradient" not in checks
    else:
        assert checks["later gradient"]["passed"] is found


def test_the_largest_of_values_is_nan_if_one_is():
    assert largest([]) == 0.0
    assert largest([1.0, 3.0, 2.0]) == 3.0
    assert math.isnan(largest([1.0, math.nan, 2.0]))
