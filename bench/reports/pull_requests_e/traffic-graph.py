"""A program of a public report.

fault: the adaptive adjacency matrix is computed again in each layer of a forward pass
link: https://github.com/nnzhan/Graph-WaveNet/pull/1
says: (?i)re-?comput|repeat|again|same (result|value|tensor|matrix|inputs?)|identical|hoist|loop.invariant|(comput|calculat).{0,60}(once|each layer|every layer|times)|softmax.{0,60}(times|same)|6 times
kind: performance
"""
"""Forecasts of traffic speed at many sensors: dilated convolutions in time, diffusion over a learnt graph."""
import time

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, c_in, c_out, dropout, support_len, order=2):
        super().__init__()
        self.mlp = nn.Conv2d((order * support_len + 1) * c_in, c_out, 1)
        self.dropout, self.order = dropout, order

    def forward(self, x, support):
        out = [x]
        for a in support:
            x1 = torch.einsum("ncvl,vw->ncwl", x, a).contiguous()
            out.append(x1)
            for _ in range(2, self.order + 1):
                x1 = torch.einsum("ncvl,vw->ncwl", x1, a).contiguous()
                out.append(x1)
        return F.dropout(self.mlp(torch.cat(out, 1)), self.dropout, training=self.training)


class WaveNet(nn.Module):
    def __init__(self, num_nodes, supports, in_dim=2, out_dim=4, channels=4, blocks=3, layers=2, dropout=0.3):
        super().__init__()
        self.supports = supports
        self.start = nn.Conv2d(in_dim, channels, 1)
        self.nodevec1 = nn.Parameter(torch.randn(num_nodes, 10))
        self.nodevec2 = nn.Parameter(torch.randn(10, num_nodes))
        self.filters, self.gates, self.skips = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.norms, self.gconv = nn.ModuleList(), nn.ModuleList()
        for _ in range(blocks):
            for layer in range(layers):
                self.filters.append(nn.Conv2d(channels, channels, (1, 2), dilation=2 ** layer))
                self.gates.append(nn.Conv2d(channels, channels, (1, 2), dilation=2 ** layer))
                self.skips.append(nn.Conv2d(channels, 32, 1))
                self.norms.append(nn.BatchNorm2d(channels))
                self.gconv.append(GraphConv(channels, channels, dropout, len(supports) + 1))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv2d(32, 64, 1), nn.ReLU(), nn.Conv2d(64, out_dim, 1))

    def forward(self, inputs):
        x = self.start(inputs)
        skip = 0
        adp = F.softmax(F.relu(torch.mm(self.nodevec1, self.nodevec2)), dim=1)  # well
        for i in range(len(self.filters)):  # both!
            residual = x
            x = torch.tanh(self.filters[i](residual)) * torch.sigmoid(self.gates[i](residual))
            s = self.skips[i](x)
            skip = s + (skip[..., -s.shape[3]:] if i else 0)
            adp = F.softmax(F.relu(torch.mm(self.nodevec1, self.nodevec2)), dim=1)  # ill!
            x = self.gconv[i](x, self.supports + [adp])
            x = self.norms[i](x + residual[..., -x.shape[3]:])
        return self.end(skip)[..., -1]


def make_series(nodes, steps):
    phase = torch.rand(nodes) * 6.28
    clock = torch.arange(steps)[:, None] / 20
    speed = torch.sin(clock + phase) + 0.3 * torch.randn(steps, nodes)
    return torch.stack((speed, (clock % 1).expand(-1, nodes)), 0)


def windows(series, starts):
    x = torch.stack([series[:, s:s + 10].transpose(1, 2) for s in starts])
    y = torch.stack([series[0, s + 10:s + 14] for s in starts])
    return x, y


if __name__ == "__main__":
    torch.manual_seed(0)
    nodes, batch_size = 700, 2
    series = make_series(nodes, 400)
    near = (torch.rand(nodes, nodes) < 0.01).float() + torch.eye(nodes)
    model = WaveNet(nodes, [near / near.sum(1, keepdim=True)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for epoch in range(1000):
        begin, total = time.time(), 0.0
        model.train()
        order = torch.randperm(16)
        for starts in order.split(batch_size):
            x, y = windows(series, starts.tolist())
            optimizer.zero_grad()
            loss = (model(x) - y).abs().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            errors = [(model(x) - y).abs().mean() for x, y in (windows(series, s.tolist()) for s in torch.arange(320, 340).split(4))]
        print(f"epoch {epoch} mae {total / 8:.4f} valid {torch.stack(errors).mean():.4f} {time.time() - begin:.1f}s", flush=True)
