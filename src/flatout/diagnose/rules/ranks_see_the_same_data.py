"""Every rank uses the whole data set.

What:
    The model is wrapped in `DistributedDataParallel`, but the loader of the training loop has no distributed
    sampler.
Why it matters:
    All ranks train on all of the data: in every epoch, N devices do N times the work of one. With equal seeds
    they even get the same batches, and the averaged gradient is that of one device.
How to fix it:
    Use `sampler=DistributedSampler(dataset)` instead of `shuffle=True`, and call `sampler.set_epoch(epoch)`
    in every epoch.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
  + from torch.utils.data.distributed import DistributedSampler

    torch.distributed.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 4))
  - loader = DataLoader(data, batch_size=8, shuffle=True)  # <-
  + loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.value_paths import iterated
from flatout.schema.findings import Finding, Severity

WRAPPED = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
SHARDS = (
    "IterableDataset",
    "split_dataset_by_node",
    "random_split",
    "Subset",
    "scatter",
    "shard",
    "Accelerator",
    "Fabric",
)


def check(program: ScriptProgram) -> Iterator[Finding]:
    if not any(program.calls(*WRAPPED)) or program.mentions(*SHARDS):
        return
    for loop in program.step_loops:
        if not isinstance(loop.loop.node, ast.For):
            continue
        model = any(
            isinstance(event.node, ast.Call)
            and any(origin.dotted in WRAPPED for origin in program.origins(event.source, event.node.func))
            for event in loop.of("call")
        )
        for origin in program.origins(loop.source, iterated(loop.loop.node.iter)) if model else ():
            call = origin.node
            if not isinstance(call, ast.Call) or not origin.dotted.endswith(".DataLoader"):
                continue
            if {None, "sampler", "batch_sampler"} & {k.arg for k in call.keywords}:
                continue
            handed = (
                call.args[0]
                if call.args
                else next((k.value for k in call.keywords if k.arg == "dataset"), None)
            )
            data = program.origins(origin.source, handed) if handed is not None else []
            if (
                data
                and all(
                    isinstance(each.node, ast.Call) and "rank" not in ast.unparse(each.node) for each in data
                )
                and len(call.args) < 4
            ):
                yield RULE.finding(
                    "the model is distributed, but this loader gives every rank the whole data set",
                    origin.source.place(call),
                    "sampler=torch.utils.data.distributed.DistributedSampler(dataset)  # instead of shuffle=True",
                )


RULE = Rule("FL035", "ranks_see_the_same_data", Severity.WRONG, __doc__, check)
