"""Recompute saved tensors that follow from other saved tensors by one operation, instead of keeping them.

A network keeps much of its memory twice. GELU keeps its input, and the next layer keeps GELU's output. A
normalisation keeps its input, and the next layer keeps the normalised tensor. The second follows from the
first. Autograd's own node knows the operation and its saved inputs, so no module, name or source is
inspected. Every place is tested the first time: a tensor that is not reproduced bit for bit is kept.

    pack    a tensor is about to be saved: keep it, or record the node that made it
    unpack  recompute it from what that node has saved, which may itself be recorded

A recomputed tensor is held until its last use, so a product that three views read is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

# A product of more than two dimensions is flattened; for autograd, its reshaped result is not a view.
RESHAPED = "UnsafeViewBackward0"
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)  # of normalisations without a known module; autograd does not keep it


class NotKnown(LookupError):
    """A node whose output cannot be recomputed from its saved tensors."""


class KeptTensor:
    """A saved tensor as it is.

    Checks its version, because autograd does not check tensors packed by hooks.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def value(self) -> Any:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
                f"{tuple(self.tensor.shape)} is at version {self.tensor._version}, and was saved at version {self.version}."
            )
        return self.tensor


class OuterHookTensor:
    """A saved tensor packed by the hooks around ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, tensor: Tensor, hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> None:
        self.packed, self.unpack = hooks[0](tensor), hooks[1]

    def value(self) -> Any:
        return self.unpack(self.packed)


class Output:
    """The output of one node, recomputed on first use and held until nothing refers to it."""

    __slots__ = ("made", "make", "node")

    def __init__(self, node: object, make: Callable[[Any], Any]) -> None:
        self.node, self.make, self.made = node, make, None

    def value(self) -> Any:
        if self.made is None:
            self.made = self.make(self.node)
        return self.made


class View:
    """A part of an output, or all of it in another shape."""

    __slots__ = ("layout", "output")

    def __init__(self, output: Output, tensor: Tensor) -> None:
        self.output, self.layout = output, (tensor.shape, tensor.stride(), tensor.storage_offset())

    def value(self) -> Any:
        made = self.output.value()
        shape, stride, offset = self.layout
        return (
            made
            if made.shape == shape and made.stride() == stride
            else made.as_strided(shape, stride, offset)
        )


class SavedTensorRederiver:
    """The hooks around one module's forward pass.

    ``share`` is the share of linear layers wider than their input whose outputs are also recomputed, evenly
    over the layers. ``epsilons`` maps the id of a normalisation's weight to its epsilon. ``derived`` counts
    the tensors of the last forward pass that were not kept.
    """

    def __init__(
        self, torch: ModuleType, share: float = 0.0, epsilons: dict[int, float] | None = None
    ) -> None:
        self.torch, self.share, self.epsilons = torch, share, epsilons or {}
        self._sound: dict[
            tuple[Any, ...], Callable[[Any], Any] | None
        ] = {}  # place in the forward pass -> how to recompute
        self._outputs: dict[Any, Output] = {}
        self._picked: dict[Any, bool] = {}  # product -> whether it is recomputed
        self._around: Any = None
        self._at = self._products = self.derived = 0

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch = self.torch
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return forward(*args, **kwargs)
        self._around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._at = self._products = self.derived = 0
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _value):
                return forward(*args, **kwargs)
        finally:
            self._outputs.clear()
            self._picked.clear()

    def _pack(self, tensor: Tensor) -> Any:
        whole = tensor._base if tensor._base is not None else tensor
        node = whole.grad_fn
        if node is not None and node.name() == RESHAPED:
            node = node.next_functions[0][0]
        if (
            node is not None
            and whole._version == 0
            and whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
        ):
            output = self._output(node, whole)
            if output is not None:
                self.derived += 1
                return View(output, tensor)
        return KeptTensor(tensor) if self._around is None else OuterHookTensor(tensor, self._around)

    def _output(self, node: Node, whole: Tensor) -> Output | None:
        if node in self._outputs:
            return self._outputs[node]
        name = node.name()
        if name not in OPERATIONS or (name in PRODUCTS and not self._chosen(node, whole)):
            return None
        self._at += 1
        wanted = tuple(
            before is not None for before, _ in node.next_functions
        )  # saved tensors depend on the required gradients
        place = (self._at, name, whole.shape, whole.dtype, whole.stride(), wanted)
        if place not in self._sound:
            self._sound[place] = self._tried(node, whole)
        make = self._sound[place]
        if make is None:
            return None
        return self._outputs.setdefault(node, Output(node, make))

    def _chosen(self, node: object, whole: Tensor) -> bool:
        """Whether this product is recomputed. A product no wider than its input saves nothing."""
        if node not in self._picked:
            if self.share <= 0 or whole.numel() <= _left_numel(node):
                return False
            self._products += 1
            self._picked[node] = int(self._products * self.share) > int((self._products - 1) * self.share)
        return self._picked[node]

    def _tried(self, node: object, whole: Tensor) -> Callable[[Any], Any] | None:
        """The variant of the operation that reproduces this tensor bit for bit; None if there is none."""
        torch, known = self.torch, self._outputs.values()
        held = {id(output) for output in known if output.made is not None}
        try:
            for variant in self._variants(node, whole):
                try:
                    made = variant(node)
                except (
                    NotKnown,
                    AttributeError,
                    TypeError,
                    RuntimeError,
                ):  # another torch version saves other tensors or names
                    continue
                if made.shape != whole.shape and made.numel() == whole.numel() and made.is_contiguous():
                    made = made.view(whole.shape)
                if (
                    made.shape == whole.shape
                    and made.stride() == whole.stride()
                    and made.dtype == whole.dtype
                    and torch.equal(made, whole)
                ):
                    return variant
            return None
        finally:
            for output in known:  # tensors made only for the trial would occupy memory in the forward pass
                if id(output) not in held:
                    output.made = None

    def _variants(self, node: Node, whole: Tensor) -> list[Callable[[Any], Any]]:
        """Ways to recompute ``node``'s output, the most likely first."""
        torch, device, dtype = self.torch, whole.device.type, whole.dtype

        def plainly(operation: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
            def make(node: object) -> Any:
                with torch.no_grad(), torch.autocast(device, enabled=False):
                    return operation(torch, node).to(dtype)

            return make

        name = node.name()
        if name in WITH_EPSILON:
            own = self.epsilons.get(id(node._saved_weight)) if node._saved_weight is not None else None
            return [
                plainly(lambda torch, node, eps=eps: WITH_EPSILON[name](torch, node, eps))  # type: ignore[misc]
                for eps in dict.fromkeys(([own] if own is not None else []) + list(EPSILONS))
            ]
        return [plainly(OPERATIONS[name])]


def _value(packed: KeptTensor) -> Any:
    return packed.value()


def _behind(node: Node, at: int) -> Any:
    """The parameter that is the input of a node at this position."""
    edge = node.next_functions[at][0]
    if edge is None or not hasattr(edge, "variable"):
        raise NotKnown(node.name())
    return edge.variable.detach()


def _operand(torch: ModuleType, node: Node, name: str, at: int) -> Any:
    """An input that the node has saved, or that the previous node can recompute."""
    saved = getattr(node, f"_saved_{name}", None)
    if saved is not None:
        return saved
    before = node.next_functions[at][0]
    if (
        before is None
        or before.name() not in OPERATIONS
        or before.name() in WITH_EPSILON
        or before.name() in PRODUCTS
    ):
        raise NotKnown(node.name())
    return OPERATIONS[before.name()](torch, before)


def _left_numel(node: Node) -> int:
    rows, columns = (
        node._saved_mat1_sym_sizes if node.name() == "AddmmBackward0" else node._saved_self_sym_sizes
    )
    return int(rows * columns)


def _addmm(torch: ModuleType, node: Node) -> Any:
    left, right = node._saved_mat1, node._saved_mat2
    if (
        left is None or right is None or node._saved_alpha != 1 or node._saved_beta != 1
    ):  # each side is saved only if the other needs a gradient
        raise NotKnown(node.name())
    return torch.addmm(_behind(node, 0), left, right)


def _mm(torch: ModuleType, node: Node) -> Any:
    left, right = node._saved_self, node._saved_mat2
    if left is None or right is None:
        raise NotKnown(node.name())
    return torch.mm(left, right)


def _batch_norm(torch: ModuleType, node: Node) -> Any:
    """Batch norm with the batch's own statistics, without moving the running ones again."""
    if not node._saved_training:
        raise NotKnown(node.name())
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    return torch.batch_norm(
        node._saved_input,
        node._saved_weight,
        _behind(node, 2),
        None,
        None,
        True,
        0.0,
        eps,
        torch.backends.cudnn.enabled,
    )


WITH_EPSILON: dict[str, Callable[[Any, Any, float], Any]] = {
    "NativeLayerNormBackward0": lambda torch, n, eps: torch.layer_norm(
        n._saved_input, n._saved_normalized_shape, n._saved_weight, n._saved_bias, eps
    ),
    "NativeGroupNormBackward0": lambda torch, n, eps: torch.group_norm(
        n._saved_input, n._saved_group, n._saved_weight, _behind(n, 2), eps
    ),
    "FusedRmsNormBackward0": lambda torch, n, eps: torch.rms_norm(
        n._saved_input, n._saved_normalized_shape, n._saved_weight, eps
    ),
}
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
}
OPERATIONS: dict[str, Any] = {
    **WITH_EPSILON,
    **PRODUCTS,
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "GeluBackward0": lambda torch, n: torch.nn.functional.gelu(
        n._saved_self, approximate=n._saved_approximate
    ),
    "SiluBackward0": lambda torch, n: torch.nn.functional.silu(n._saved_self),
    "MishBackward0": lambda torch, n: torch.nn.functional.mish(n._saved_self),
    "HardswishBackward0": lambda torch, n: torch.nn.functional.hardswish(n._saved_self),
    "LeakyReluBackward0": lambda torch, n: torch.nn.functional.leaky_relu(
        n._saved_self, n._saved_negative_slope
    ),
    "SoftplusBackward0": lambda torch, n: torch.nn.functional.softplus(
        n._saved_self, n._saved_beta, n._saved_threshold
    ),
    "MulBackward0": lambda torch, n: _operand(torch, n, "self", 0) * _operand(torch, n, "other", 1),
    "ToCopyBackward0": lambda torch, n: _operand(torch, n, "self", 0),  # its dtype is that of the tensor
}
