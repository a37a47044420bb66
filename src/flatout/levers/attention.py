"""Replace hand-written attention by torch's fused kernel.

What it does: finds modules whose forward multiplies matrices and takes a softmax. In them, it replaces
    softmax(scale * q @ k' + mask) @ v by one call of scaled_dot_product_attention. It recognises a constant
    causal mask and no longer reads it. Attention weights that the script returns or reads are computed as
    written. With the lever compile, it changes the graph before compilation. Evaluation is unchanged. "FA3" and
    "FA4" also let torch compute scaled_dot_product_attention by the FlashAttention kernels of an installed package.
Why it is faster: weights of heads x length x length are neither written nor read, forward and backward.
    Entries that a causal mask hides are not computed.
When it does not help: float32 with "FA3" and "FA4"; dropout on the attention weights, because the fused kernel draws other random numbers;
    short sequences; layers that use it already (nn.TransformerEncoderLayer); weights that are read at every
    step. On a CPU it depends on the sizes.
What it can change: rounding. Backward passes of some CUDA kernels add in no fixed order unless
    torch.use_deterministic_algorithms(True) is called. A row that an additive mask of large numbers hides
    completely gives queries and keys no gradient. Changing the inputs of the weights in place before the
    weights are used raises an error.
Evidence: a launch-bound 124M GPT 1.04x (H100, torch 2.11.0, one process); measured on your program before it
    is kept.
Sources: Dao et al., FlashAttention, 2022; torch.nn.functional.scaled_dot_product_attention documentation.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import modules_of
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from flatout.kernels.attention_deferred import AttentionMode
    from flatout.schema.program import Ledger, TrainingContext

REPORT_AFTER_STEPS = 4
SOFTMAX = frozenset(("softmax", "Softmax"))
PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum", "mm"))
FUSED = "scaled_dot_product_attention"
# By its name in torch.nn.attention: the package, and the compute capabilities (major) of its kernels
FLASH = {"FA4": ("flash-attn-4", (9, 10)), "FA3": ("flash-attn-3", (9,))}
MAX_FUNCTIONS = 64  # functions of the script that one forward may reach


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.compiled_by_script:
        return Skip(
            "the script compiles the model or a part of it, and the compiler recognises attention itself"
        )
    if context.create_graph_seen:
        return Skip(
            "the script differentiates twice (create_graph=True), and fused attention has no second derivative"
        )
    by_hand, fused = _attention_modules(context)
    kernels, why_not = _flash_kernels(facts, context)
    if by_hand:
        return Options((True, *kernels))
    if fused:
        return Options(kernels) if kernels else Skip(f"the program calls {FUSED} itself, and {why_not}")
    return Skip("no module of the model multiplies matrices and takes a softmax in its forward")


def _flash_kernels(facts: Facts, context: TrainingContext) -> tuple[tuple[str, ...], str]:
    """The FlashAttention kernels that torch could run instead of its own, and why there is none."""
    on_gpu = context.device_type == "cuda"
    major, minor = context.torch.cuda.get_device_capability(context.device) if on_gpu else (0, 0)
    packages = {name: package for name, (package, majors) in FLASH.items() if major in majors}
    if not packages:
        gpu = f"this one has {major}.{minor}" if on_gpu else "the parameters are on none"
        return (), f"FlashAttention 3 and 4 need a GPU of compute capability 9 or 10; {gpu}"
    names = tuple(name for name, package in packages.items() if package in facts.versions)
    return names, f"no newer FlashAttention is installed ({' or '.join(packages.values())})"


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from flatout.kernels.attention_deferred import AttentionMode
    from flatout.kernels.attention_graphs import rewrite

    torch, modes = context.torch, []
    if value is not True:
        _activate(context, str(value), ledger)
    for module in _attention_modules(context)[0]:
        modes.append(AttentionMode())
        context.wrap_forward(module, _with_mode(torch, modes[-1]), ledger)
    context.graph_passes.append(rewrite)
    ledger.on_restore("pass over graphs", lambda: context.graph_passes.remove(rewrite))
    step_count = [0]

    def step(*_: object) -> None:
        for mode in modes:
            mode.step()
        step_count[0] += 1
        if (
            step_count[0] == REPORT_AFTER_STEPS
            and any(mode.forward_passes for mode in modes)
            and not any(mode.fused for mode in modes)
        ):
            context.report("attention", _why_not_fused(modes))

    ledger.on_restore("optimizer step hook", register_optimizer_step_pre_hook(step).remove)
    return ledger.restore


def _activate(context: TrainingContext, name: str, ledger: Ledger) -> None:
    """Let torch compute attention by a FlashAttention that has no dropout: a call with dropout ends that."""
    from torch.nn import attention, functional

    before = attention.current_flash_attention_impl()

    def restore() -> None:
        attention.restore_flash_attention_impl(_raise_warn=False)
        if before is not None:
            attention.activate_flash_attention_impl(before)

    plain = functional.scaled_dot_product_attention

    def without_dropout(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dropout_p and attention.current_flash_attention_impl() == name:
            attention.restore_flash_attention_impl()
            context.report("attention", f"{name} has no dropout, so torch's own kernel is used")
        return plain(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    attention.activate_flash_attention_impl(name)
    ledger.on_restore("FlashAttention", restore)
    ledger.set(functional, FUSED, without_dropout)


def _with_mode(torch: ModuleType, mode: AttentionMode) -> Any:
    def wrapper(forward: Callable[..., Any]) -> Any:
        def fused_where_it_can_be(*args: object, **kwargs: object) -> Any:
            if (
                torch.compiler.is_compiling()
                or not torch.is_grad_enabled()
                or mode.idle
                or torch.jit.is_tracing()
            ):
                return forward(*args, **kwargs)
            with mode.forward():
                return forward(*args, **kwargs)

        return fused_where_it_can_be

    return wrapper


def _why_not_fused(modes: list[Any]) -> str:
    if any(mode.has_dropout for mode in modes):
        return "the script applies dropout to attention weights, and the fused kernel would draw other random numbers"
    if any(mode.calls_fused_kernel for mode in modes):
        return "this program already computes attention by scaled_dot_product_attention"
    return "nothing was replaced: the form of this program's attention is unknown, or the program reads its attention weights"


def _attention_modules(context: TrainingContext) -> tuple[list[Any], bool]:
    """The modules with hand-written attention, and whether a module calls torch's fused kernel."""
    nn, modules, operators_by_class = context.torch.nn, [], {}
    any_fused = False
    for module in modules_of(context):
        class_ = type(module)
        if class_ not in operators_by_class:
            operators_by_class[class_] = _operators_of(class_)
        softmax, product, fused = operators_by_class[class_]
        any_fused |= fused
        softmax |= any(isinstance(child, nn.Softmax) for child in module.children())
        compiled = isinstance(module, context.torch.jit.ScriptModule)
        if (product and softmax and not compiled) or class_ is nn.MultiheadAttention:
            modules.append(module)
    return modules, any_fused


def _operators_of(class_: type) -> tuple[bool, bool, bool]:
    """Whether the forward of this class takes a softmax, multiplies matrices, and calls torch's fused kernel.

    Torch's own classes do not count.
    """
    softmax = product = fused = False
    pending = [getattr(class_, "forward", None)]
    visited: set[FunctionType] = set()
    while pending and len(visited) < MAX_FUNCTIONS:
        function = pending.pop()
        if (
            not isinstance(function, FunctionType)
            or function in visited
            or str(function.__module__).partition(".")[0] == "torch"
        ):
            continue
        visited.add(function)
        for code in _nested_code(function.__code__):
            fused |= FUSED in code.co_names
            softmax |= not SOFTMAX.isdisjoint(code.co_names)
            product |= not PRODUCTS.isdisjoint(code.co_names) or any(
                instruction.opname == "BINARY_MATRIX_MULTIPLY"  # Python 3.10
                or (instruction.opname == "BINARY_OP" and instruction.argrepr == "@")
                for instruction in dis.get_instructions(code)
            )
            pending += [
                function.__globals__.get(name) or getattr(class_, name, None) for name in code.co_names
            ]
            if "forward" in code.co_names:  # perhaps the forward of a base class
                pending += [vars(base).get("forward") for base in class_.__mro__]
        pending += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return softmax, product, fused


def _nested_code(code: CodeType) -> list[CodeType]:
    return [
        code,
        *(
            inner
            for constant in code.co_consts
            if isinstance(constant, CodeType)
            for inner in _nested_code(constant)
        ),
    ]


def code(value: Value) -> str:
    if value is not True:
        return f'torch.nn.attention.activate_flash_attention_impl("{value}")'
    return (
        "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # or attn_mask=mask, True where a key is kept\n"
        "# instead of F.softmax((q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~mask, -math.inf), -1) @ v"
    )


LEVER = Lever(
    "attention",
    Moment.MODEL,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    accepts=(True, "FA3", "FA4"),
    page=__doc__,
)
