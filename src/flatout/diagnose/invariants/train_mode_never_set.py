"""The model is trained in evaluation mode.

What:
    The model was returned by its library in evaluation mode, or `eval()` was called before the training. In all steps,
    its dropout or new batch normalisation is in evaluation mode, while the weights beside them train.
Why it matters:
    Dropout drops nothing, and batch normalisation with its initial statistics normalises nothing. Gradient
    checkpointing of Hugging Face models is silently off. The model overfits earlier than its config intends.
How to fix it:
    Call `model.train()` before the training loop, and again after each evaluation.
Example:
    import torch

    def from_pretrained():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)).eval()

    model = from_pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
  + model.train()
    for x in torch.randn(8, 16, 4):
        optimizer.zero_grad()
  -     model(x).square().mean().backward()  # <-
  +     model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://huggingface.co/docs/transformers/main_classes/model
"""

from typing import Any

from flatout.agent.frames import place_of
from flatout.diagnose.invariant import Findings, rule
from flatout.diagnose.invariants.train_mode_not_restored import TrainModeNotRestored, said

MIN_STEPS = 5


class TrainModeNeverSet(TrainModeNotRestored):
    def findings(self) -> Findings:
        found = [
            layer
            for module, layer in self.layers.items()
            if layer.asleep >= MIN_STEPS
            and not layer.trained
            and not layer.root_trains
            and module not in self.switched_on
            if layer.kind == "dropout" or is_new(module)
        ]
        for line in {layer.call: None for layer in found}:
            of_line = [layer for layer in found if layer.call == line]
            eval_line = of_line[0].line
            yield RULE.finding(
                f"{said(of_line)} in evaluation mode in all {of_line[0].asleep} training steps",
                line,
                "model.train()  # before the loop",
                others=[place_of(eval_line)] if eval_line is not None else [],
            )


def is_new(module: Any) -> bool:
    """Whether a batch normalisation has its initial statistics; others may be frozen on purpose."""
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    return mean is not None and variance is not None and not bool(mean.any()) and bool((variance == 1).all())


RULE = rule(TrainModeNeverSet, "FL045", __doc__, weight=-1)
