"""A fixed seed is set inside the loader.

What:
    `__getitem__` or a `worker_init_fn` seeds a random generator with a constant.
Why it matters:
    In `__getitem__`, every sample draws the same "random" augmentation. In `worker_init_fn`, all workers draw
    the same numbers, and draw them again in every epoch. (By default, PyTorch gives each worker separate
    seeds for torch, random and NumPy, new in every epoch.)
How to fix it:
    Remove the line, or derive the seed from `torch.initial_seed()`, which differs between workers and epochs.
Example:
    import random

    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return torch.randn(4) * random.random()

    def seed_worker(worker):
  -     random.seed(0)  # <-
  +     random.seed(torch.initial_seed() % 2**32)

    loader = DataLoader(Noisy(), batch_size=8, num_workers=2, worker_init_fn=seed_worker)
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader;
    torch/utils/data/_utils/worker.py seeds NumPy too
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

SEEDS = ("random.seed", "numpy.random.seed", "torch.manual_seed", "torch.random.manual_seed")


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, function, where in _in_workers(program):
        own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if source.dotted(call.func) in SEEDS and call.args and _fixed(source, call.args[0], own):
                yield RULE.finding(
                    f"`{source.code(call)}` seeds with the same number {where}",
                    source.place(call),
                    f"{source.code(call.func)}(torch.initial_seed() % 2**32)",
                )


def _in_workers(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.AST, str]]:
    for source, klass in program.datasets_defined():
        for method in klass.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__getitem__":
                yield source, method, "for every sample"
    for source, call in program.calls(
        "torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"
    ):
        for keyword in call.keywords:
            if keyword.arg == "worker_init_fn":
                if isinstance(keyword.value, ast.Lambda):
                    yield source, keyword.value, "in every worker and every epoch"
                for home, function in program.definitions(source, keyword.value):
                    yield home, function, "in every worker and every epoch"


def _fixed(source: SourceFile, seed: ast.expr, own: set[str]) -> bool:
    """Return whether a seed is a number, or a name of the module or options: no local name, no call."""
    if any(isinstance(node, ast.Call) for node in ast.walk(seed)):
        return False
    return all(_outer(source, name, own) for name in ast.walk(seed) if isinstance(name, ast.Name))


def _outer(source: SourceFile, name: ast.Name, own: set[str]) -> bool:
    """Return whether a name is set outside the function, to a literal or an import."""
    bindings = source.names.lookup(name)
    if name.id in own or name.id == "self" or not bindings or name.id in source.names.at[id(name)].names:
        return False
    return all(
        binding.how in ("assign", "import") and not isinstance(binding.value, ast.Call)
        for binding in bindings
    )


RULE = Rule("FL013", "same_seed_in_workers", Severity.WRONG, __doc__, check)
