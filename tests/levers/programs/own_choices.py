"""A script that makes the choices of many levers itself: precision, compiler, layout, threads, garbage
collection, form of the optimizer, a process group.
"""

import gc

import torch

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
torch.set_num_threads(3)
torch.backends.mkldnn.matmul.fp32_precision = "ieee"
gc.disable()
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3),
    torch.nn.ReLU(),
    torch.nn.Conv2d(4, 4, 3),
    torch.nn.Flatten(),
    torch.nn.Linear(64, 5),
)
model[0].to(memory_format=torch.channels_last)
model.compile(backend="eager")
optimizer = torch.optim.Adam(model.parameters(), fused=True)
batches = torch.distributions.Normal(torch.zeros(8, 3, 8, 8), 1.0, validate_args=False)
torch.distributions.Distribution.set_default_validate_args(False)
while True:
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(batches.sample()), torch.randint(5, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
