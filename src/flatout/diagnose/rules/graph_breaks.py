"""The compiled model has graph breaks.

What:
    torch.compile found a line that it cannot trace. It ends the graph there, runs the line in Python, and
    starts a new graph after it.
Why it matters:
    Nothing is fused across a break, each graph is entered from Python, and CUDA graphs cannot cover the whole
    model.
How to fix it:
    Move the line out of the forward pass, or express it with tensor operations: torch.where instead of an
    `if` on a value. torch.compile(model, fullgraph=True) names each break.
Example:
    def forward(self, x):
  -     if x.mean().item() > 0:
  -         x = x * 2
  +     x = torch.where(x.mean() > 0, x * 2, x)
        return self.head(x)
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    seen = profile.compile_record
    if seen is None or not seen.breaks or seen.recompiles > seen.breaks:
        return
    times = "once" if seen.breaks == 1 else f"{seen.breaks} times"
    yield RULE.profile_finding(
        f"the graph breaks {times}; {seen.graphs} graphs were compiled",
        seen.places,
        evidence=seen.reasons[:4],
    )


RULE = Rule(
    "FL156",
    "graph_breaks",
    Severity.TIME,
    __doc__,
    check_profile=check,
    replaced_by=("recompiles",),
)
