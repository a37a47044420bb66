"""The same tutorial with common one-line optimisations, marked with (+).

They are TF32, cudnn.benchmark, channels_last, bf16 autocast, torch.compile, four persistent workers, pinned
memory and non-blocking copies. Batch, model and optimizer are the tutorial's.
"""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import models, transforms
from tutorial import MadeUpCIFAR10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--fast", metavar="MODE", default="default", help="mode of torch.compile")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()

    torch.set_float32_matmul_precision("high")  # (+)
    torch.backends.cudnn.benchmark = True  # (+)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ]
    )
    train_set = MadeUpCIFAR10(args.images, transform)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=4,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )  # (+)

    model = models.resnet18(num_classes=10).to(device, memory_format=torch.channels_last)  # (+)
    mode = {"mode": args.fast} if args.backend == "inductor" else {}
    model = torch.compile(model, backend=args.backend, **mode)  # (+)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    for epoch in range(args.epochs):
        model.train()
        running_loss, correct, total = 0.0, 0, 0
        for inputs, labels in train_loader:
            inputs = inputs.to(device, non_blocking=True, memory_format=torch.channels_last)  # (+)
            labels = labels.to(device, non_blocking=True)  # (+)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):  # (+)
                outputs = model(inputs)
                loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

            running_loss += loss.item()
            correct += (outputs.argmax(1) == labels).sum().item()
            total += labels.size(0)
        print(
            f"epoch {epoch + 1}: loss {running_loss / len(train_loader):.3f}, accuracy {100 * correct / total:.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
