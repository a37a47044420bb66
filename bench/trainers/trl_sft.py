"""A small Llama on made-up sentences, trained by the SFTTrainer of TRL."""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(200)]


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    tokens = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(8, 24))) for _ in range(512)]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    options = SFTConfig(
        output_dir="output",
        max_steps=100_000,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_length=32,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    SFTTrainer(
        LlamaForCausalLM(config),
        options,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
    ).train()


if __name__ == "__main__":
    main()
