"""A script with loader workers lacks a main guard.

What:
    The script starts the workers of a loader, and has no `if __name__ == "__main__":`.
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
import linecache
import sys
from typing import Any
from weakref import WeakSet

from flatout.agent.frames import is_user_file
from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.schema.findings import Severity


class MainGuardMissing(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.loaders: WeakSet[Any] = WeakSet()

    def pass_begins(self, loader: Any) -> None:
        context = loader.multiprocessing_context
        if loader.num_workers and (context is None or context.get_start_method() == "fork"):
            self.loaders.add(loader)

    def findings(self) -> Findings:
        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        lines = sorted(
            (line[1], line) for loader in self.loaders if (line := self.program.line_of(loader)) is not None
        )
        if lines and script.endswith(".py") and is_user_file(script):
            tree = ast.parse("".join(linecache.getlines(script)))
            if not any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(tree)):
                yield RULE.finding(
                    "this loader has workers, but the script has no main guard: without fork (macOS, Windows, Python 3.14), "
                    "it does not start",
                    lines[0][1],
                    'if __name__ == "__main__":\n    main()',
                )


RULE = rule(MainGuardMissing, "FL305", __doc__, Severity.FRAGILE)
