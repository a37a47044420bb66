"""Store Adam's moments in eight bits, four bits or float8, with torchao.

What it does: replaces the step of Adam and AdamW by torchao's, in place. The script keeps its parameter
    groups, learning-rate schedules and gradients; the state is quantised in blocks. Select it by name:
    `[levers] optimizer_state = "8bit"` in flatout.toml.
Why it is faster: it is not; the state needs a quarter ("8bit", "fp8") or an eighth ("4bit") of the bytes.
When it does not help: activations fill the memory; other optimizers; tensors of fewer than 4,096 numbers,
    which stay as they are.
What it can change: the maths. Each step rounds moments to 8 or 4 bits, and training reaches another result;
    nothing guarantees how close it is.
Evidence: a 1B model 51.6 to 39.1 GB, 3,200 to 2,900 tokens/s (torchao's README). You select it by name, so it
    is not measured on your program.
Sources: torchao.optim; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger, TrainingContext

SUFFIXES = {"8bit": "8bit", "4bit": "4bit", "fp8": "Fp8"}
KINDS = ("Adam", "AdamW")
MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}  # name -> whether it has a sign
MISSING = "torchao is not installed; run `pip install flatout[lowbit]`"
COPIED = ("betas", "eps", "weight_decay", "amsgrad")


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not _of_torch(context):
        names = ", ".join(sorted({_name(o) for o in context.optimizers})) or "no torch.optim.Optimizer"
        return Skip(f"this lever replaces Adam and AdamW of torch.optim, and the program uses {names}")
    if find_spec("torchao") is None:
        return Skip(MISSING)
    return Options(tuple(SUFFIXES))


def _of_torch(context: TrainingContext) -> list[Any]:
    return [o for o in context.optimizers if _name(o) in KINDS]


def _name(optimizer: Optimizer) -> str:
    """The class as users distinguish it from torch's own, with the options that torchao does not support."""
    kind = type(optimizer)
    name = (
        kind.__name__ if kind.__module__.startswith("torch.optim") else f"{kind.__module__}.{kind.__name__}"
    )
    asked = [
        option
        for option in ("maximize", "differentiable")
        if any(group.get(option) for group in optimizer.param_groups)
    ]
    return f"{name} with {' and '.join(asked)}" if asked else name


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    if find_spec("torchao") is None:
        raise LookupError(MISSING)
    asleep, context.asleep = context.asleep, True  # hide the new optimizer, which is not the program's
    try:
        for optimizer in _of_torch(context):
            _low_bit(context.torch, optimizer, SUFFIXES[str(value)], ledger)
    finally:
        context.asleep = asleep
    return ledger.restore


def _low_bit(torch: ModuleType, optimizer: Optimizer, suffix: str, ledger: Ledger) -> None:
    from torchao import optim

    kind = getattr(optim, type(optimizer).__name__ + suffix)
    first = optimizer.param_groups[0]
    inner = kind(
        [{"params": group["params"], "lr": float(group["lr"])} for group in optimizer.param_groups],
        lr=float(first["lr"]),
        bf16_stochastic_round=False,
    )
    _convert(optimizer, lambda p, name, held: inner._new_buffer(p, MOMENTS[name]).copy_(held))
    inner.state = optimizer.state

    def stepping(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        for at, group in enumerate(optimizer.param_groups):
            if at == len(inner.param_groups):
                inner.add_param_group({"params": group["params"], "lr": float(group["lr"])})
            mine = inner.param_groups[at]
            mine["lr"].fill_(float(group["lr"]))
            mine.update({name: group[name] for name in COPIED})
        return inner.step(closure)

    hooked = torch.optim.Optimizer.profile_hook_step(stepping)  # step hooks observe the script's optimizer

    @wraps(optimizer.step)
    def step(*args: object, **kwargs: object) -> Any:
        return hooked(optimizer, *args, **kwargs)

    ledger.call(
        "optimizer state",
        lambda: _convert(optimizer, lambda p, name, held: torch.zeros_like(p).copy_(held.dequantize())),
    )
    ledger.set(optimizer, "step", step, new=True)


def _convert(optimizer: Optimizer, convert: Callable[..., Any]) -> None:
    for p, state in optimizer.state.items():
        for name in MOMENTS:
            if name in state and p.numel() >= 4096:
                state[name] = convert(p.detach(), name, state[name])


def code(value: Value) -> str:
    return f"optimizer = torchao.optim.AdamW{SUFFIXES.get(str(value), '8bit')}(model.parameters(), ...)"


LEVER = Lever(
    "optimizer_state",
    Moment.OPTIMIZER,
    Effect.CHANGES_MATH,
    applies,
    code,
    apply=apply,
    after=("fused_optimizer",),
    saves_memory=True,
    accepts=tuple(SUFFIXES),
    page=__doc__,
)
