"""On a card: the sizes of the products over a vocabulary, and the kind of attention requested.

Prints the results as JSON.
"""

import json
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.kernels.linear_cross_entropy.op import forward, linear_cross_entropy
from flatout.levers.attention import LEVER

CARD = torch.device("cuda:0")
CLASSES = 257


class OperatorRecorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes, self.attention, self.triangle = set(), [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.name(), kwargs or {}
        if name.startswith(("aten::mm", "aten::addmm", "aten::linear")):
            self.sizes |= {
                size
                for each in args
                if isinstance(each, torch.Tensor)
                for size in each.shape
                if size >= CLASSES
            }
        self.triangle |= name == "aten::tril"
        if name == "aten::_safe_softmax":  # of scaled_dot_product_attention, in operators that the CPU has
            self.attention.append("causal" if self.triangle else "masked")
        return function(*args, **kwargs)


def products(dtype, classes=CLASSES, tf32=False, bias=True):
    """The largest sizes of the products, and the distance of loss and gradients from those computed without
    longer rows.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw).to(CARD, dtype) for shape in ((24, 8), (classes, 8)))
    target = torch.randint(classes, (24,), generator=draw).to(CARD)
    x[3], target[3] = math.inf, -100  # ignored rows give x no gradient, whatever they contain
    b = torch.randn(classes, generator=draw).to(CARD, dtype) if bias else None
    with OperatorRecorder() as observed:
        ours = forward(x, weight, target, b, -100, "mean", 0.1, 7 if bias else 3, "plain", 0)
    plain = forward(x, weight, target, b, -100, "mean", 0.1, 7 if bias else 3, "plain", 1)
    pairs = [(a.float().cpu(), b.float().cpu()) for a, b in zip(ours, plain, strict=True)]
    same = [
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-3, equal_nan=True) for a, b in pairs
    ]
    finite = bool(ours[2].float().isfinite().all().cpu())
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"sizes": sorted(observed.sizes), "same": all(same), "finite": finite}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.ones(6, 6).tril())

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return (
            ((q @ k.transpose(-2, -1) / 2).masked_fill(self.mask == 0, -math.inf).softmax(-1) @ v)
            .transpose(1, 2)
            .flatten(2)
        )


def attention():
    """Losses of training on the host, on the card, and there with the lever."""
    found = {}
    for name in ("host", "plain", "lever"):
        torch.manual_seed(0)
        device = "cpu" if name == "host" else CARD
        model, x = Attention().to(device), torch.randn(3, 6, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        context = TrainingContext(torch, Listener(), Ledger())
        context.introduce([model], [optimizer], [])
        undo = LEVER.apply(context, True, Ledger()) if name == "lever" else context.ledger.restore
        losses = []
        with OperatorRecorder() as observed:
            for _ in range(6):
                observed.triangle = False
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach().cpu()))
        undo()
        found[name] = {"losses": losses, "attention": observed.attention, "reports": context.reports}
    return found


assert (
    linear_cross_entropy(
        *(
            torch.randn(4, 8, device=CARD),
            torch.randn(9, 8, device=CARD),
            torch.zeros(4, dtype=torch.int64, device=CARD),
        ),
        implementation="plain",
    ).shape
    == ()
)
print(
    json.dumps(
        {
            "bfloat16": products(torch.bfloat16),
            "float16": products(torch.float16, bias=False),
            "aligned": products(torch.bfloat16, 264),
            "float32": products(torch.float32),
            "tf32": products(torch.float32, tf32=True),
            "attention": attention(),
        }
    )
)
