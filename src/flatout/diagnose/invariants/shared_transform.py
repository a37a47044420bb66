"""A transform is changed on a data set that two subsets share.

What:
    Subsets from `random_split` hold the same data set object. An attribute of it, such as its transform, is set for
    one subset after the split.
Why it matters:
    Both subsets read the one data set: training loses its augmentation, or validation gets it.
How to fix it:
    Make a data set for each part, and use the indices of the split: `Subset(other, part.indices)`.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset, random_split

    class Noisy(Dataset):
        def __init__(self, transform):
            self.data, self.transform = torch.randn(40, 4), transform

        def __len__(self):
            return len(self.data)

        def __getitem__(self, i):
            return self.data[i] if self.transform is None else self.transform(self.data[i])

    train, test = random_split(Noisy(lambda x: x + torch.randn(4)), [32, 8])
  - test.dataset.transform = None  # <-
  + test = torch.utils.data.Subset(Noisy(None), test.indices)
    loader, held = DataLoader(train, batch_size=8), DataLoader(test, batch_size=8)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for x in held:
            model(x)
"""

import ast
import linecache
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import place_at, place_of, user_sources
from flatout.diagnose.invariant import Findings, Invariant, rule


class SharedTransform(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.at_split: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self.changed: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.subsets: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()  # in use, by id -> line

    def subset_made(self, subset: Any) -> None:
        self.at_split.setdefault(subset.dataset, dict(getattr(subset.dataset, "__dict__", {})))

    def pass_begins(self, loader: Any) -> None:
        subset = loader.dataset
        shared = getattr(subset, "dataset", None)
        if shared is None or shared not in self.at_split:
            return
        self.subsets.setdefault(shared, {})[id(subset)] = self.program.line_of(loader)
        for name, before in self.at_split[shared].items():
            now = getattr(shared, name, before)
            if now is not before and (callable(before) or callable(now)):
                self.changed[shared] = name

    def findings(self) -> Findings:
        for shared, name in self.changed.items():
            lines = self.subsets[shared]
            if len(lines) > 1:
                yield RULE.finding(
                    f"`{name}` of {type(shared).__name__} was changed after the split, but {len(lines)} subsets in use share "
                    "this data set: the change acts on each of them",
                    assignment(f"dataset.{name}") or place_of(next(iter(lines.values()))),
                    "make a second data set, and Subset(it, part.indices)",
                )


def assignment(target: str) -> Any:
    """The place in the user's files that assigns to an attribute, ``a.b`` of any object."""
    for file in sorted(user_sources()):
        lines = linecache.getlines(file)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.Assign) and any(ast.unparse(t).endswith(target) for t in node.targets):
                return place_at(file, node.lineno)
    return None


RULE = rule(SharedTransform, "FL069", __doc__)
