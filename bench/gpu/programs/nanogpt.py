"""A GPT-2 124M that is already tuned, as nanoGPT trains it: bfloat16, fused attention and AdamW, TF32, compile.

``--fast MODE``: another mode of torch.compile; ``none`` does not compile.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from gpt import arguments


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.project = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention(self.norm1(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = arguments()
    parser.set_defaults(batch_size=12, vocabulary=50304)
    parser.add_argument("--fast", metavar="MODE", default="default")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(0, args.vocabulary, (args.tokens,))
    model = GPT(args.vocabulary, args.context, args.width, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    if args.fast != "none":
        mode = {"mode": args.fast} if args.backend == "inductor" else {}
        model = torch.compile(model, backend=args.backend, **mode)

    def get_batch():
        at = torch.randint(len(tokens) - args.context - 1, (args.batch_size,))
        batch = [torch.stack([tokens[i + shift : i + shift + args.context] for i in at]) for shift in (0, 1)]
        return [
            part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part
            for part in batch
        ]

    x, y = get_batch()
    for step in range(args.epochs * 1000):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x, y)
        x, y = get_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
