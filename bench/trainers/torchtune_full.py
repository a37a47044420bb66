"""A small Llama on made-up words, trained by a recipe of torchtune: first `torchtune_full.py prepare`."""

import random
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from torchtune._cli.tune import main as tune
from torchtune.models.llama3 import llama3

VOCABULARY, LENGTH = 200, 24
MODEL = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 64,
    "intermediate_dim": 128,
}
CONFIG = """
output_dir: output
device: cpu
dtype: fp32
seed: 0
shuffle: true
epochs: 1
max_steps_per_epoch: null
batch_size: 8
gradient_accumulation_steps: 2
clip_grad_norm: 1.0
compile: false
optimizer_in_bwd: false
resume_from_checkpoint: false
log_every_n_steps: 5
model: {model}
tokenizer: {{_component_: torchtune_full.Numbers}}
dataset: {{_component_: torchtune_full.Sentences}}
checkpointer:
  _component_: torchtune.training.FullModelTorchTuneCheckpointer
  checkpoint_dir: checkpoint
  checkpoint_files: [model.pt]
  output_dir: output
  model_type: LLAMA3
optimizer: {{_component_: torch.optim.AdamW, lr: 0.001}}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
lr_scheduler: {{_component_: torchtune.training.get_cosine_schedule_with_warmup, num_warmup_steps: 10}}
metric_logger: {{_component_: torchtune.training.metric_logging.StdoutLogger}}
"""


class Numbers:
    """The tokens of this data are numbers already; a recipe asks its tokenizer for the padding."""

    pad_id = 0


class Sentences(Dataset):
    """Sentences of random words and lengths in which every second word repeats the one before."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __len__(self):
        return 1_000_000

    def __getitem__(self, at):
        rng = random.Random(at)
        words = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(4, LENGTH // 2))]
        tokens = [word for word in words for _ in range(2)]
        return {"tokens": tokens, "labels": tokens}


def prepare():
    """Writes the weights from which the recipe starts, and its configuration."""
    torch.manual_seed(0)
    Path("checkpoint").mkdir(exist_ok=True)
    torch.save(llama3(**MODEL).state_dict(), "checkpoint/model.pt")
    words = {"_component_": "torchtune.models.llama3.llama3", **MODEL}
    model = f"{{{', '.join(f'{name}: {value}' for name, value in words.items())}}}"
    Path("torchtune_full.yaml").write_text(CONFIG.format(model=model))


def main():
    sys.argv = ["tune", "run", "full_finetune_single_device", "--config", "torchtune_full.yaml"]
    tune()


if __name__ == "__main__":
    prepare() if sys.argv[1:] == ["prepare"] else main()
