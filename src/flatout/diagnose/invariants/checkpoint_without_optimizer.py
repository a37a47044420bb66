"""A checkpoint for resuming lacks the optimizer.

What:
    The program resumes from its checkpoints: it loads the weights and continues to count the epochs. Its optimizer
    has state (Adam, or SGD with momentum), and this state is not saved.
Why it matters:
    After resuming, the averages of Adam start at zero, with the bias correction of the first step. The first
    steps are far too large, and the loss jumps. Part of the training before the interruption is undone.
How to fix it:
    Save `optimizer.state_dict()` with the weights, and the state of the scheduler and the scaler. Load them
    when resuming.
Example:
    import io
    import torch

    def train(file, start, end):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        if start:
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
  +         optimizer.load_state_dict(saved["optimizer"])
            start = saved["epoch"] + 1
        for epoch in range(start, end):
            for x in torch.randn(10, 8, 4):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            file.seek(0)
  -         torch.save({"epoch": epoch, "model": model.state_dict()}, file)  # <-
  +         torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    file = io.BytesIO()
    train(file, 0, 5)
    train(file, 5, 8)
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

from flatout.diagnose.invariant import Findings, rule
from flatout.diagnose.invariants.optimizer_not_resumed import Resumes
from flatout.schema.findings import Severity


class CheckpointWithoutOptimizer(Resumes):
    def findings(self) -> Findings:
        for c in self.continued if not self.optimizer_loads else ():
            if c.resume.kept is None:
                yield RULE.finding(
                    f"the training continued at the `{c.key}` {c.number} of such a checkpoint, but it lacks the state of the "
                    f"optimizer ({type(c.optimizer).__name__})",
                    c.line,
                    '"optimizer": optimizer.state_dict(),  # in this dict; load it with the weights',
                )


RULE = rule(CheckpointWithoutOptimizer, "FL312", __doc__, Severity.FRAGILE)
