"""Every step creates a new optimizer.

What:
    `torch.optim...(model.parameters())` is inside the loop over batches.
Why it matters:
    The optimizer holds the momentum, the averages of Adam and its bias correction. A new optimizer starts
    without them. Every step of Adam is then a first step (the sign of the gradient, at the full learning
    rate), and a scheduler has no effect.
How to fix it:
    Create it once, before the loop.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  + optimizer = torch.optim.Adam(model.parameters())
    for _ in range(100):
  -     optimizer = torch.optim.Adam(model.parameters())  # <-
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import MIN_REPEATS, calls_at_busiest_line, event_of
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        made = [event for event in loop.of("call") if loop.always(event) and isinstance(event.node, ast.Call)]
        for event in made:
            call = event.node
            if (
                not isinstance(call, ast.Call)
                or ".optim." not in event.source.dotted(call.func)
                or "Optimizer" not in program.values.kinds(event.source, call)
            ):
                continue
            parameters = call.args[0] if call.args else None
            if (
                not isinstance(parameters, ast.Call)
                or not isinstance(parameters.func, ast.Attribute)
                or parameters.func.attr != "parameters"
            ):
                continue
            inside = {id(each.node) for each in loop.events}
            models = program.origins(event.source, parameters.func.value)
            if models and all(
                isinstance(origin.node, ast.Call) and id(origin.node) not in inside for origin in models
            ):
                yield RULE.finding(
                    "this optimizer is recreated in every step: it loses its momentum and averages",
                    event.place,
                    f"{event.source.code(event.source.statement(call) or call)}  # once, before the loop",
                )


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    _, _, places = event_of(profile, "make_optimizer")
    made = calls_at_busiest_line(profile, "make_optimizer")
    if places and made >= MIN_REPEATS:
        yield RULE.profile_finding(f"this line has created {made} optimizers", places[:1])


RULE = Rule(
    "FL027",
    "optimizer_made_every_step",
    Severity.WRONG,
    __doc__,
    check_source,
    check_profile,
)
