"""The same GPT-2 with common one-line optimisations: TF32, bf16 autocast, fused AdamW, torch.compile.

Changed lines are marked with (+). Model, batch and data are those of gpt.py. Replacing the attention by
scaled_dot_product_attention is an edit of the model, not a one-liner.
"""

import torch
import torch.nn.functional as F
from gpt import GPT, Windows, arguments
from torch.utils.data import DataLoader


def main():
    parser = arguments()
    parser.add_argument("--fast", metavar="MODE", default="default", help="mode of torch.compile")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # (+)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Windows(args.tokens, args.context, args.vocabulary),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    model = GPT(args.vocabulary, args.context, args.width, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)  # (+)
    mode = {"mode": args.fast} if args.backend == "inductor" else {}
    model = torch.compile(model, backend=args.backend, **mode)  # (+)

    step = 0
    for _ in range(args.epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):  # (+)
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
