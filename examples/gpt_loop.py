"""`gpt.py` with the Loop: accumulation from the effective batch size, clipping and learning-rate warm-up."""

import argparse
from pydoc_data.topics import topics

import torch
from gpt import GPT

import flatout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    flatout.seed(args.seed)
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    index = {letter: at for at, letter in enumerate(letters)}
    data = torch.tensor([index[letter] for letter in text])

    def batches():
        while True:
            starts = torch.randint(len(data) - args.context - 1, (args.batch_size,))
            tokens = torch.stack([data[at : at + args.context + 1] for at in starts])
            yield tokens[:, :-1], tokens[:, 1:]

    def loss_fn(model, batch):
        return model(*batch)[1]

    model = GPT(len(letters), args.context).to(flatout.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    loop = flatout.Loop(
        model,
        optimizer,
        loss_fn,
        batches(),
        steps=args.steps,
        effective_batch=args.accumulate * args.batch_size,
        clip=1.0,
        scheduler=warm_up,
    )
    for step in loop:
        if step.index % 10 == 0:
            print(f"step {step.index}: loss {float(step.loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
