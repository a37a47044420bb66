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
from flatout.kernels import chunked_loss
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
    inputs = [torch.randn(*shape, generator=draw).to(CARD, dtype) for shape in ((24, 8), (classes, 8))]
    inputs += [torch.randn(classes, generator=draw).to(CARD, dtype)] if bias else []
    target = torch.randint(classes, (24,), generator=draw).to(CARD)
    target[3] = -100

    def loss_and_gradients():
        x, weight, *b = leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with OperatorRecorder() as observed:
            loss = chunked_loss.linear_cross_entropy(x, weight, target, *b, label_smoothing=0.1)
            return observed.sizes, [loss, *torch.autograd.grad(loss, leaves)]

    sizes, ours = loss_and_gradients()
    multiple, chunked_loss.PADDING_MULTIPLE = chunked_loss.PADDING_MULTIPLE, 1
    _, plain = loss_and_gradients()
    chunked_loss.PADDING_MULTIPLE = multiple
    torch.backends.cuda.matmul.allow_tf32 = False
    pairs = [(a.detach().float().cpu(), b.detach().float().cpu()) for a, b in zip(ours, plain, strict=True)]
    same = [a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in pairs]
    return {"sizes": sorted(sizes), "same": all(same)}


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
        context.register_objects([model], [optimizer], [])
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
