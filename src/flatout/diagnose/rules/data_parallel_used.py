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

from collections.abc import Iterable

from flatout.diagnose.gains import event_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = event_of(profile, "data_parallel")
    if calls or (profile.settings.get("modules") or {}).get("DataParallel"):
        yield RULE.profile_finding("the model is called through DataParallel", places)


RULE = Rule(
    "FL115",
    "data_parallel_used",
    Severity.TIME,
    __doc__,
    check_profile=check_profile,
    weight=-1,
)
