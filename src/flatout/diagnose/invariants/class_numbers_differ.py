"""Two data sets give the same class other numbers.

What:
    The data sets of training and evaluation each hold a mapping from class names to numbers, and a name has another
    number in the other one.
Why it matters:
    The evaluation compares predictions with the wrong classes. Its accuracy says nothing.
How to fix it:
    Make the mapping once, from the sorted names of all classes, and give it to both.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Labelled(Dataset):
        def __init__(self, names, number=None):
            self.names = names
  -         self.number = {name: i for i, name in enumerate(sorted(set(names)))}
  +         self.number = {"cat": 0, "dog": 1, "owl": 2}

        def __len__(self):
            return len(self.names)

        def __getitem__(self, i):
            return torch.randn(4), self.number[self.names[i]]

    train = DataLoader(Labelled(["cat", "dog", "owl"] * 8), batch_size=8)
  - test = DataLoader(Labelled(["cat", "owl"] * 8), batch_size=8)  # <-
  + test = DataLoader(Labelled(["cat", "owl"] * 8), batch_size=8)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in train:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in test:
            model(x)
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule

MAX_DEPTH = 4  # of data sets in data sets


class ClassNumbersDiffer(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.numbers: WeakKeyDictionary[Any, dict[str, dict[str, int]]] = WeakKeyDictionary()

    def pass_begins(self, loader: Any) -> None:
        if loader not in self.numbers:
            self.numbers[loader] = mappings(loader.dataset)

    def findings(self) -> Findings:
        trained = [loader for loader in self.numbers if loader in self.program.training_loaders]
        for loader in self.numbers:
            for other in trained if loader not in trained else ():
                for name, numbers in self.numbers[loader].items():
                    others = self.numbers[other].get(name, {})
                    differ = [key for key in numbers if key in others and numbers[key] != others[key]]
                    if differ:
                        yield RULE.finding(
                            f"`{name}` gives {len(differ)} classes other numbers than in training: {differ[0]!r} is "
                            f"{numbers[differ[0]]} here and {others[differ[0]]} there",
                            self.program.line_of(loader),
                            "make the mapping once, and give it to both data sets",
                        )


def mappings(dataset: Any, depth: int = 0) -> dict[str, dict[str, int]]:
    """The attributes of a data set that map each of several names to a number of its own."""
    found = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        named = isinstance(value, dict) and len(value) > 1 and all(isinstance(key, str) for key in value)
        if named and all(type(n) is int for n in value.values()) and len({*value.values()}) == len(value):
            found[name] = dict(value)
    inner = getattr(dataset, "dataset", None)
    return found if inner is None or depth > MAX_DEPTH else {**mappings(inner, depth + 1), **found}


RULE = rule(ClassNumbersDiffer, "FL096", __doc__)
