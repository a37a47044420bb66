"""The data set's random generator is copied to every worker.

What:
    A data set creates a generator in `__init__` (`numpy.random.default_rng(0)`, `RandomState`,
    `random.Random`). It draws from it in `__getitem__`, and its loader has workers.
Why it matters:
    Each worker gets a copy of the data set with the generator in the same state. With four workers, every
    augmentation is drawn four times. Unless the workers persist, all of them restart from the same state in
    every epoch. PyTorch reseeds the global generators in each worker, but not a generator in an attribute.
How to fix it:
    Draw from the global generators (`torch.rand(())`, `numpy.random`), which differ in each worker. Or create
    the generator in the worker, seeded with `torch.initial_seed()`.
Example:
  - import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
  -     def __init__(self):
  -         self.rng = np.random.default_rng(0)  # <-
  -
        def __len__(self):
            return 100

        def __getitem__(self, index):
  -         return torch.zeros(4) + self.rng.random()
  +         return torch.zeros(4) + torch.rand(())

    loader = DataLoader(Noisy(), batch_size=8, num_workers=4)
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

GENERATORS = {
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.Generator",
    "random.Random",
    "torch.Generator",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    loaders = list(program.calls("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"))
    if not any(has_workers(call) for _, call in loaders) or program.mentions(
        "worker_init_fn", "get_worker_info"
    ):
        return
    for source, klass in program.datasets_defined():
        methods = {method.name: method for method in klass.body if isinstance(method, ast.FunctionDef)}
        if "__init__" not in methods or "__getitem__" not in methods:
            continue
        drawn = {
            node.attr
            for name, method in methods.items()
            if name != "__init__"
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute)
        }
        for node in ast.walk(methods["__init__"]):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and source.dotted(node.value.func) in GENERATORS
            ):
                target = node.targets[0]
                if isinstance(target, ast.Attribute) and target.attr in drawn:
                    yield RULE.finding(
                        f"`{source.code(target)}` is copied to every worker in the same state: all workers draw the same numbers",
                        source.place(node),
                        "torch.rand(())  # or numpy.random: seeded for each worker by PyTorch",
                    )


def has_workers(loader: ast.Call) -> bool:
    """Return whether a loader has workers; a number that the source does not show counts as yes."""
    workers = next(
        (k.value for k in loader.keywords if k.arg == "num_workers"),
        loader.args[5] if len(loader.args) > 5 else None,
    )
    return workers is not None and not (isinstance(workers, ast.Constant) and not workers.value)


RULE = Rule("FL014", "generator_copied_to_workers", Severity.WRONG, __doc__, check)
