"""A probe for gradient noise: records the gradients of successive batches while the weights are frozen.

A backward pass is recorded by what it adds to the gradients, before they are clipped, unscaled or averaged.
The passes between two batches of the loader belong to one batch; without a loader, the passes of one step do.
So accumulated micro-batches count separately, and several losses of one batch count together. Buffers
(running statistics) and the scale of a GradScaler are restored at the end; a scheduler has advanced.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.guard.suspended_optimizer import suspend_optimizer
from flatout.measure.load import available_bytes
from flatout.measure.nests import tensors_in
from flatout.measure.noise_scale import MIN_GROUPS
from flatout.measure.parity import digest
from flatout.schema.sizes import size
from flatout.trial.probes.probe import Probe, ProbeUnavailable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

MAX_GROUPS = 64
MEMORY_SHARE = 0.25  # of the free memory, for gradients
CHUNK = 2**20  # of the gradients, multiplied at once


class GradientNoiseProbe(Probe):
    """Records ``ticks`` steps; returns products and squares for `flatout.measure.noise_scale`."""

    def begin(self) -> None:
        self._check_supported()
        self.step = self.context.steps
        self.parameters = self.context.parameters
        gradient_bytes = 4 * sum(p.numel() for p in self.parameters)
        self.max_groups = min(MAX_GROUPS, int(MEMORY_SHARE * available_bytes() // max(1, gradient_bytes)))
        if self.max_groups < MIN_GROUPS:
            raise ProbeUnavailable(
                f"{MIN_GROUPS} gradients of this model, {size(MIN_GROUPS * gradient_bytes)}, do not fit into the memory that is free"
            )
        self.group_size = math.ceil(
            self.ticks * max(1, self.context.backwards_in_last_step) / self.max_groups
        )
        self.batch_gradient: Any = None  # what the current batch has added so far
        self.old_gradients: list[Any] = []
        self.sizes: list[int] = []  # of the last two fetched batches
        self.usual_size = 0
        self.from_loader = False
        self.not_finite = 0
        self._reset()
        self.weights = digest(self.parameters, self.torch)
        self._save_buffers()
        for scaler in self.context.scalers:
            self.ledger.on_restore(
                "the scale of the GradScaler", partial(scaler.load_state_dict, scaler.state_dict())
            )
        for optimizer in self.context.optimizers:
            suspend_optimizer(self.torch, optimizer, self.ledger)

    def _reset(self) -> None:
        self.sums: list[Any] = []  # of the gradients of a group
        self.counts: list[int] = []  # gradients in each group
        self.squares: list[float] = []  # the sum of their squared lengths

    def _check_supported(self) -> None:
        context, ranks = self.context, self.torch.distributed
        if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
            raise ProbeUnavailable(
                "the program has several ranks, whose weights cannot be frozen together; run it with one"
            )
        if not context.optimizers:
            raise ProbeUnavailable(
                "the program updates its parameters without an optimizer object, so they cannot be frozen"
            )
        if len(context.optimizers) > 1:
            raise ProbeUnavailable(
                f"the program has {len(context.optimizers)} optimizers: each has its own noise scale, and the gradients of one loss may "
                "also reach the parameters of another"
            )
        if context.closure_steps and context.backwards_in_last_step > 1:
            raise ProbeUnavailable(
                "the optimizer runs forward and backward several times inside one step, and moves the weights in between"
            )
        if len(context.scalers) > 1:
            raise ProbeUnavailable(
                "the program has several GradScalers, and the scale of a gradient is unknown"
            )

    def _save_buffers(self) -> None:
        buffers = [buffer for root in self.context.roots for buffer in root.buffers()]
        values = [buffer.detach().clone() for buffer in buffers]

        def restore() -> None:
            with self.torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)

        self.ledger.on_restore("buffers", restore)

    # -- recording

    def data_end(self, loader: DataLoader, batch: object) -> None:
        self.from_loader = True
        self._end_batch()
        first = next(tensors_in(batch), None)
        self.sizes = [*self.sizes[-1:], len(first) if first is not None and first.dim() else 0]

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.old_gradients = [
            p.grad.detach().clone() if p.grad is not None else None for p in self.parameters
        ]

    def backward_end(self) -> None:
        scale = next((float(scaler.get_scale()) for scaler in self.context.scalers), 1.0)
        parts = []
        for parameter, old in zip(self.parameters, self.old_gradients, strict=True):
            gradient = parameter.grad
            if gradient is None:
                parts.append(self.torch.zeros(parameter.numel(), device="cpu"))
                continue
            added = gradient.detach() if old is None else gradient.detach() - old
            added = added.to_dense() if added.layout != self.torch.strided else added
            parts.append(added.reshape(-1).to("cpu", self.torch.float32))
        self.old_gradients = []
        total = self.torch.cat(parts).div_(scale)
        self.batch_gradient = total if self.batch_gradient is None else self.batch_gradient.add_(total)

    def tick(self) -> None:
        if not self.from_loader:
            self._end_batch()

    def _end_batch(self) -> None:
        """Finish the current batch.

        A batch of unusual size, the last of an epoch, is skipped with its adjacent batches, because scripts
        that prefetch are one batch behind.
        """
        total, self.batch_gradient = self.batch_gradient, None
        if total is None:
            return
        if max(self.sizes, default=0) > self.usual_size:  # the batches so far were the last of an epoch
            self.usual_size = max(self.sizes)
            self._reset()
        if any(size != self.usual_size for size in self.sizes):
            return
        square = float(self.torch.linalg.vector_norm(total, dtype=self.torch.float64)) ** 2
        if not math.isfinite(square):
            self.not_finite += 1
            return
        if self.counts and self.counts[-1] < self.group_size:
            self.sums[-1].add_(total)
            self.counts[-1] += 1
            self.squares[-1] += square
        elif len(self.counts) < self.max_groups:
            self.sums.append(total)
            self.counts.append(1)
            self.squares.append(square)

    # -- the end

    def end(self) -> dict[str, Any]:
        if not self.from_loader:
            self._end_batch()
        super().end()
        if digest(self.parameters, self.torch) != self.weights:
            raise ProbeUnavailable("the program changes its weights outside its optimizer")
        full = [i for i, count in enumerate(self.counts) if count == self.group_size]
        if len(full) < MIN_GROUPS:
            not_finite = f", and {self.not_finite} were not finite" if self.not_finite else ""
            raise ProbeUnavailable(
                f"{self.ticks} steps gave gradients of {sum(self.counts)} whole batches of one size{not_finite}; "
                f"at least {MIN_GROUPS * self.group_size} are needed"
            )
        sums = [self.sums[i].div_(self.group_size) for i in full]
        products = self.torch.zeros(len(sums), len(sums), dtype=self.torch.float64, device="cpu")
        for start in range(0, sums[0].numel(), CHUNK):
            columns = self.torch.stack([group_sum[start : start + CHUNK] for group_sum in sums]).double()
            products += columns @ columns.T
        loader = self.context.training_loader
        batch = (
            self.context.loaders[loader]["batch_size"] if loader is not None and self.from_loader else None
        )
        return {
            "step": self.step,
            "batch": batch,
            "gradients": self.group_size * len(full),
            "products": products.tolist(),
            "squares": [self.squares[i] / self.group_size for i in full],
            "not_finite": self.not_finite,
        }
