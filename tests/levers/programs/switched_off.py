"""The same choices, each switched off by a flag; half precision in an evaluation only; loaders that live as
long as their epoch.

The last layer is called by itself and is as wide as a vocabulary. Anomaly detection is a context around the
forward and backward pass.
"""

import torch

torch.manual_seed(0)
classes = 8192
body = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 16)
)
head = torch.nn.Linear(16, classes)
body.compile(disable=True)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
scaler = torch.amp.GradScaler("cpu", enabled=False)
images = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(classes, (64,)))
with torch.autocast("cpu", torch.bfloat16):
    head.eval()(body.eval()(images.tensors[0][:2]))
body.train(), head.train()
while True:
    for x, y in torch.utils.data.DataLoader(images, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        with torch.autograd.detect_anomaly(), torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = torch.nn.functional.cross_entropy(head(body(x)), y)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
