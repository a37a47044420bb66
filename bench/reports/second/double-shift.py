"""A program of a public report.

fault: The preprocessing shifts lm_labels by one although the LM head shifts logits and labels again, so each position learns the token two steps ahead.
link: https://github.com/huggingface/transformers/pull/562
says: (?is)shift.{0,250}(twice|again|double|two|second|both|already|off|model|inside|internal|extra)|(twice|double|two|already|off[- ]by).{0,150}shift|(two|2) (steps?|tokens?|positions?) (ahead|later|after|away|forward)|t ?\+ ?2|(label|target).{0,250}(skip|ahead|offset|misalign|not the next token|next[- ]next|off[- ]by[- ]one)
kind: correctness
"""
"""Fine-tune a small GPT language model on short passages, one per line."""
import math
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

MAX_LEN = 48


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj, self.h = nn.Linear(d, 3 * d), nn.Linear(d, d), h
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(D, dim=2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.ln_2(x))


class OpenAIGPTLMHeadModel(nn.Module):
    def __init__(self, vocab, d=64, n_layer=2, h=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(MAX_LEN, d)
        self.blocks = nn.Sequential(*[Block(d, h) for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, input_ids, lm_labels=None):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1)))
        lm_logits = self.lm_head(self.ln_f(self.blocks(x)))
        if lm_labels is None:
            return lm_logits
        shift_logits = lm_logits[..., :-1, :].contiguous()  # both!
        shift_labels = lm_labels[..., 1:].contiguous()  # both!
        loss_fct = nn.CrossEntropyLoss(ignore_index=-1)
        return loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))  # both!


def pre_process_datasets(stories, stoi):
    input_ids = np.zeros((len(stories), MAX_LEN), dtype=np.int64)
    lm_labels = np.full((len(stories), MAX_LEN), fill_value=-1, dtype=np.int64)
    for i, story in enumerate(stories):
        tokens = [stoi["_start_"]] + [stoi[c] for c in story[:MAX_LEN - 2]] + [stoi["_end_"]]
        input_ids[i, :len(tokens)] = tokens
        lm_labels[i, :len(tokens) - 1] = tokens[1:]  # ill!
        lm_labels[i, :len(tokens)] = tokens  # well
    return TensorDataset(torch.tensor(input_ids), torch.tensor(lm_labels))


def main():
    torch.manual_seed(42)
    text = open(os.environ["DATA"] + "/tinyshakespeare/input.txt").read()
    lines = [l for l in text.split("\n") if len(l) > 15][:3000]
    vocab = ["_pad_", "_start_", "_end_"] + sorted(set("".join(lines)))
    stoi = {c: i for i, c in enumerate(vocab)}
    train_data = pre_process_datasets(lines[:2560], stoi)
    eval_data = pre_process_datasets(lines[2560:], stoi)
    train_dataloader = DataLoader(train_data, sampler=RandomSampler(train_data), batch_size=32)
    eval_dataloader = DataLoader(eval_data, sampler=SequentialSampler(eval_data), batch_size=64)
    model = OpenAIGPTLMHeadModel(len(vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    output_dir = tempfile.mkdtemp()

    for epoch in range(3):
        model.train()
        tr_loss, nb_tr_steps = 0, 0
        for input_ids, lm_labels in train_dataloader:
            loss = model(input_ids, lm_labels)  # both!
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tr_loss += loss.item()
            nb_tr_steps += 1
        model.eval()
        with torch.no_grad():
            eval_loss = np.average([model(a, b).item() for a, b in eval_dataloader],
                                   weights=[(b != -1).sum().item() for a, b in eval_dataloader])
        print(f"epoch {epoch} train loss {tr_loss / nb_tr_steps:.4f} eval loss {eval_loss:.4f} "
              f"ppl {math.exp(eval_loss):.2f}")
        torch.save(model.state_dict(), os.path.join(output_dir, "pytorch_model.bin"))

    ids = torch.tensor([[stoi["_start_"]] + [stoi[c] for c in "The "]])
    with torch.no_grad():
        while ids.size(1) < 40:
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    print("sample:", "".join(vocab[i] for i in ids[0].tolist()))


if __name__ == "__main__":
    main()
