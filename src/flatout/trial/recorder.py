"""Records losses, batches and weights of a trial. Nothing here waits for the device before it must."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from flatout.measure import parity
from flatout.measure.nests import tensors_in
from flatout.schema.program import TrainingContext

MAX_HASHED = 32
MAX_LOSSES = 100_000
DIGEST_STEPS = (1, 2, 4, 8, 16, 32)  # the weights are digested after these steps


class TrainingRecorder:
    def __init__(self, torch: ModuleType, context: TrainingContext, sketches: bool = False) -> None:
        self.torch, self._sketches = torch, sketches
        self.context = context
        self.loss_steps: list[int] = []
        self.batch_hashes: list[str] = []
        self.batch_statistics: list[list[float]] = []
        self.weights_digests: dict[str, str] = {}
        self.weights_sketches: dict[str, dict[str, list[float]]] = {}
        self.from_loader = False
        self._samples = 0
        self._losses: list[Any] = []

    def loss(self, losses: tuple[Any, ...]) -> None:
        """Keep a copy of the losses of a backward pass; scripts may scale them in place afterwards."""
        if len(self._losses) < MAX_LOSSES:
            self._losses.append(
                [loss.detach().clone() for loss in losses] if len(losses) > 1 else losses[0].detach().clone()
            )
            self.loss_steps.append(self.context.steps)

    def loss_tensors(self) -> list[Any]:
        """The tensors that we keep of the program's."""
        return [
            tensor
            for loss in self._losses
            if not isinstance(loss, str)
            for tensor in (loss if isinstance(loss, list) else [loss])
        ]

    def batch(self, batch: object, describe: bool) -> None:
        """Record a batch of a DataLoader. Describing it costs time, so it is limited to the warm-up."""
        self.from_loader = True
        first = next(tensors_in(batch), None)
        if first is not None and first.dim():
            self._samples += len(first)
        if describe and len(self.batch_hashes) < MAX_HASHED:
            self.batch_hashes.append(parity.digest(tensors_in(batch), self.torch))
            self.batch_statistics.extend(parity.batch_statistics(batch, self.torch))

    def take_samples(self) -> int:
        """How many samples came since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def model_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the batch of a program without a DataLoader: the first tensor that enters a root module."""
        if not self.from_loader and len(self.batch_hashes) < MAX_HASHED:
            first = next(tensors_in((args, kwargs)), None)
            if first is not None:
                self.batch_hashes.append(parity.digest([first], self.torch))

    def step(self, steps: int) -> None:
        if steps in DIGEST_STEPS:
            buffers = [b for root in self.context.roots for b in root.buffers()]
            self.weights_digests[str(steps)] = parity.digest([*self.context.parameters, *buffers], self.torch)
        if self._sketches and not steps & (steps - 1):
            self.weights_sketches[str(steps)] = {
                f"{i}.{name}": parity.sketch(tensor, self.torch)
                for i, root in enumerate(self.context.roots)
                for name, tensor in (*root.named_parameters(), *root.named_buffers())
            }

    def losses(self) -> list[str]:
        """Return hexadecimal floats, one per backward pass.

        Waits for the device, so call it between blocks only.
        """
        for i, loss in enumerate(self._losses):
            if not isinstance(loss, str):
                parts = loss if isinstance(loss, list) else [loss]
                self._losses[i] = float(sum(float(tensor.double().mean()) for tensor in parts)).hex()
        return self._losses
