"""The compiled model falls into pieces.

What:
    torch.compile had to stop at a line that it cannot trace, run that line in Python, and begin anew behind it.
Why it matters:
    Nothing is fused across a break, each piece is entered from Python, and CUDA graphs cannot cover the whole.
How to mend it:
    Take the line out of the forward, or say it in tensors: torch.where in place of an `if` on a value; torch.compile(model, fullgraph=True) names each.
Bad:
    def forward(self, x):
        if x.mean().item() > 0:
            x = x * 2
        return self.head(x)
Good:
    def forward(self, x):
        x = torch.where(x.mean() > 0, x * 2, x)
        return self.head(x)
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.diagnose.seen import found
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    seen = profile.compiled
    if seen is None or not seen.breaks or seen.recompiles > seen.breaks:
        return
    times = "once" if seen.breaks == 1 else f"{seen.breaks} times"
    yield found(RULE, f"the graph breaks {times}; {seen.graphs} graphs were made", seen.places[0] if seen.places else None, evidence=seen.reasons[:4],
                others=seen.places[1:])


RULE = Rule("FL156", "graph_breaks", Severity.TIME, __doc__ or "", judge=judge)
