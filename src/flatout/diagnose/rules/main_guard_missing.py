"""A script with loader workers lacks a main guard.

What:
    The top level of the script iterates over a loader with workers, and the script has no
    `if __name__ == "__main__":`.
Why it matters:
    Without fork, each worker imports the script again, and would start the training again. Python stops it
    with a RuntimeError. This affects macOS, Windows and, since Python 3.14, Linux, where `forkserver` is now
    the default.
How to fix it:
    Move the program into a function, and call it below `if __name__ == "__main__":`.
Example:
    import torch
    from torch.utils.data import DataLoader

  - loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2)  # <-
  - for x in loader:
  -     print(x.mean())
  + def main():
  +     loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2)
  +     for x in loader:
  +         print(x.mean())
  +
  + if __name__ == "__main__":
  +     main()
Sources:
    https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods;
    https://docs.python.org/3/whatsnew/3.14.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.generator_copied_to_workers import has_workers
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import loops_over
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    main = program.main
    if main.cells or any(isinstance(node, ast.Name) and node.id == "__name__" for node in main.nodes):
        return
    begun = {
        id(loop.node): loop for event in program.events if event.root is main.tree for loop in event.loops
    }
    for loop in begun.values():  # reached from the top level, in any function or file
        over = loops_over(loop.node)
        for origin in program.origins(loop.source, over) if over is not None else ():
            if (
                origin.dotted.endswith("data.DataLoader")
                and isinstance(origin.node, ast.Call)
                and has_workers(origin.node)
            ):
                yield RULE.finding(
                    "this loader has workers, but the script has no main guard: without fork (macOS, Windows, Python 3.14), "
                    "it does not start",
                    origin.source.place(origin.node),
                    'if __name__ == "__main__":\n    main()',
                    others=[loop.source.place(loop.node)],
                )
                return


RULE = Rule("FL305", "main_guard_missing", Severity.FRAGILE, __doc__, check)
