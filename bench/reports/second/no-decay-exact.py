"""A program of a public report.

fault: Full parameter names are looked up for equality in the no_decay list ('n in no_decay'), which never matches: the no-decay group is empty and biases and LayerNorms are decayed.
link: https://github.com/namisan/mt-dnn/pull/37
says: (?is)(weight[- _]?decay|no_decay|decay|param(eter)?[- _]?group|group).{0,300}(empty|no parameters?|0 parameters|zero parameters|none|bias|norm|1-?d|every|all|substring|exact|match|nothing)|(bias|norm).{0,200}(decay)
kind: correctness
"""
"""Multi-task text model: one shared encoder, one head for each task, batches of the tasks interleaved."""
import os
import random
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, h, batch_first=True)
        self.attention_LayerNorm = nn.LayerNorm(d)
        self.intermediate, self.output = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.LayerNorm = nn.LayerNorm(d)

    def forward(self, x, pad):
        x = self.attention_LayerNorm(x + self.attention(x, x, x, key_padding_mask=pad, need_weights=False)[0])
        return self.LayerNorm(x + self.output(F.gelu(self.intermediate(x))))


class SANBertNetwork(nn.Module):
    def __init__(self, vocab, n_labels, d=48, h=4, n_layers=2, max_len=24):
        super().__init__()
        self.embeddings, self.position = nn.Embedding(vocab, d, padding_idx=0), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList([Layer(d, h) for _ in range(n_layers)])
        self.dropout = nn.Dropout(0.1)
        self.scoring_list = nn.ModuleList([nn.Linear(d, n) for n in n_labels])

    def forward(self, input_ids, task_id):
        pad = input_ids == 0
        x = self.embeddings(input_ids) + self.position(torch.arange(input_ids.size(1)))
        for layer in self.layers:
            x = layer(x, pad)
        keep = (~pad).unsqueeze(-1).float()
        pooled = (x * keep).sum(1) / keep.sum(1)
        return self.scoring_list[task_id](self.dropout(pooled))


class MTDNNModel(object):
    def __init__(self, opt, vocab, n_labels):
        self.config = opt
        self.updates = 0
        self.network = SANBertNetwork(vocab, n_labels)
        no_decay = ['bias', 'gamma', 'beta', 'LayerNorm.bias', 'LayerNorm.weight']  # both!
        optimizer_parameters = [  # both!
            {'params': [p for n, p in self.network.named_parameters() if n not in no_decay],  # ill!
            {'params': [p for n, p in self.network.named_parameters() if not any(nd in n for nd in no_decay)],  # well
             'weight_decay': opt['weight_decay']},  # both!
            {'params': [p for n, p in self.network.named_parameters() if n in no_decay],  # ill!
            {'params': [p for n, p in self.network.named_parameters() if any(nd in n for nd in no_decay)],  # well
             'weight_decay': 0.0},  # both!
        ]
        self.optimizer = torch.optim.AdamW(optimizer_parameters, lr=opt['learning_rate'])  # both!

    def update(self, task_id, x, y):
        self.network.train()
        loss = F.cross_entropy(self.network(x, task_id), y)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config['global_grad_clipping'])
        self.optimizer.step()
        self.updates += 1
        return loss.item()

    def predict(self, task_id, x):
        self.network.eval()
        with torch.no_grad():
            return self.network(x, task_id).argmax(1)

    def save(self, filename):
        torch.save({'state': self.network.state_dict(), 'optimizer': self.optimizer.state_dict(),
                    'config': self.config}, filename)


def make_task(task_id, n, vocab, rng):
    x = np.zeros((n, 24), dtype=np.int64)
    y = np.zeros(n, dtype=np.int64)
    for i in range(n):
        length = rng.integers(8, 25)
        x[i, :length] = rng.integers(1, vocab, length)
        y[i] = rng.integers(0, 3 if task_id else 2)
        marks = 10 + 20 * task_id + 5 * y[i] + rng.integers(0, 5, 3)
        x[i, rng.choice(length, 3, replace=False)] = marks
    return torch.from_numpy(x), torch.from_numpy(y)


def main():
    torch.manual_seed(2018)
    random.seed(2018)
    rng = np.random.default_rng(2018)
    vocab, n_labels, batch_size = 300, [2, 3], 32
    train = [make_task(t, 1600, vocab, rng) for t in range(2)]
    dev = [make_task(t, 400, vocab, rng) for t in range(2)]
    opt = {'learning_rate': 1e-3, 'weight_decay': 0.1, 'global_grad_clipping': 1.0}
    model = MTDNNModel(opt, vocab, n_labels)
    output_dir = tempfile.mkdtemp()
    for epoch in range(5):
        batches = [(t, b) for t in range(2) for b in torch.randperm(1600).split(batch_size)]
        random.shuffle(batches)
        total = [0., 0.]
        for t, b in batches:
            total[t] += model.update(t, train[t][0][b], train[t][1][b])
        for t in range(2):
            acc = (model.predict(t, dev[t][0]) == dev[t][1]).float().mean().item()
            print('Task {} -- epoch {} -- train loss {:.4f} -- Dev ACC: {:.4f}'.format(t, epoch, total[t] / 50, acc))
        model.save(os.path.join(output_dir, 'model_{}.pt'.format(epoch)))


if __name__ == '__main__':
    main()
