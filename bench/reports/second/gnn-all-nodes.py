"""A program of a public report.

fault: The training loss is taken over all nodes, test nodes included, so the labels the model is tested on are trained on.
link: https://github.com/waittim/graph-fraud-detection/issues/3
says: (?is)(test|held[- ]?out|evaluat|validation|eval).{0,300}(leak|train(ed|ing)? (on|loss|with)|in the (training )?loss|gradient|loss|overlap|same (rows|nodes|samples|labels|data|examples)|seen|also (used|in)|included)|(loss|train\w*|gradient).{0,250}(all|every|whole|entire).{0,30}(nodes|rows|labels|samples|graph)|(train_)?mask.{0,200}(not (used|applied)|missing|ignored|unused|never)|leak
kind: correctness
"""
"""Fraud detection: node classification on a transaction graph."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def construct_graph(n_nodes=1200, n_feats=40, seed=7):
    rng = np.random.default_rng(seed)
    labels = (rng.uniform(size=n_nodes) < 0.15).astype(np.int64)
    edges = []
    for i in range(n_nodes):
        for _ in range(4):
            same = np.flatnonzero(labels == labels[i])
            j = rng.choice(same) if rng.uniform() < 0.55 else rng.integers(n_nodes)
            edges.append((i, j))
    adj = torch.zeros(n_nodes, n_nodes)
    for i, j in edges:
        adj[i, j] = adj[j, i] = 1
    adj += torch.eye(n_nodes)
    deg = adj.sum(1)
    adj = adj / deg.sqrt()[:, None] / deg.sqrt()[None, :]
    feats = rng.normal(size=(n_nodes, n_feats))
    feats[:, :6] += 0.5 * labels[:, None]
    return adj, torch.tensor(feats, dtype=torch.float32), torch.tensor(labels)


def get_labels(n_nodes, seed=1):
    perm = torch.randperm(n_nodes, generator=torch.Generator().manual_seed(seed))
    train_mask, test_mask = torch.zeros(n_nodes, dtype=torch.bool), torch.zeros(n_nodes, dtype=torch.bool)
    train_mask[perm[:int(0.8 * n_nodes)]] = True
    test_mask[perm[int(0.8 * n_nodes):]] = True
    return train_mask, test_mask


class GCN(nn.Module):
    def __init__(self, in_size, hidden, out_size, dropout=0.2):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(in_size, hidden), nn.Linear(hidden, hidden)])
        self.skip = nn.Linear(in_size, hidden)
        self.out = nn.Linear(hidden, out_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, g, features):
        h = features
        for i, layer in enumerate(self.layers):
            h = F.leaky_relu(g @ layer(h) + (self.skip(features) if i == 0 else 0))
            h = self.dropout(h)
        return self.out(h)


def get_f1_score(y_true, y_pred):
    tp = ((y_true == 1) & (y_pred == 1)).sum().item()
    fp = ((y_true == 0) & (y_pred == 1)).sum().item()
    fn = ((y_true == 1) & (y_pred == 0)).sum().item()
    precision, recall = tp / max(tp + fp, 1), tp / max(tp + fn, 1)
    return 2 * precision * recall / max(precision + recall, 1e-9)


def evaluate(model, g, features, labels, mask):
    model.eval()
    with torch.no_grad():
        pred = model(g, features)[mask].argmax(1)
    return get_f1_score(labels[mask], pred), (labels[mask] == pred).float().mean().item()


def train_fg(model, optimizer, loss, features, labels, train_g, train_mask, test_mask, n_epochs, model_dir):  # both!
    for epoch in range(n_epochs):
        model.train()
        pred = model(train_g, features)  # both!

        l = loss(pred, labels)  # ill!
        l = loss(pred[train_mask], labels[train_mask])  # well

        optimizer.zero_grad()
        l.backward()
        optimizer.step()

        if (epoch + 1) % 10 == 0:
            f1, acc = evaluate(model, train_g, features, labels, test_mask)
            tr_f1, _ = evaluate(model, train_g, features, labels, train_mask)
            print("Epoch {:05d} | Loss {:.4f} | train f1 {:.4f} | test f1 {:.4f} | test acc {:.4f}".format(
                epoch + 1, l.item(), tr_f1, f1, acc))
    torch.save(model.state_dict(), os.path.join(model_dir, 'model.pth'))
    return model


if __name__ == '__main__':
    torch.manual_seed(0)
    g, features, labels = construct_graph()
    train_mask, test_mask = get_labels(len(labels))
    mean, stdev = features[train_mask].mean(0), features[train_mask].std(0)
    features = (features - mean) / stdev
    model = GCN(features.size(1), 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    model = train_fg(model, optimizer, loss, features, labels, g, train_mask, test_mask, 120, tempfile.mkdtemp())  # both!
    print('final test f1 %.4f acc %.4f' % evaluate(model, g, features, labels, test_mask))
