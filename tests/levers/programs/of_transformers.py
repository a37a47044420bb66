"""Models of transformers, plain and with the lever `attention`: prints their losses and the number of fused
attentions as JSON.
"""

import json

import torch
import transformers

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.kernels import attention_deferred
from flatout.levers.attention import LEVER

STEPS = 4
SMALL = {
    "vocab_size": 40,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 32}
MODELS = {
    "GPT2LMHeadModel": transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, attn_pdrop=0.0, **SMALL),
    "BertForMaskedLM": transformers.BertConfig(attention_probs_dropout_prob=0.0, **SIZES, **SMALL),
    "LlamaForCausalLM": transformers.LlamaConfig(num_key_value_heads=2, **SIZES, **SMALL),
    "BloomForCausalLM": transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=32, **SMALL),
}
tokens = torch.randint(2, 40, (3, 9), generator=torch.Generator().manual_seed(0))
padding = torch.ones(3, 9, dtype=torch.int64)
padding[0, 6:] = padding[1, 3:] = 0
found = {}
for name, config in MODELS.items():
    for ours in (False, True):
        torch.manual_seed(0)
        context, before, losses = (
            TrainingContext(torch, Listener(), Ledger()),
            attention_deferred.FUSED_COUNT[0],
            [],
        )
        model = getattr(transformers, name)(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        context.register_objects([model], [optimizer], [])
        if ours:
            LEVER.apply(context, True, context.ledger)
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = model(input_ids=tokens, attention_mask=padding, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        context.ledger.restore()
        found.setdefault(name, []).append([losses, attention_deferred.FUSED_COUNT[0] - before])
print(json.dumps(found))
