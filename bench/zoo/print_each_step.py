"""A tiny language model over bytes.

fault: every step prints its loss and its predictions
codes: FL163 FL101
"""
import torch
from torch import nn

torch.manual_seed(0)
text = torch.randint(0, 96, (50_000,))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.rnn = nn.GRU(64, 96, batch_first=True)
        self.head = nn.Linear(96, 96)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(100_000):
    starts = torch.randint(len(text) - 17, (16, 1)) + torch.arange(17)
    batch = text[starts]
    optimizer.zero_grad()
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss}, predictions {logits.softmax(2)[:8, :8, :12]}")  # ill!
    if step % 100 == 0:  # well
        print(f"step {step}: loss {loss}")  # well
