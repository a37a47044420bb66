"""A program of a public report.

fault: The training noise is torch.rand_like (uniform in 0..1) where the diffusion model assumes standard normal noise.
link: https://github.com/acids-ircam/diffusion_models/issues/8
says: (?is)(noise|target|rand_like|torch\.rand|\be\b).{0,250}(uniform|normal|gaussian|randn|\[0, ?1|non-?negative|positive|mean (of )?(about )?0?\.5|never (below|negative)|zero[- ]mean|not cent(er|re)ed)|(uniform|rand_like|randn).{0,200}(noise|normal|gaussian|target)
kind: correctness
"""
"""Denoising diffusion on two dimensional points (swiss roll)."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


def swiss_roll(n, rng):
    t = 1.5 * np.pi * (1 + 2 * rng.uniform(size=n))
    x = np.stack([t * np.cos(t), t * np.sin(t)], axis=1) + 0.2 * rng.normal(size=(n, 2))
    return torch.tensor(x / 10.0, dtype=torch.float32)


n_steps = 100
betas = torch.sigmoid(torch.linspace(-6, 6, n_steps)) * (0.25 - 1e-4) + 1e-4
alphas = 1 - betas
alphas_prod = torch.cumprod(alphas, 0)
alphas_bar_sqrt = torch.sqrt(alphas_prod)
one_minus_alphas_bar_sqrt = torch.sqrt(1 - alphas_prod)


def extract(input, t, x):
    out = torch.gather(input, 0, t)
    return out.reshape(t.shape[0], *((1,) * (len(x.shape) - 1)))


class ConditionalLinear(nn.Module):
    def __init__(self, num_in, num_out, n_steps):
        super().__init__()
        self.num_out = num_out
        self.lin = nn.Linear(num_in, num_out)
        self.embed = nn.Embedding(n_steps, num_out)
        self.embed.weight.data.uniform_()

    def forward(self, x, y):
        return self.embed(y).view(-1, self.num_out) * self.lin(x)


class ConditionalModel(nn.Module):
    def __init__(self, n_steps, width=128):
        super().__init__()
        self.lin1 = ConditionalLinear(2, width, n_steps)
        self.lin2 = ConditionalLinear(width, width, n_steps)
        self.lin3 = ConditionalLinear(width, width, n_steps)
        self.lin4 = nn.Linear(width, 2)

    def forward(self, x, y):
        x = nn.functional.softplus(self.lin1(x, y))
        x = nn.functional.softplus(self.lin2(x, y))
        x = nn.functional.softplus(self.lin3(x, y))
        return self.lin4(x)


def noise_estimation_loss(model, x_0):  # both!
    batch_size = x_0.shape[0]
    t = torch.randint(0, n_steps, size=(batch_size // 2 + 1,))
    t = torch.cat([t, n_steps - t - 1], dim=0)[:batch_size].long()
    a = extract(alphas_bar_sqrt, t, x_0)
    am1 = extract(one_minus_alphas_bar_sqrt, t, x_0)
    e = torch.rand_like(x_0)  # ill!
    e = torch.randn_like(x_0)  # well
    x = x_0 * a + e * am1  # both!
    output = model(x, t)
    return (e - output).square().mean()  # both!


@torch.no_grad()
def p_sample_loop(model, shape):
    cur_x = torch.randn(shape)
    for i in reversed(range(n_steps)):
        t = torch.full((shape[0],), i)
        eps_factor = (1 - extract(alphas, t, cur_x)) / extract(one_minus_alphas_bar_sqrt, t, cur_x)
        mean = (1 / extract(alphas, t, cur_x).sqrt()) * (cur_x - eps_factor * model(cur_x, t))
        z = torch.randn_like(cur_x) if i > 0 else 0
        cur_x = mean + extract(betas, t, cur_x).sqrt() * z
    return cur_x


@torch.no_grad()
def sliced_wasserstein(a, b, n_proj=64):
    theta = torch.linspace(0, np.pi, n_proj)
    proj = torch.stack([theta.cos(), theta.sin()])
    return ((a @ proj).sort(0)[0] - (b @ proj).sort(0)[0]).abs().mean().item()


if __name__ == '__main__':
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    dataset, held_out = swiss_roll(6000, rng), swiss_roll(1000, rng)
    model = ConditionalModel(n_steps)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    batch_size = 128
    out = tempfile.mkdtemp()
    for epoch in range(30):
        model.train()
        permutation = torch.randperm(dataset.size(0))
        total = 0.
        for i in range(0, dataset.size(0), batch_size):
            batch_x = dataset[permutation[i:i + batch_size]]
            loss = noise_estimation_loss(model, batch_x)  # both!
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step()
            total += loss.item() * len(batch_x)
        if (epoch + 1) % 5 == 0:
            model.eval()
            samples = p_sample_loop(model, held_out.shape)
            print('epoch %d loss %.5f distance of the samples to held-out data %.4f (mean %s std %s)' % (
                epoch + 1, total / len(dataset), sliced_wasserstein(samples, held_out),
                samples.mean(0).numpy().round(3), samples.std(0).numpy().round(3)))
            torch.save(model.state_dict(), os.path.join(out, 'diffusion.pt'))
