"""The images of the evaluation are scaled differently.

What:
    In an evaluation with a loss or an accuracy, the model gets images on another scale than in training. Their standard
    deviations differ by more than a factor of 4, or only one kind is normalised.
Why it matters:
    The model has learned the scale of its training images. On another scale its outputs mean nothing, so the evaluation
    measures the scaling and not the model.
How to fix it:
    Prepare both kinds of images with the same function: the same division by 255, and the same normalisation.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train, test = torch.randint(0, 256, (2, 10, 8, 1, 8, 8)) / 255
    labels = torch.arange(8) % 5
    for images in train:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model((images - 0.5) / 0.29), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for images in test:
  -         predicted = model(images)  # <-
  +         predicted = model((images - 0.5) / 0.29)
            print((predicted.argmax(1) == labels).float().mean().item())
"""

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.diagnose.running_modules import LOSSES, RunningModules, has_values

MIN_BATCHES, MAX_BATCHES = 3, 64
MIN_ELEMENTS, MIN_SIDE = 256, 8
CHANNELS = (1, 3, 4)
FACTOR = 4.0
OF_NORMALISED = 1.5  # times the deviation of images between 0 and 1
BELOW = -0.3  # the lowest value of normalised images


class Images:
    """Batches of images of one shape, each as its lowest and highest value, mean and standard deviation."""

    def __init__(self) -> None:
        self.trained: list[list[float]] = []
        self.evaluated: list[list[float]] = []
        self.line: Line | None = None  # of the first evaluation


class EvaluationInputsScaled(RunningModules):
    calls = LOSSES | {"__eq__", "eq"}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.images: WeakKeyDictionary[Any, dict[Any, Images]] = WeakKeyDictionary()  # by module and shape
        self.learning: list[Any] = []  # since the latest backward pass: images, the values of a batch
        self.latest: Any = None  # the same of a pass without gradients, and its line

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        torch, self.latest = self.program.torch, None
        x = inputs[0] if len(inputs) == 1 else None  # a further input may tell the scale, as in diffusion
        if not isinstance(x, torch.Tensor) or not is_image_batch(x) or not has_values(x):
            return
        seen = self.images.setdefault(module, {}).setdefault(x.shape[1:], Images())
        values, learns = x.detach().float(), torch.is_grad_enabled()
        if len(seen.trained if learns else seen.evaluated) < MAX_BATCHES:
            batch = torch.stack([values.min(), values.max(), values.mean(), values.std()]).tolist()
            if not learns:
                self.latest = seen, batch, line_here()
            elif module.training and len(self.learning) < MAX_BATCHES:
                self.learning.append((seen, batch))

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self.latest is not None and not self.running and not self.program.torch.is_grad_enabled():
            seen, batch, line = self.latest
            seen.evaluated.append(batch)
            seen.line, self.latest = seen.line or line, None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        for seen, batch in self.learning:
            seen.trained.append(batch)
        self.learning, self.latest = [], None

    def findings(self) -> Findings:
        for seen in (seen for by_shape in self.images.values() for seen in by_shape.values()):
            one, other = seen.trained, seen.evaluated
            if min(len(one), len(other)) < MIN_BATCHES:
                continue
            if any(
                far_apart(*pair) or only_one_is_normalised(*pair) for pair in ((one, other), (other, one))
            ):
                yield RULE.finding(
                    f"the images had the mean {fmean(b[2] for b in one):.3g} and the standard deviation "
                    f"{fmean(b[3] for b in one):.3g} in training, but {fmean(b[2] for b in other):.3g} and "
                    f"{fmean(b[3] for b in other):.3g} in the evaluation",
                    seen.line,
                    "scale both kinds of images alike",
                )


def is_image_batch(x: Any) -> bool:
    """Other inputs, such as windows of a time series, may well have another deviation in each batch."""
    if not x.is_floating_point() or x.ndim != 4 or x.numel() < MIN_ELEMENTS:
        return False
    channels, sides = (x.shape[1], x.shape[2:]) if x.shape[1] in CHANNELS else (x.shape[3], x.shape[1:3])
    return channels in CHANNELS and min(sides) >= MIN_SIDE


def far_apart(narrow: list[list[float]], wide: list[list[float]]) -> bool:
    return 0 < FACTOR * max(b[3] for b in narrow) < min(b[3] for b in wide) and min(b[3] for b in narrow) > 0


def only_one_is_normalised(plain: list[list[float]], other: list[list[float]]) -> bool:
    """Black pixels give normalised batches the same lowest value: the noise of an augmentation does not."""
    between = all(low >= 0 and high <= 1 for low, high, _, _ in plain)
    lowest, times = Counter(batch[0] for batch in other).most_common(1)[0]
    darker = max(batch[2] for batch in other) < min(batch[2] for batch in plain)
    wider = fmean(batch[3] for batch in other) > OF_NORMALISED * fmean(batch[3] for batch in plain)
    return between and lowest < BELOW and times > len(other) / 2 and darker and wider


RULE = rule(EvaluationInputsScaled, "FL079", __doc__)
