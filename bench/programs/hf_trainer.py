"""A small GPT of the transformers library on bytes of a text, trained by its Trainer.

Usage: ``hf_trainer.py --data FOLDER [--seed N] [--steps N]``. FOLDER has ``train.txt`` and ``valid.txt``. The
model comes from a config and a byte is a token, so nothing is downloaded. The Trainer prints the evaluation's
loss every ``--every`` steps.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

EVALUATED_BLOCKS = 64


class Blocks(Dataset):
    """Pieces of ``length`` bytes of a file, as token ids of shape (length,); at most ``most`` of them."""

    def __init__(self, path, length, most=None):
        raw = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        self.blocks = raw[: len(raw) // length * length].view(-1, length)[:most]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, at):
        tokens = self.blocks[at].long()
        return {"input_ids": tokens, "labels": tokens}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            seed=args.seed,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=EVALUATED_BLOCKS,
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=args.every,
            logging_steps=args.every,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            GPT2LMHeadModel(config),
            options,
            train_dataset=Blocks(args.data / "train.txt", args.length),
            eval_dataset=Blocks(args.data / "valid.txt", args.length, EVALUATED_BLOCKS),
        )
        trainer.train()


if __name__ == "__main__":
    main()
