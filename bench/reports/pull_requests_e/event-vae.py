"""A program of a public report.

fault: the KL term is summed over the whole tensor before the mask, so it is far too large
link: https://github.com/EDAPINENUT/GNTPP/issues/4
says: (?i)\bKL\b|kl_loss|dim(=|ension)|summed|scalar|broadcast|whole (tensor|batch)|posterior|collaps|mask|scale|dominat|latent
kind: correctness
"""
"""A variational decoder for the waiting times of event sequences of different lengths."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_sequences(count, seed, longest=24):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, longest + 1, (count,), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).float()
    rate = torch.rand(count, 1, generator=generator) * 2
    swing = torch.sin(torch.arange(longest) / 2 + 6 * torch.rand(count, 1, generator=generator))
    times = (rate + swing + 0.3 * torch.randn(count, longest, generator=generator)).exp()
    return TensorDataset(times * mask, mask)


class EventVAE(nn.Module):
    def __init__(self, width=48, latent=8):
        super().__init__()
        self.history = nn.GRU(1, width, batch_first=True)
        self.encoder = nn.Sequential(nn.Linear(width + 1, width), nn.ReLU())
        self.mean, self.log_var = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(width + latent, width), nn.ReLU(), nn.Linear(width, 1))
        self.latent = latent

    def embed(self, log_times):
        before = torch.cat((torch.zeros_like(log_times[:, :1]), log_times[:, :-1]), 1)
        return self.history(before[..., None])[0]

    def forward(self, times):
        log_times = (times + 1e-6).log().clamp(min=-4)
        history = self.embed(log_times)
        hidden = self.encoder(torch.cat((history, log_times[..., None]), -1))
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        decoded = self.decoder(torch.cat((history, z), -1))[..., 0]
        return decoded, log_times, mean, log_var

    def compute_loss(self, times, seq_onehots):
        decoded, log_times, mean, log_var = self(times)
        recon_loss = 10 * (decoded - log_times).pow(2) * seq_onehots
        kl_loss = (-0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())) * seq_onehots  # ill!
        kl_loss = (-0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), dim=-1)) * seq_onehots  # well
        events = seq_onehots.sum()
        return recon_loss.sum() / events, kl_loss.sum() / events  # both!

    @torch.no_grad()
    def predict(self, times, seq_onehots, samples=10):
        log_times = (times + 1e-6).log().clamp(min=-4)
        history = self.embed(log_times)[:, :, None].expand(-1, -1, samples, -1)
        z = torch.randn(*history.shape[:3], self.latent)
        guess = self.decoder(torch.cat((history, z), -1))[..., 0].mean(2)
        return ((guess - log_times).abs() * seq_onehots).sum() / seq_onehots.sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    train = DataLoader(make_sequences(960, 1), batch_size=32, shuffle=True)
    valid = DataLoader(make_sequences(192, 2), batch_size=64)
    model = EventVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10_000):
        model.train()
        sums = torch.zeros(2)
        for times, mask in train:
            recon, kl = model.compute_loss(times, mask)
            optimizer.zero_grad()
            (recon + kl).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
            sums += torch.tensor([recon.item(), kl.item()])
        model.eval()
        with torch.no_grad():
            losses = [torch.stack(model.compute_loss(times, mask)) for times, mask in valid]
            error = sum(model.predict(times, mask).item() for times, mask in valid) / len(valid)
        recon, kl = (sums / len(train)).tolist()
        print(f"epoch {epoch} recon {recon:.4f} kl {kl:.4f} valid {torch.stack(losses).mean(0).sum():.4f} mae {error:.4f}", flush=True)
