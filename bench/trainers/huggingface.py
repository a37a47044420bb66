"""A small GPT-2 on random tokens, trained by the Trainer of transformers."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH = 128, 32


class Tokens(Dataset):
    """Sequences of random tokens in which every second one repeats the one before."""

    def __init__(self, count):
        half = torch.randint(VOCABULARY, (count, LENGTH // 2), generator=torch.Generator().manual_seed(0))
        self.rows = half.repeat_interleave(2, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def main():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    options = TrainingArguments(
        output_dir="output",
        max_steps=100_000,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(GPT2LMHeadModel(config), options, train_dataset=Tokens(1024)).train()


if __name__ == "__main__":
    main()
