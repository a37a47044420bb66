"""An ignore comment hides nothing.

What:
    A line carries `# flatout: ignore ...`, but the code names no rule, or the rule finds nothing there.
Why it matters:
    The problem was fixed and the comment stayed: it will hide the next problem on that line. A misspelled
    code hides nothing, although the author expects it to.
How to fix it:
    Remove the comment, or correct the code. `flatout check --explain all` lists the codes.
Example:
    import torch

  - state = torch.load("model.pt")  # flatout: ignore FL304  # <-
  + state = torch.load("model.pt", weights_only=False)  # flatout: ignore FL304
"""

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Severity

# diagnose/check.py produces its findings after all other rules have run.
RULE = Rule("FL349", "ignore_without_effect", Severity.FRAGILE, __doc__, check_source=lambda program: ())
