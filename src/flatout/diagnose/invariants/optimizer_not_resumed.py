"""A resume leaves out the optimizer's state that the checkpoint has.

What:
    To resume, the program loads the weights of a checkpoint and continues to count its epochs or steps. The
    checkpoint has the state of the optimizer, too, but no optimizer gets it.
Why it matters:
    After every resume, momentum and the statistics of Adam start at zero, and the learning rate at its first value.
    The first steps are far too large, and the loss rises for a while. No error says so.
How to fix it:
    Call `optimizer.load_state_dict(saved["optimizer"])` after the weights are loaded.
Example:
    import io
    import torch

    def train(file, start, end):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        if start:
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])  # <-
  +         optimizer.load_state_dict(saved["optimizer"])
            start = saved["epoch"] + 1
        for epoch in range(start, end):
            for x in torch.randn(10, 8, 4):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            file.seek(0)
            torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    file = io.BytesIO()
    train(file, 0, 5)
    train(file, 5, 8)
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MAX_LOADS = 16
MAX_KEYS = 64
MIN_STEPS = 3


@dataclass
class Resume:
    """A checkpoint that a model was loaded from. ``counts``: passes, steps and backward passes before."""

    line: Line | None
    parameters: set[int]
    numbers: dict[str, int]
    keys: set[str]
    kept: set[str] | None  # what the optimizer in it keeps for each parameter; None without an optimizer
    counts: tuple[int, ...]


@dataclass
class Continued:
    """What the program saved after it had resumed. ``key``: the number that it counts on."""

    resume: Resume
    line: Line | None
    key: str
    number: int
    optimizer: Any


class Resumes(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.resumes: list[Resume] = []
        self.continued: list[Continued] = []
        self.loads = self.optimizer_loads = 0
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def optimizer_loaded(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        self.optimizer_loads += 1

    def step_ends(self, optimizer: Any) -> None:
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1

    def state_loaded(self, module: Any, state: Mapping[str, Any], strict: bool, result: Any) -> None:
        self.loads += 1
        if self.loads > MAX_LOADS:  # each look takes about a tenth of a second
            return
        for saved in gc.get_referrers(state):
            if is_checkpoint(saved) and any(value is state for value in saved.values()):
                numbers = {k: v for k, v in saved.items() if isinstance(v, int) and not isinstance(v, bool)}
                parameters = {id(p) for p in module.parameters()}
                counts = self._counts()
                self.resumes.append(
                    Resume(line_here(), parameters, numbers, set(saved), kept_in(saved), counts)
                )
                return

    def saved(self, saved: Any, file: Any) -> None:
        for resume in list(self.resumes):
            if is_checkpoint(saved) and set(saved) == resume.keys:
                self.resumes.remove(resume)
                since = [
                    0,
                    *(now - before for now, before in zip(self._counts(), resume.counts, strict=True)),
                ]
                for key, number in resume.numbers.items():
                    # from the saved number on, not from 0
                    if number >= 1 and near(saved[key] - number, since) and not near(saved[key], since):
                        for optimizer in self._in_use(resume.parameters):
                            self.continued.append(Continued(resume, line_here(), key, number, optimizer))
                        break

    def _counts(self) -> tuple[int, ...]:
        return self.program.passes, self.program.steps, self.program.backwards

    def _in_use(self, parameters: set[int]) -> list[Any]:
        """The optimizers of these parameters that keep a state and have stepped."""
        return [
            optimizer
            for optimizer, steps in self.steps.items()
            if steps >= MIN_STEPS
            and any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
            and any(is_state(value) for state in optimizer.state.values() for value in state.values())
        ]


def is_checkpoint(value: Any) -> bool:
    """Whether this is a dict with names as keys, and not the variables of a module."""
    if not isinstance(value, dict) or not 1 < len(value) <= MAX_KEYS or "__name__" in value:
        return False
    return all(isinstance(key, str) for key in value)


def kept_in(value: Any) -> set[str] | None:
    """What the first state of an optimizer in a checkpoint keeps for each parameter."""
    for entry in (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    ):
        if isinstance(entry, dict) and {"state", "param_groups"} <= set(entry):
            states = list(entry["state"].values()) if isinstance(entry["state"], dict) else []
            return {str(key) for state in states[:1] for key in state}
        nested = isinstance(entry, (dict, list, tuple)) and len(entry) <= MAX_KEYS
        if nested and (kept := kept_in(entry)) is not None:
            return kept
    return None


def is_state(value: Any) -> bool:
    """Whether an optimizer keeps more than a counter here."""
    return hasattr(value, "numel") and value.numel() > 1


def near(number: Any, counts: list[int]) -> bool:
    return isinstance(number, int) and any(abs(number - count) <= 1 for count in counts)


class OptimizerNotResumed(Resumes):
    def findings(self) -> Findings:
        for c in self.continued if not self.optimizer_loads else ():
            own = {str(key) for state in c.optimizer.state.values() for key in state}
            if c.resume.kept and c.resume.kept == own:
                yield RULE.finding(
                    f"the checkpoint has the optimizer's state ({', '.join(sorted(own))}), and the training continues at its "
                    f"`{c.key}` {c.number}, but no optimizer was given this state",
                    c.resume.line,
                    'optimizer.load_state_dict(saved["optimizer"])  # after this line',
                )


RULE = rule(OptimizerNotResumed, "FL044", __doc__)
