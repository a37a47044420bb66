"""A recommender over many items.

fault: a dense Adam update of the whole table in each step, for the few rows that a batch touches
codes: FL151
"""
import torch
from torch import nn

torch.manual_seed(0)
USERS, ITEMS = 40_000, 40_000


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 32)  # ill
        self.item = nn.Embedding(ITEMS, 32)  # ill
        self.user = nn.Embedding(USERS // 40, 32)  # well
        self.item = nn.Embedding(ITEMS // 40, 32)  # well
        self.head = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, users, items):
        return self.head(torch.cat([self.user(users), self.item(items)], dim=1)).squeeze(1)


model = Ratings()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # ill!
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # well
for step in range(100_000):
    users = torch.randint(model.user.num_embeddings, (512,))
    items = torch.randint(model.item.num_embeddings, (512,))
    stars = ((users + items) % 5).float()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(users, items), stars)
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
