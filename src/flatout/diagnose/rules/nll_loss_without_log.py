"""NLLLoss receives values that are not log-probabilities.

What:
    `nll_loss` (or `NLLLoss`) receives the output of a linear layer or of a softmax, not of `log_softmax`.
Why it matters:
    The loss only picks the entry of the target class and negates it. With logits, it can fall without limit,
    because the model learns to output ever larger numbers. With probabilities, its gradient vanishes exactly
    where the model is most wrong.
How to fix it:
    Apply `F.log_softmax(output, dim=1)` first, or use `cross_entropy` instead.
Example:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
  - loss = F.nll_loss(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long))  # <-
  + loss = F.nll_loss(F.log_softmax(model(torch.randn(8, 4)), dim=1), torch.zeros(8, dtype=torch.long))
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.NLLLoss.html
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.softmax_before_cross_entropy import ends_in, losses
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

WANTED = {"NLLLoss": "", "nll_loss": ""}
WRONG = {"softmax", "sigmoid", "Linear", "Conv2d", "relu", "ReLU", "tanh", "Tanh"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call, name in losses(program, WANTED):
        made = ends_in(program, source, call.args[0]) if call.args else {""}
        if made <= WRONG:
            yield RULE.finding(
                f"{name} expects log-probabilities, but `{source.code(call.args[0])}` comes from {' or '.join(sorted(made))}",
                source.place(call),
                f"torch.nn.functional.cross_entropy({', '.join(source.code(a) for a in call.args)})"
                if "softmax" not in made
                else "# use log_softmax instead of softmax in the model's forward",
            )


RULE = Rule("FL018", "nll_loss_without_log", Severity.WRONG, __doc__, check)
