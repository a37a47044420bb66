"""A comment that switches off a rule where that rule finds nothing.

What:
    A line carries `# flatout: ignore ...`, and either the code is no rule's, or the rule finds nothing there.
Why it matters:
    The fault was mended and the comment stayed: it will hide the next one on that line. A misspelled code hides nothing at all, and
    whoever wrote it believes that it does.
How to mend it:
    Remove the comment, or correct the code. `flatout check --explain all` lists the codes.
Bad:
    import torch

    model = torch.nn.Linear(4, 1)
    torch.save(model.state_dict(), "model.pt")  # flatout: ignore FL302  # <-
Good:
    import torch

    model = torch.nn.Linear(4, 1)
    torch.save(model, "model.pt")  # flatout: ignore FL302
"""

from __future__ import annotations

from flatout.diagnose.rule import Rule
from flatout.plan.findings import Severity

# What it finds is found in diagnose/check.py, once all other rules have looked.
RULE = Rule("FL349", "ignore_without_effect", Severity.FRAGILE, __doc__, look=lambda program: ())
