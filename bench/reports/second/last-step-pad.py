"""A program of a public report.

fault: The classifier reads the LSTM output at the last time step of the padded batch, which is padding for each text shorter than the longest.
link: https://github.com/keitakurita/practical-torchtext/issues/5
says: (?is)(pad(ding|ded|s)?).{0,300}(last|final|\[-1\]|output|hidden|state|prediction|result|length|chang|depend|affect|influenc|LSTM|run over|read|pack)|(last|final|\[-1\]).{0,200}(time ?step|position|output|hidden|step|token).{0,200}(pad|length|shorter)|pack_padded|lengths?.{0,150}(ignored|not used|unused|never)
kind: correctness
"""
"""Toxic comment classifier with an LSTM encoder, in the manner of a torchtext tutorial."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = 1
VOCAB = 400


def make_comments(n, rng):
    comments = []
    for _ in range(n):
        length = int(np.clip(rng.geometric(0.06), 4, 70))
        words = rng.integers(20, VOCAB, length)
        label = int(rng.uniform() < 0.5)
        if label:
            for pos in rng.integers(0, length, 1 + length // 12):
                words[pos] = rng.integers(2, 12)
        comments.append((torch.tensor(words), float(label)))
    return comments


def batchify(examples):
    x = pad_sequence([words for words, _ in examples], padding_value=PAD)  # both!
    lengths = torch.tensor([len(words) for words, _ in examples])
    return x, lengths, torch.tensor([[label] for _, label in examples])


class SimpleBiLSTMBaseline(nn.Module):
    def __init__(self, hidden_dim, emb_dim=32, recurrent_dropout=0.1, num_linear=1):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, emb_dim, padding_idx=PAD)
        self.encoder = nn.LSTM(emb_dim, hidden_dim, num_layers=1)  # both!
        self.dropout = nn.Dropout(recurrent_dropout)
        self.linear_layers = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(num_linear - 1)])
        self.predictor = nn.Linear(hidden_dim, 1)

    def forward(self, seq, lengths):
        hdn, _ = self.encoder(self.embedding(seq))  # both!
        feature = hdn[-1, :, :]  # ill!
        feature = hdn[lengths - 1, torch.arange(seq.size(1)), :]  # well
        feature = self.dropout(feature)
        for layer in self.linear_layers:
            feature = torch.relu(layer(feature))
        preds = self.predictor(feature)
        return preds


def main():
    torch.manual_seed(7)
    rng = np.random.default_rng(7)
    train_dl = DataLoader(make_comments(2400, rng), batch_size=32, shuffle=True, collate_fn=batchify)
    valid_dl = DataLoader(make_comments(600, rng), batch_size=64, collate_fn=batchify)
    model = SimpleBiLSTMBaseline(64)
    opt = optim.Adam(model.parameters(), lr=3e-3)
    loss_func = nn.BCEWithLogitsLoss()
    path = os.path.join(tempfile.mkdtemp(), "model.pt")
    best = float("inf")
    for epoch in range(1, 6):
        running_loss = 0.0
        model.train()
        for x, lengths, y in train_dl:
            opt.zero_grad()
            preds = model(x, lengths)  # both!
            loss = loss_func(preds, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            running_loss += loss.item() * x.size(1)
        epoch_loss = running_loss / len(train_dl.dataset)

        val_loss, correct = 0.0, 0
        model.eval()
        with torch.no_grad():
            for x, lengths, y in valid_dl:
                preds = model(x, lengths)  # both!
                val_loss += loss_func(preds, y).item() * x.size(1)
                correct += ((preds > 0).float() == y).sum().item()
        val_loss /= len(valid_dl.dataset)
        print('Epoch: {}, Training Loss: {:.4f}, Validation Loss: {:.4f}, Validation Accuracy: {:.4f}'.format(
            epoch, epoch_loss, val_loss, correct / len(valid_dl.dataset)))
        if val_loss < best:
            best = val_loss
            torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main()
