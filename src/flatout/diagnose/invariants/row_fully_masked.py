"""A softmax runs over a row that is fully masked.

What:
    All values of a row are minus infinity, or an attention mask leaves a query nothing to attend to.
Why it matters:
    The softmax of such a row is NaN. It spreads through the sums of the forward pass and into every gradient.
How to fix it:
    Leave out samples of length 0, or mask with a large negative number such as -1e9.
Example:
    import torch

    scores, keep = torch.nn.Linear(4, 1), torch.ones(8, 5, dtype=torch.bool)
  - keep[0] = False
  + keep[0, 1:] = False
    optimizer = torch.optim.SGD(scores.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 5, 4):
        masked = scores(x).squeeze(-1).masked_fill(~keep, float("-inf"))
  -     weights = torch.softmax(masked, dim=1)  # <-
  +     weights = torch.softmax(masked, dim=1)
        optimizer.zero_grad()
        torch.nan_to_num((weights * x[..., 0]).sum()).backward()
        optimizer.step()
"""

from collections.abc import Mapping
from typing import Any

from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule

ATTENTION = "scaled_dot_product_attention"


class RowFullyMasked(Invariant):
    calls = frozenset({"softmax", "log_softmax", ATTENTION, "multi_head_attention_forward"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Any, int] = {}
        self.future: set[Any] = set()  # lines whose mask lets each query attend to later positions alone

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        torch = self.program.torch
        if name == ATTENTION:
            mask = argument(args, kwargs, 3, "attn_mask")
            if mask is not None and mask.dtype is torch.bool and mask.any() and not mask.tril().any():
                self.future.add(line_here())
            rows = (
                None if mask is None else (~mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1)
            )
        elif name == "multi_head_attention_forward":
            padding = kwargs.get("key_padding_mask")
            rows = (
                None
                if padding is None
                else (padding if padding.dtype is torch.bool else padding == -torch.inf).all(-1)
            )
        else:
            dim = argument(args, kwargs, 1, "dim", -1)
            rows = (
                (args[0] == -torch.inf).all(dim)
                if isinstance(dim, int) and args[0].is_floating_point()
                else None
            )
        if rows is not None and (masked := int(rows.sum())):
            self.lines[line_here()] = self.lines.get(line_here(), 0) + masked

    def findings(self) -> Findings:
        for line, rows in self.lines.items():
            if line in self.future:
                yield RULE.finding(
                    "the mask is inverted: each position attends to later ones alone, since True means attend in "
                    f"scaled_dot_product_attention. {rows} rows are fully masked",
                    line,
                    "~mask, or is_causal=True",
                )
                continue
            yield RULE.finding(
                f"{rows} rows are fully masked (-inf at every position): their softmax is NaN",
                line,
                "leave out empty rows, or mask with -1e9",
            )


RULE = rule(RowFullyMasked, "FL066", __doc__)
