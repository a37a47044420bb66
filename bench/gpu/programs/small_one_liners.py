"""The same network with common one-line optimisations for a launch-bound step.

They are torch.compile with CUDA graphs, a fused optimizer, TF32, pinned memory and non-blocking copies,
marked with (+). Batch, model and data are those of small.py.
"""

import torch
from small import arguments, network, table
from torch import nn
from torch.utils.data import DataLoader


def main():
    parser = arguments(__doc__)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # (+)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        table(args),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )  # (+)
    model = network(args).to(device)
    graphs = {"mode": "reduce-overhead"} if args.backend == "inductor" else {}
    compiled = torch.compile(model, backend=args.backend, **graphs)  # (+)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # (+)

    for epoch in range(args.epochs):
        running_loss = 0.0
        for inputs, targets in loader:
            inputs, targets = (
                inputs.to(device, non_blocking=True),
                targets.to(device, non_blocking=True),
            )  # (+)
            optimizer.zero_grad()
            loss = criterion(compiled(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            running_loss += loss.item()
        print(f"epoch {epoch + 1}: loss {running_loss / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
