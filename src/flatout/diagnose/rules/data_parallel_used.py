"""DataParallel is used instead of DistributedDataParallel.

What:
    The model is wrapped in `torch.nn.DataParallel`, and the program does not use `DistributedDataParallel`.
Why it matters:
    One Python process drives all devices. In every step, it copies the weights to each device, splits the
    batch, and collects outputs and gradients on the first device. The first device also needs the most
    memory. DistributedDataParallel has one process per device, and averages the gradients during the backward
    pass.
How to fix it:
    Use `DistributedDataParallel`, and start the program with `torchrun --nproc-per-node N`. The tutorial
    shows the few lines to change.
Example:
    import torch

  - model = torch.nn.DataParallel(torch.nn.Linear(4, 1))  # <-
  + torch.distributed.init_process_group("nccl")
  + model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda())
Sources:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-nn-ddp-instead;
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import event_of
from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS, is_main_guard
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

NAMES = (
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.data_parallel",
    "torch.nn.parallel.data_parallel.DataParallel",
)


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions("DistributedDataParallel", "DDP", "FSDP", "FullyShardedDataParallel", "fully_shard"):
        return  # the program leaves the choice to the user
    for source, call in program.calls(*NAMES):
        yield RULE.finding(
            "DataParallel copies the model to every device in every step, from one Python process",
            source.place(call),
            "torch.nn.parallel.DistributedDataParallel(model)  # and: torchrun --nproc-per-node N script.py",
            weight=1 if program.step_loops and _of_several_devices(source, call) else RULE.weight,
        )


def _of_several_devices(source: SourceFile, call: ast.Call) -> bool:
    """Return whether the model is always wrapped, for devices that are named and are not just one."""
    named = [k.value for k in call.keywords if k.arg == "device_ids"]
    given = next(iter([*named, *call.args[1:2]]), None)
    if given is None or isinstance(given, ast.Constant):
        return False
    if isinstance(given, (ast.List, ast.Tuple)) and len(given.elts) < 2:
        return False
    for around in source.parents(call):
        if isinstance(around, FUNCTIONS):
            break
        if isinstance(around, ast.IfExp) or (isinstance(around, ast.If) and not is_main_guard(around)):
            return False
    return True


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = event_of(profile, "data_parallel")
    if calls or (profile.settings.get("modules") or {}).get("DataParallel"):
        yield RULE.profile_finding("the model is called through DataParallel", places)


RULE = Rule(
    "FL115",
    "data_parallel_used",
    Severity.TIME,
    __doc__,
    check_source,
    check_profile,
    weight=-1,
)
