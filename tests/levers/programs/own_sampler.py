"""A custom sampler over a map-style data set, hand-written attention, one complex and two float64 parameters,
and an Adam that maximizes.
"""

import torch


class Backwards(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(63, -1, -1))

    def __len__(self):
        return 64


class Body(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.softmax(x @ x.t(), -1) @ x


torch.manual_seed(0)
body, head = Body(8, 8), torch.nn.Linear(8, 1).double()
scale = torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters(), scale], maximize=True)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8, sampler=Backwards()
)
while True:
    for (x,) in loader:
        optimizer.zero_grad()
        (-(head(torch.tanh(body(x)).double()) * scale.abs()).square().mean()).backward()
        optimizer.step()
