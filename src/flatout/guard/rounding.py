"""How far two plays of the same steps may differ and still be the same maths with other rounding.

There is no fixed tolerance. The scales come from the program: the error of plain float32 against float64, and
the difference between the gradients of two batches. The limits of sound half precision were measured on sound
levers (autocast, TF32-like products, channels_last, compile, other threads) over nine networks, from a linear
model to ResNet-50. The figures are next to the constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.guard.captured_steps import StepResults
from flatout.guard.copies import squared_norm
from flatout.guard.resolution import resolution_checks
from flatout.measure.parity import relative_distance

if TYPE_CHECKING:
    from torch import Tensor

# bfloat16's unit in the last place. Noise of that size on every gradient: 1.1e-3 to 1.7e-3; 8-bit gradients:
# from 1e-2.
HALF_ULP = 2.0**-8
# For networks where float32 has almost no error. Sound: up to 0.0032 (a linear model, bfloat16); 4-bit
# weights: from 0.016.
OUTPUT_TOLERANCE = 2.0**-7
# Half precision's unit over float32's. Sound: up to 4.2e4 times float32's own error; 4-bit weights: from 6e4.
HALF_PER_FLOAT32 = 2.0**16
# Levers that keep the number format. Sound: up to 3.0e-6 (channels_last, a GAN), up to 3 times float32's own
# error; all outputs times 0.99: 0.01.
ROUNDING_TOLERANCE, ROUNDING_PER_FLOAT32 = 2.0**-12, 64.0
MIN_SPREAD = 2.0**-20  # share of the outputs' size; less is rounding, as behind weights that start at zero
OUTPUT_CAP = 0.15  # share of the outputs' spread. Sound: up to 0.058 (MobileNetV3, bfloat16)
# Kinks (ReLU, max-pooling) turn an error e of the outputs into about sqrt(e) of the gradient. Sound: up to
# 6.5 sqrt(e) (ResNet-50, bfloat16); a race on one tensor 25 to 1,200, gradients of eight bits 25 to 65.
KINK_FACTOR = 10.0
# Share of the distance between two batches. Sound: up to 0.52 (ResNet-50, bfloat16, at its start); 4-bit
# weights there: 1.6.
NOISE_CAP = 0.75
ARITHMETIC_FACTOR = 20.0  # an optimizer's arithmetic: multiple of plain float32's own error,
ARITHMETIC_MARGIN = 0.02  # but at most this much more
MIN_LIMIT = 1e-5
# Mean error of updates, in float32's own. Sound: up to 0.2; a unit in the last place per step upwards: from 5.
MAX_BIAS, CHANCE_SDS = 0.75, 4.0
HALF_NUDGE = 2.0**-9  # share of every weight: bfloat16 rounds by up to this
NUDGE = 2.0**-11  # share of every weight, to measure the response of the gradient
# A network is smooth if the gradient responds to a nudge in proportion to the outputs. Without kinks: 0.7 to
# 2 times; with kinks: 11 to 100 times.
SMOOTH_FACTOR = 5.0
# Changes of running statistics follow from the activations. Sound: an error up to 5.4 times that of the
# outputs (a CNN, bfloat16); running statistics in bfloat16: from 9e4 times.
BUFFER_FACTOR = 256.0
# Multiple of the gradient's response to half precision's last place in every weight. Sound: up to 3.4 times
# (a GPT, bfloat16).
LATER_FACTOR = 10.0
MAX_RESPONSE = 0.5
# Beyond this, float32 and float64 drew other random numbers, or the maths is chaotic
MAX_REFERENCE_ERROR = 1e-2


def compare(
    plain: StepResults,
    levers: StepResults,
    double: StepResults,
    nudged: StepResults,
    torch: ModuleType,
    share: float = 1.0,
    batch_factor: float = 1.0,
    same_format: bool = False,
) -> dict[str, Any]:
    """``{"checks": [{name, value, limit, passed, why}], "noise": float, "smooth": bool}``.

    ``nudged`` holds only the first step, ``double`` that or nothing. ``smooth``: the losses of the levers'
    first steps cannot differ from the plain ones by more than the measured gradient error. ``share``: the
    share of the batch's samples that was played. The gradients of whole batches are closer to each other by
    its square root, and so are those on both sides of a kink. ``batch_factor``: the error of a whole batch, as a
    multiple of that of the part (`flatout.guard.batch_slices`). ``same_format``: no lever may round to half
    precision.
    """
    if (
        double.gradients
        and not relative_distance(plain.gradients[0], double.gradients[0], torch) <= MAX_REFERENCE_ERROR
    ):
        double = StepResults()
    noise = _noise(plain.gradients, torch) * math.sqrt(share)
    outputs, error = _outputs(plain, levers, double, same_format)
    kink_limit = max(HALF_ULP, KINK_FACTOR * math.sqrt(error / share))
    floor = 0.0 if same_format else OUTPUT_TOLERANCE  # half precision rounds, however equal the batches are
    checks = [
        outputs,
        _gradient(plain, levers, double, noise, kink_limit, batch_factor, floor, torch),
        _parameters(plain, levers, double, kink_limit, share, batch_factor, floor, torch),
    ]
    if plain.updates:
        checks.append(_updates(plain, levers, double, torch))
        checks += _bias(plain, levers, double)
    clipping = largest(
        abs(x - y) / y if y else (math.inf if x else 0.0)
        for x, y in zip(levers.clipped, plain.clipped, strict=True)
    )
    why = f"gradients after clip_grad_norm_ differ by {clipping:.2g} (relative) from those of the plain step"
    checks.append(check("clipping", clipping, MIN_LIMIT, why))
    if all(any(bool((move != 0).any()) for move in changes) for changes in plain.buffer_changes):
        checks.append(_buffers(plain, levers, double, max(HALF_ULP, BUFFER_FACTOR * error), share, torch))
    response = largest(
        _relative_error(a, b) for a, b in zip(nudged.outputs[0], plain.outputs[0], strict=True)
    )
    smooth = relative_distance(nudged.gradients[0], plain.gradients[0], torch) <= SMOOTH_FACTOR * response
    return {"checks": checks, "noise": noise, "smooth": smooth}


def later_checks(
    plain: StepResults, levers: StepResults, nudged: StepResults, overfitted: bool, torch: ModuleType
) -> list[dict[str, Any]]:
    """Whether half precision stays in the products: checks of the captured steps, and of the later step.

    There the gradient may differ from the plain one by little more than if half precision's last place moves
    every weight (``nudged``).
    """
    checks = [check(*values) for values in resolution_checks(plain, levers, torch)]
    plain_later, other = plain.later, levers.later
    if plain_later is None or other is None:
        return checks
    response = _max_distance(plain_later.gradients, nudged.gradients, torch)
    if not response <= MAX_RESPONSE:
        return checks
    when = "once the network is confident of these samples" if overfitted else "after some more updates"
    error, limit = (
        _max_distance(plain_later.gradients, other.gradients, torch),
        max(KINK_FACTOR * HALF_ULP, LATER_FACTOR * response),
    )
    why = f"{when}, the gradient differs by {error:.2g} (relative) from the plain one; half precision's last place in every weight moves it by {response:.2g}"
    return [
        *checks,
        check("later gradient", error, limit, why),
        *(
            check(f"later {name}", value, limit, f"{when}, {why}")
            for name, value, limit, why in resolution_checks(plain_later, other, torch)
        ),
    ]


def _max_distance(plain: Sequence[list[Any]], other: Sequence[list[Any]], torch: ModuleType) -> float:
    return largest(relative_distance(x, y, torch) for x, y in zip(other, plain, strict=True))


def largest(values: Iterable[float]) -> float:
    """The largest value, or 0 if there is none. It is NaN if one is: `max` returns NaN only if that comes first."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _exceeds(ratio: float, worst: float) -> bool:
    """Whether a ratio of error and limit is worse than the worst so far. Nothing is worse than NaN."""
    return not (ratio <= worst or math.isnan(worst))


def check(name: str, value: float, limit: float, why: str) -> dict[str, Any]:
    if value != value:
        why = f"{name}: NaN under the levers, and finite in the plain step"
    return {
        "name": name,
        "value": value if math.isfinite(value) else None,
        "limit": limit,
        "passed": value <= limit,
        "why": why,
    }


def _outputs(
    plain: StepResults, levers: StepResults, double: StepResults, same_format: bool
) -> tuple[dict[str, Any], float]:
    """The check, and the largest error over steps and outputs, as a share of the output's own spread."""
    reference = [*(double.outputs or plain.outputs[:1]), *plain.outputs[1:]]
    f32_error = largest(_relative_error(a, b) for a, b in zip(plain.outputs[0], reference[0], strict=True))
    if [len(step) for step in levers.outputs] != [len(step) for step in reference]:
        return check(
            "outputs", math.inf, 0.0, "the levers change the number of tensors that a step returns"
        ), 0.0
    error = largest(
        _relative_error(a, b)
        for x, y in zip(levers.outputs, reference, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    tolerance, factor = (
        (ROUNDING_TOLERANCE, ROUNDING_PER_FLOAT32) if same_format else (OUTPUT_TOLERANCE, HALF_PER_FLOAT32)
    )
    limit = max(tolerance, factor * f32_error) if double.outputs else OUTPUT_CAP
    why = f"the outputs differ by {error:.2g} (of their spread) from {_reference_name(double)}{_f32_note(double, f32_error)}"
    return check("outputs", error, min(OUTPUT_CAP, limit), why), error


def _relative_error(x: Tensor, y: Tensor) -> float:
    """The distance relative to the spread, or to the size of outputs that are all alike.

    Infinities of a mask must match in place; they do not count otherwise.
    """
    if x.shape != y.shape or not bool((x.isfinite() == y.isfinite()).all()):
        return math.inf
    x, y = x.double()[y.isfinite()], y.double()[y.isfinite()]
    distance, size = float((x - y).norm()), float(y.norm())
    spread = float((y - y.mean()).norm())
    scale = spread if spread > MIN_SPREAD * size else size
    return distance / scale if scale else (0.0 if distance == 0 else math.inf)


def _gradient(
    plain: StepResults,
    levers: StepResults,
    double: StepResults,
    noise: float,
    kink_limit: float,
    batch_factor: float,
    floor: float,
    torch: ModuleType,
) -> dict[str, Any]:
    reference = [*(double.gradients or plain.gradients[:1]), *plain.gradients[1:]]
    f32_error = relative_distance(plain.gradients[0], reference[0], torch)
    error = _max_distance(reference, levers.gradients, torch)
    noise /= batch_factor
    limit = max(_arithmetic_limit(f32_error), min(max(NOISE_CAP * noise, floor), kink_limit))
    return check(
        "gradient",
        error,
        limit,
        f"the relative gradient error against {_reference_name(double)} is {error:.2g}{_f32_note(double, f32_error)}; "
        f"batches differ by {noise:.2g}",
    )


def _parameters(
    plain: StepResults,
    levers: StepResults,
    double: StepResults,
    kink_limit: float,
    share: float,
    batch_factor: float,
    floor: float,
    torch: ModuleType,
) -> dict[str, Any]:
    worst = (-1.0, 0.0, kink_limit, 0.0)
    for i in range(len(plain.gradients[0])):
        plain_grads, lever_grads = ([grads[i] for grads in play.gradients] for play in (plain, levers))
        f32_error = 0.0
        if double.gradients:
            f32_error = relative_distance(plain_grads[:1], [double.gradients[0][i]], torch)
        size = _size(plain_grads)
        # A gradient of pure rounding (a bias before a normalisation)
        if size == 0.0 or f32_error > MAX_REFERENCE_ERROR:
            continue
        noise = (
            math.sqrt(share * len(plain_grads) / (2 * len(plain_grads) - 2))
            * _size([_minus(a, b) for a, b in pairwise(plain_grads)])
            / size
        )
        error = _size([_minus(a, b) for a, b in zip(lever_grads, plain_grads, strict=True)]) / size
        noise /= batch_factor
        limit = max(_arithmetic_limit(f32_error), min(max(NOISE_CAP * noise, floor), kink_limit))
        if _exceeds(error / limit, worst[0]):
            worst = (error / limit, error, limit, noise)
    return check(
        "parameters",
        worst[1],
        worst[2],
        f"the gradient of the worst parameter differs by {worst[1]:.2g} (relative) from the plain one; "
        f"between batches it differs by {worst[3]:.2g}",
    )


def _updates(
    plain: StepResults, levers: StepResults, double: StepResults, torch: ModuleType
) -> dict[str, Any]:
    worst = (-1.0, 0.0, MIN_LIMIT)
    for i, update in enumerate(plain.updates):
        if update is None:
            continue
        reference = double.updates[i] if double.updates else update
        limit = _arithmetic_limit(relative_distance([update], [reference], torch))
        error = relative_distance([levers.updates[i]], [reference], torch)
        if _exceeds(error / limit, worst[0]):
            worst = (error / limit, error, limit)
    why = f"from the same gradients, the relative update error against {_reference_name(double)} is {worst[1]:.2g}"
    return check("update", worst[1], worst[2], why)


def _bias(plain: StepResults, levers: StepResults, double: StepResults) -> list[dict[str, Any]]:
    """Whether errors of the updates average away over all elements, as rounding does.

    The unit is plain float32's own error, per parameter. A bias of one unit in the last place per step does not
    average away, and is smaller than what `_updates` sees. No check without a float64 reference. Equal weights
    round alike, so the plain step may be biased itself: the smaller bias counts, against float64 or against it.
    """
    references = double.updates, plain.updates
    biases = [found for each in references if (found := _mean_error(plain, levers, double, each)) is not None]
    if not biases:
        return []
    bias, limit = min(biases, key=lambda each: each[0] / each[1])
    why = f"the mean error of the updates is {bias:.2g} of plain float32's own; rounding averages away"
    return [check("bias", bias, limit, why)]


def _mean_error(
    plain: StepResults, levers: StepResults, double: StepResults, against: Sequence[Any]
) -> tuple[float, float] | None:
    """The mean error of the updates against others, and its limit; None without any update in float64."""
    sums, squares, count = [0.0, 0.0], 0.0, 0
    for i, (update, other, reference) in enumerate(
        zip(plain.updates, levers.updates, double.updates, strict=False)
    ):
        if update is None or other is None or reference is None:
            continue
        unit = math.sqrt(squared_norm(update - reference) / update.numel())
        error = (other - against[i]) / unit if unit else other - update
        sums = [sums[0] + float(error.sum()), sums[1] + float((error * reference.sign()).sum())]
        squares, count = squares + squared_norm(error), count + update.numel()
    if not count:
        return None
    bias = largest(abs(x) / count for x in sums)
    # The bias is no part of the scatter; chance alone may make a few elements agree
    scatter = math.sqrt(max(squares / count - bias**2, 1.0))
    return bias, MAX_BIAS + CHANCE_SDS * scatter / math.sqrt(count)


def _buffers(
    plain: StepResults, levers: StepResults, double: StepResults, cap: float, share: float, torch: ModuleType
) -> dict[str, Any]:
    error = _max_distance(plain.buffer_changes, levers.buffer_changes, torch)
    cap = min(cap, NOISE_CAP * _noise(plain.buffer_changes, torch) * math.sqrt(share))
    if double.buffer_changes:
        f32_error = relative_distance(plain.buffer_changes[0], double.buffer_changes[0], torch)
        cap = min(cap, max(HALF_ULP, HALF_PER_FLOAT32 * f32_error))
    limit = max(MIN_LIMIT, cap)
    why = f"running statistics differ by {error:.2g} (relative) from those of the plain step"
    return check("buffers", error, limit, why)


def _noise(steps: list[list[Any]], torch: ModuleType) -> float:
    """The distance between gradients of two batches at the same weights.

    It is the median over adjacent batches, divided by the square root of two.
    """
    distances = sorted(relative_distance(a, b, torch) / math.sqrt(2) for a, b in pairwise(steps))
    return distances[len(distances) // 2]


def _arithmetic_limit(f32_error: float) -> float:
    return max(MIN_LIMIT, min(ARITHMETIC_FACTOR * f32_error, f32_error + ARITHMETIC_MARGIN))


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.double() - b.double()


def _size(tensors: Sequence[Any]) -> float:
    return math.sqrt(sum(map(squared_norm, tensors)))


def _reference_name(double: StepResults) -> str:
    return "float64" if double.gradients else "the plain step (float64 is not comparable here)"


def _f32_note(double: StepResults, f32_error: float) -> str:
    return f", plain float32 {f32_error:.2g}" if double.gradients else ""
