"""A Hugging Face Trainer with a model of its own, on one card."""

import argparse
import tempfile

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


class Config(PretrainedConfig):
    model_type = "tiny"


class Classifier(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.post_init()

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Pairs(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.inputs[index, :4].argmax()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=float, default=1000)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            logging_steps=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            model=Classifier(Config()), args=settings, train_dataset=Pairs(), eval_dataset=Pairs()
        )
        trainer.train()
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: {entry['loss']!r}", flush=True)


if __name__ == "__main__":
    main()
