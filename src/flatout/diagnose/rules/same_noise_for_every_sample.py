"""A data set draws the same random numbers for every sample.

What:
    `__getitem__` creates a generator from a seed that does not depend on the index, or sets a global seed, and
    then draws from it.
Why it matters:
    Every sample gets the same noise, crop or mask, in every epoch. The augmentation adds a constant, and the
    model learns it. If the seed is set globally, dropout and shuffling in this process repeat as well.
How to fix it:
    Draw from torch's global generator, which the loader seeds for each worker and epoch. For a fixed value per
    sample, put the index into the seed.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __init__(self):
            self.x = torch.randn(64, 4)

        def __len__(self):
            return 64

        def __getitem__(self, index):
  -         generator = torch.Generator().manual_seed(0)  # <-
  +         generator = torch.Generator().manual_seed(index)
            return self.x[index] + torch.randn(4, generator=generator)

    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.seed_in_the_loop import SEEDS
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

SEEDED = {"numpy.random.default_rng", "numpy.random.RandomState", "random.Random"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, klass in program.datasets_defined():
        for method in klass.body:
            if not isinstance(method, FUNCTIONS) or method.name != "__getitem__":
                continue
            for call in (node for node in ast.walk(method) if isinstance(node, ast.Call)):
                if _seeds(source, call) and call.args and _constant(call.args[0]):
                    yield RULE.finding(
                        f"`{source.code(call)}` seeds every sample alike: all get the same random numbers",
                        source.place(call),
                        "torch.rand(())  # the loader seeds torch's generator for each worker and epoch",
                    )


def _seeds(source: SourceFile, call: ast.Call) -> bool:
    """Whether a call sets a seed: of a new generator, or of a global one."""
    if source.dotted(call.func) in SEEDED | set(SEEDS):
        return True
    made = (
        call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "manual_seed" else None
    )
    return isinstance(made, ast.Call) and source.dotted(made.func) == "torch.Generator"


def _constant(seed: ast.expr) -> bool:
    """Whether a seed is a number, or an attribute of the data set: no part of it can be the index."""
    return all(
        isinstance(node, (ast.Constant, ast.BinOp, ast.operator, ast.Attribute, ast.expr_context))
        or (isinstance(node, ast.Name) and node.id == "self")
        for node in ast.walk(seed)
    )


RULE = Rule("FL036", "same_noise_for_every_sample", Severity.WRONG, __doc__, check)
