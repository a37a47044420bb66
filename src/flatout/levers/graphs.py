"""Record the step as CUDA graphs, without a compiler, and replay them.

What it does: records the forward and backward pass of each root module for each input shape, after two eager
    passes. It also records the update of optimizers that count their steps on the device: SGD, and others
    with fused=True. The script receives copies, so outputs and gradients that it keeps are never overwritten.
    Evaluation, other shapes, and passes that read values or depend on the host run eagerly. Dropout draws the
    same numbers.
Why it is faster: three calls launch a step of hundreds of small kernels, so the device no longer waits for
    Python.
When it does not help: kernels that take longer than their launch; batches whose shape changes every step;
    several ranks. A recording keeps the memory of one pass in addition to the rest of the program.
What it can change: nothing if the kernels are the same; libraries may choose others while recording. Some
    replays are compared with eager passes. A pass that depends on Python values outside its inputs and
    modules is found this way and no longer replayed.
Evidence: published figures for other implementations range from 1.0x (large batches) to 5x (batches of 8);
    measured on your program before it is kept.
Sources: torch documentation, "CUDA semantics", section "CUDA Graphs"; torch.cuda.CUDAGraph.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import NO_CUDA, NO_ROOT, script_hooks, why_model_is_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.kernels.graph_update import UpdateGraph
    from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    torch = context.torch
    if context.device_type != "cuda":
        return Skip(NO_CUDA)
    if context.create_graph_seen:
        return Skip(
            "the script differentiates twice (create_graph=True), and a recorded backward pass has no second derivative"
        )
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return Skip(
            "the program has several ranks, and a recorded backward pass could not send gradients while it computes"
        )
    if why := why_model_is_split(context):
        return Skip(why)
    if not context.roots:
        return Skip(NO_ROOT)
    if all(_why_not(context, root) for root in context.roots):
        return Skip(_why_not(context, context.roots[0]))
    return Options((True,))


def _why_not(context: TrainingContext, root: Module) -> str:
    torch, name = context.torch, type(root).__name__
    if getattr(root.forward, "own_graphs", False):
        return f"torch.compile records {name} as CUDA graphs itself"
    if isinstance(root, (torch.nn.DataParallel, torch.jit.ScriptModule)):
        return f"{name} cannot be recorded"
    tensors = [*root.parameters(), *root.buffers()]
    if any(tensor.device != tensors[0].device or not tensor.is_cuda for tensor in tensors):
        return f"parameters and buffers of {name} are not all on one CUDA device"
    for module in root.modules():
        if module is not root and script_hooks(context, module):
            return f"the script has hooks on {type(module).__name__}, which a recording would not call"
    return ""


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    from flatout.kernels.graph_module import ModuleGraphs
    from flatout.kernels.graph_replay import reporting_setattr
    from flatout.kernels.graph_update import UpdateGraph, why_not_recordable

    torch = context.torch
    roots = [root for root in map(context.unwrap_ddp, context.roots) if not _why_not(context, root)]
    if not roots:
        raise LookupError(_why_not(context, context.roots[0]))
    reasons: list[str] = []
    callbacks: dict[int, list[Any]] = {}

    def report_eager(why: str) -> None:
        reasons.append(why)
        if len(reasons) == len(roots):
            context.report("graphs", f"the forward pass {reasons[0]}, so it is not recorded")

    for root in roots:

        def wrapper(forward: Callable[..., Any], root: Module = root) -> Any:
            graphs = ModuleGraphs(
                root,
                forward,
                report_eager,
                operators=not (context.compiled_by_script or getattr(forward, "compiled", False)),
                untimed=context.untimed,
            )
            ledger.on_restore("recorded passes", graphs.discard)
            for module in graphs.modules:
                callbacks.setdefault(id(module), []).append(graphs.attribute_changed)

            def recorded_or_plain(*args: object, **kwargs: object) -> Any:
                return graphs(*args, **kwargs)

            return recorded_or_plain

        context.wrap_forward(root, wrapper, ledger)
    ledger.set(torch.nn.Module, "__setattr__", reporting_setattr(torch.nn.Module.__setattr__, callbacks))
    for optimizer in context.optimizers:
        if not why_not_recordable(optimizer):
            graph = UpdateGraph(optimizer, optimizer.step)
            ledger.on_restore("recorded update", graph.discard)
            ledger.set(optimizer, "step", _as_method(optimizer, graph), new=True)
    return ledger.restore


def _as_method(optimizer: Optimizer, graph: UpdateGraph) -> Any:
    """The graph as a method of the optimizer, which learning-rate schedulers wrap."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return graph(closure)

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return MethodType(step, optimizer)


def code(value: Value) -> str:
    passes = "model = torch.cuda.make_graphed_callables(model, (sample_batch,))  # fixed shapes; copy every output that you keep"
    update = "optimizer = torch.optim.AdamW(model.parameters(), ..., fused=True, capturable=True)\nwith torch.cuda.graph(graph): optimizer.step()"
    return f"{passes}\n{update}"


LEVER = Lever(
    "graphs",
    Moment.STEP,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    excludes=("recompute",),
    page=__doc__,
)
