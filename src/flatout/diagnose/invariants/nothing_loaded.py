"""A state was loaded with strict=False, and no key matched.

What:
    `load_state_dict(state, strict=False)` found none of the model's keys in the state, or only under a prefix.
Why it matters:
    The model keeps its random weights. What looks like fine-tuning is training from scratch.
How to fix it:
    Rename the keys (`key.removeprefix("module.")`), load strictly, or check what `load_state_dict` returns.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    saved = {"module." + name: value for name, value in torch.nn.Linear(4, 1).state_dict().items()}
  - model.load_state_dict(saved, strict=False)  # <-
  + model.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, counted, line_here, rule


class NothingLoaded(Invariant):
    in_run = True

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, tuple[int, str, str]] = {}

    def state_loaded(self, module: Any, state: Mapping[str, Any], strict: bool, result: Any) -> None:
        own, given = set(module.state_dict()), set(state)
        if strict or not own or not given:
            return
        # a key of one side may be that of the other with a prefix
        renamed = {g for g in given - own for o in own if g.endswith(f".{o}") or o.endswith(f".{g}")}
        if not own & given or len(renamed) > len(own & given):
            self.lines[line_here()] = len(own), next(iter(sorted(given))), next(iter(sorted(own)))

    def findings(self) -> Findings:
        for line, (keys, given, own) in self.lines.items():
            yield RULE.finding(
                f"strict=False hid that no key matched: nothing was loaded into the module's {counted(keys, 'tensor')}. "
                f"The state has {given!r}, the module {own!r}",
                line,
                "rename the keys, or load with strict=True",
            )


RULE = rule(NothingLoaded, "FL070", __doc__)
