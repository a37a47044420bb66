"""A small ResNet of timm on its synthetic images, in a loop of timm's loader, optimizer and schedule."""

import timm
import torch
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, random_seed
from torchvision.datasets import FakeData

EPOCHS = 2000


def main():
    random_seed(0)
    model = timm.create_model("resnet10t", num_classes=10)
    average = ModelEmaV3(model, decay=0.99)
    loader = create_loader(
        FakeData(256, (3, 40, 40), 10),
        input_size=(3, 32, 32),
        batch_size=16,
        is_training=True,
        num_workers=0,
        auto_augment="rand-m5",
        device=torch.device("cpu"),
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=5)
    loss_fn = LabelSmoothingCrossEntropy(0.1)
    updates = 0
    for epoch in range(EPOCHS):
        losses = AverageMeter()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            updates += 1
            average.update(model, step=updates)
            scheduler.step_update(updates)
            losses.update(loss.item(), len(inputs))
        scheduler.step(epoch + 1)
        print(f"epoch {epoch} loss {losses.avg:.6f}", flush=True)


if __name__ == "__main__":
    main()
