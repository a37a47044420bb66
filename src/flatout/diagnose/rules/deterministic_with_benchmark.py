"""cuDNN is set to deterministic and benchmark at the same time.

What:
    `torch.backends.cudnn.deterministic = True` and `torch.backends.cudnn.benchmark = True` are both set.
Why it matters:
    `benchmark` times the algorithms of cuDNN and uses the fastest. The fastest one can change from run to
    run, and different algorithms round differently. The run is then not repeatable, which is the purpose of
    `deterministic`. At the same time, `deterministic` excludes the fastest algorithms.
How to fix it:
    For a repeatable run, set `deterministic = True` and `benchmark = False`. For a fast run, set only
    `benchmark = True`.
Example:
    import torch

    torch.backends.cudnn.deterministic = True
  - torch.backends.cudnn.benchmark = True  # <-
  + torch.backends.cudnn.benchmark = False
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#cuda-convolution-benchmarking
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, implies
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    set_to: dict[str, list[ProgramEvent]] = {}
    for event in program.events:
        node = event.node
        if (
            event.kind == "assign"
            and isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.value, ast.Constant)
        ):
            name = event.source.dotted(node.targets[0])
            if name.startswith("torch.backends.cudnn."):
                set_to.setdefault(name.rpartition(".")[2] + str(node.value.value), []).append(event)
    if "benchmarkFalse" in set_to or "deterministicFalse" in set_to:
        return
    for one in set_to.get("deterministicTrue", []):
        for other in set_to.get("benchmarkTrue", []):
            if (
                one.frames == other.frames
                and one.source is other.source
                and (implies(other, one) or implies(one, other))
            ):
                late = max(one, other, key=program.events.index)
                yield RULE.finding(
                    "deterministic and benchmark are both enabled: the run is neither repeatable nor as fast as possible",
                    late.place,
                    "torch.backends.cudnn.benchmark = False",
                    others=[one.place if late is other else other.place],
                )


RULE = Rule("FL310", "deterministic_with_benchmark", Severity.FRAGILE, __doc__, check)
