"""A program of a public report.

fault: the targets are not shifted: each token is predicted from itself
link: https://github.com/Project-MONAI/GenerativeModels/issues/314
says: (?i)shift|itself|same token|next.token|target.{0,60}input|input.{0,60}target|label.{0,40}(leak|input)|leak|sees? (the|its) (answer|target|label)|copy|copies|identity
kind: correctness
"""
"""A causal transformer over the codes of a quantised image model, from which new code maps are sampled."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CODES, LENGTH = 24, 36


class DecoderTransformer(nn.Module):
    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(CODES + 1, width), nn.Embedding(LENGTH + 1, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, batch_first=True, norm_first=True) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, CODES)

    def forward(self, latent):
        length = latent.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        hidden = self.tokens(latent) + self.positions(torch.arange(length))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.output(self.norm(hidden))


def make_codes(count, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(CODES, CODES, generator=torch.Generator().manual_seed(0)).mul(2).softmax(1)
    codes = torch.randint(0, CODES, (count, 1), generator=generator)
    for _ in range(LENGTH - 1):
        codes = torch.cat((codes, torch.multinomial(table[codes[:, -1]], 1, generator=generator)), 1)
    return TensorDataset(codes)


def prepare(codes):
    start = torch.full((len(codes), 1), CODES)
    return torch.cat((start, codes), 1)


def ce(model, codes):
    latent = prepare(codes)
    logits = model(latent[:, 1:])  # ill!
    logits = model(latent[:, :-1])  # well
    return nn.functional.cross_entropy(logits.transpose(1, 2), latent[:, 1:])  # both!


@torch.no_grad()
def sample(model, count=4):
    latent = torch.full((count, 1), CODES)
    for _ in range(LENGTH):
        probs = model(latent)[:, -1].softmax(1)
        latent = torch.cat((latent, torch.multinomial(probs, 1)), 1)
    return latent[:, 1:]


if __name__ == "__main__":
    torch.manual_seed(0)
    train = DataLoader(make_codes(960, 1), batch_size=32, shuffle=True)
    val = DataLoader(make_codes(192, 2), batch_size=64)
    model = DecoderTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(5000):
        model.train()
        total = 0.0
        for (codes,) in train:
            optimizer.zero_grad(set_to_none=True)
            loss = ce(model, codes)
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            val_loss = sum(ce(model, codes).item() for (codes,) in val) / len(val)
        print(f"epoch {epoch} loss {total / len(train):.4f} val {val_loss:.4f} sample {sample(model)[0, :10].tolist()}", flush=True)
