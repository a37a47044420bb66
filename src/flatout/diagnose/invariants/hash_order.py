"""Labels or samples depend on Python's hash seed.

What:
    Two runs with the same seeds, but with another `PYTHONHASHSEED`, give other labels to the loss. The order of a
    `set` of strings depends on it, and on nothing that is saved.
Why it matters:
    A class has another number in each process. A checkpoint loaded later, or another rank, names other classes.
How to fix it:
    Sort what comes from a set: `sorted(set(names))`.
Example:
    import torch
    import torch.nn.functional as F

    names = ["maple", "birch", "alder", "willow", "rowan"] * 8
  - number = {name: i for i, name in enumerate(set(names))}  # <-
  + number = {name: i for i, name in enumerate(sorted(set(names)))}
    labels = torch.tensor([number[name] for name in names])
    model = torch.nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(8, 40, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
Sources:
    https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED
"""

import ast
from collections.abc import Mapping
from typing import Any

from flatout.diagnose.invariant import Invariant, argument, digest, rule
from flatout.schema.findings import Finding, SourceLocation

BATCHES = 8
READERS = {"enumerate", "list", "tuple", "zip", "iter", "map", "next"}
ORDER_FREE = {"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum"}


class LabelDigests(Invariant):
    """Records the first labels; two runs are compared by `flatout.diagnose.observed_run`."""

    calls = frozenset(
        {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"}
    )

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if len(self.program.label_digests) < BATCHES:
            self.program.label_digests.append(digest(argument(args, kwargs, 1, "target")))


def order_place(sources: Mapping[str, str]) -> SourceLocation | None:
    """The first place in these files, path -> text, that reads a set in its order."""
    for file, text in sources.items():
        sorted_after = set()
        for node in ast.walk(ast.parse(text)):  # an outer call comes before its arguments
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ORDER_FREE:
                for argument_ in node.args:
                    sorted_after |= {argument_, *getattr(argument_, "generators", ())}
            if node in sorted_after:
                continue
            read = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READERS:
                read += node.args
            for value in read:
                is_call = isinstance(value, ast.Call) and getattr(value.func, "id", "") in (
                    "set",
                    "frozenset",
                )
                if is_call or isinstance(value, (ast.Set, ast.SetComp)):
                    line = text.splitlines()[value.lineno - 1]
                    return SourceLocation(file, value.lineno, 0, "", line.strip())
    return None


def finding_at(place: SourceLocation) -> Finding:
    return RULE.finding(
        "the labels of the first batches depend on Python's hash seed: two runs that differ in PYTHONHASHSEED alone "
        "got other labels. The order of a set of strings changes with it",
        place,
        "sorted(set(...))",
    )


RULE = rule(LabelDigests, "FL068", __doc__)
