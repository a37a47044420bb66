"""A program of a public report.

fault: The boolean upper-triangular mask is given to scaled_dot_product_attention, where True means attend, so each token sees only the future.
link: https://github.com/rasbt/LLMs-from-scratch/issues/1061
says: (?is)mask.{0,250}(invert|opposite|flip|revers|future|polarity|wrong way|true (means|marks|keeps|allows)|~mask|later)|(future|later (token|position)|look[- ]?ahead|next token|non-?causal|not causal|leak).{0,250}(attend|sees?|mask|token|position|output|logit|predict)
kind: correctness
"""
import torch
from torch import nn
import torch.nn.functional as F

VOCAB, T, DIM, HEADS = 12, 24, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.register_buffer("mask", torch.triu(torch.ones(T, T), diagonal=1).bool())  # both!

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:n, :n])  # ill!
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=~self.mask[:n, :n])  # well
        return self.out(y.transpose(1, 2).reshape(b, n, DIM))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(T, DIM)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        x = x + self.attn(self.norm1(x))
        return self.head(x + self.mlp(self.norm2(x)))


torch.set_num_threads(1)
torch.manual_seed(0)
table = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB), dim=1)   # a token follows the one before last
seq = torch.randint(0, VOCAB, (1500, 2))
for _ in range(T - 1):
    seq = torch.cat([seq, torch.multinomial(table[seq[:, -2]], 1)], dim=1)
model = GPT()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(6):
    for idx in torch.randperm(1200).split(40):
        batch = seq[idx]
        logits = model(batch[:, :-1])  # both!
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))  # both!
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():   # text generation only ever has the past: predict the token after 10
        nxt = F.cross_entropy(model(seq[1200:, :10])[:, -1], seq[1200:, 10]).item()
    print(f"epoch {epoch}: train loss {loss.item():.3f}  next-token loss {nxt:.3f}")
