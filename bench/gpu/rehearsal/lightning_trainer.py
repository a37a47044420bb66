"""A Lightning module with a validation loop, on one card."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        print(
            f"epoch {self.current_epoch}: {nn.functional.cross_entropy(self.net(batch[0]), batch[1]).item():.9f}",
            flush=True,
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    args = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 8)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=512))


if __name__ == "__main__":
    main()
