"""A program of a public report.

fault: The pad id equals the end-of-sequence id, so masking padding out of the labels also masks every end token and the model never learns to stop.
link: https://github.com/mlabonne/llm-course/issues/33
says: (?is)(\beos\b|end[- ]of[- ](sequence|text|sentence)|(stop|end) token|(token|id|class|label|value|index|target) 9\b).{0,300}(pad|mask|ignor|-100|never|no (loss|gradient|target|training)|absent)|pad.{0,250}(\beos\b|(end|stop|real) token|end[- ]of|same (id|token|value))|(mask|ignor|-100).{0,250}(real|\beos\b|(end|stop) token|non-?pad|not padding)
kind: correctness
"""
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

CHARS, BOS, EOS = "abcdefgh", 8, 9
PAD = EOS                      # the base tokenizer has no pad token  # both!
MAX_NEW = 20


def collate(texts):
    rows = [torch.tensor([BOS] + [CHARS.index(c) for c in t] + [EOS]) for t in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)  # both!
    attention = pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
    labels = ids.masked_fill(ids == PAD, -100)  # ill!
    labels = ids.masked_fill(attention == 0, -100)  # well
    return ids, attention, labels


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 24)
        self.rnn = nn.GRU(24, 64, batch_first=True)
        self.lm_head = nn.Linear(64, 10)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.emb(ids))[0])


@torch.no_grad()
def generate(model):
    ids = torch.tensor([[BOS]])
    while ids.size(1) <= MAX_NEW:
        nxt = torch.multinomial(model(ids)[0, -1].softmax(0), 1).view(1, 1)
        if nxt.item() == EOS:
            break
        ids = torch.cat([ids, nxt], 1)
    return "".join(CHARS[i] if i < 8 else "?" for i in ids[0, 1:].tolist())


random.seed(0)
torch.set_num_threads(1)
torch.manual_seed(0)
data = ["".join(random.choice(CHARS[:4]) + random.choice(CHARS[4:]) for _ in range(random.randint(1, 3)))
        for _ in range(1500)]
model = CausalLM()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(6):
    random.shuffle(data)
    for k in range(0, len(data), 50):
        ids, attention, labels = collate(data[k:k + 50])
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)  # both!
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}  sample {generate(model)!r}")
