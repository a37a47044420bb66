"""The program waits for every kernel.

What:
    The program sets `CUDA_LAUNCH_BLOCKING=1` in its own environment.
Why it matters:
    The host waits for the device after every kernel. The setting is for finding the line of a device error.
    Left enabled, it makes training of small models several times slower.
How to fix it:
    Remove the line. Set the variable in the shell for a run that needs it.
Example:
    import os

  - os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # <-
  + os.environ["CUDA_VISIBLE_DEVICES"] = "0"
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

VARIABLE = "CUDA_LAUNCH_BLOCKING"


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.Assign, ast.Call):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            named = (
                isinstance(target, ast.Subscript)
                and source.dotted(target.value) == "os.environ"
                and _is(target.slice, VARIABLE)
            )
        else:
            assert isinstance(node, ast.Call)
            named = (
                source.dotted(node.func) in ("os.environ.setdefault", "os.putenv")
                and len(node.args) == 2
                and _is(node.args[0], VARIABLE)
            )
            value = node.args[1] if named else node
        if named and _is(value, "1") and not source.names.arms(node):
            yield RULE.finding(
                "in every run of this program, the host waits for each kernel before it launches the next",
                source.place(node),
                f"# remove it; for one run: {VARIABLE}=1 python {program.main.path}",
            )


def _is(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Constant) and str(node.value) == text


RULE = Rule("FL113", "launch_blocking", Severity.TIME, __doc__, check)
