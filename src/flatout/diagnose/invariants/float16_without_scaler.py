"""Half precision is used without a GradScaler.

What:
    The forward pass runs under `autocast` in float16 (the default type on CUDA), and the loss is not scaled.
Why it matters:
    The smallest normal float16 is 6e-5. Gradients below about 6e-8 become zero; in deep networks, these are a
    large share. The loss falls at first, then stalls at too high a value.
How to fix it:
    Use bfloat16, which has the range of float32 and needs no scaler:
    `torch.autocast("cuda", dtype=torch.bfloat16)`. Or scale the loss with `torch.amp.GradScaler("cuda")`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(20, 8, 4):
        optimizer.zero_grad()
  -     with torch.autocast("cpu", dtype=torch.float16):
  -         loss = model(x).square().mean()  # <-
  +     with torch.autocast("cpu", dtype=torch.bfloat16):
  +         loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
Sources:
    Micikevicius et al., Mixed Precision Training, ICLR 2018; https://docs.pytorch.org/docs/stable/amp.html
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, line_here, rule

MIN_STEPS = 10


class Float16WithoutScaler(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.line: Line | None = None  # of the latest forward pass in float16, since the latest step
        self.scaled = False  # some loss, by a scaler
        self.steps = 0

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        super().forward_begins(module, inputs)
        torch = self.program.torch
        weight = next(module.parameters(recurse=False), None)
        if weight is not None and torch.is_grad_enabled():
            device = weight.device.type
            autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
            if autocast and torch.get_autocast_dtype(device) is torch.float16:
                self.line = line_here()

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        super().loss_scaled(scaler, loss, scaled)
        self.scaled = self.scaled or scaled is not loss

    def stepped(self, optimizer: Any, window: Window) -> None:
        # gradients that were changed may have been scaled by hand
        self.steps += self.line is not None and window.unchanged

    def findings(self) -> Findings:
        if self.steps >= MIN_STEPS and self.steps >= 0.8 * self.program.steps and not self.scaled:
            yield RULE.finding(
                f"{self.steps} steps used gradients of a forward pass in float16, whose loss no scaler "
                "multiplied: small "
                "gradients become zero",
                self.line,
                "dtype=torch.bfloat16, or a GradScaler",
            )


RULE = rule(Float16WithoutScaler, "FL010", __doc__)
