"""An IterableDataset that makes whole batches, a scripted network, a last layer with the script's own hook,
and SGD over a sparse embedding.
"""

import torch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8, 3, 8, 8), torch.randint(8192, (8,))


torch.manual_seed(0)
body = torch.jit.script(
    torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 16)
    )
)
head = torch.nn.Linear(16, 8192)
head.register_forward_hook(lambda module, args, output: None)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
for x, y in torch.utils.data.DataLoader(Stream(), batch_size=None):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(head(body(x)), y).backward()
    optimizer.step()
