"""LSTMs in fake execution on a CPU, layer by layer as in oneDNN.

Torch passes real tensors to oneDNN layer by layer, and decomposes the LSTM into steps otherwise. Tensors
without memory would be decomposed, and the decomposition saves other tensors for the backward pass. So this
module calls the layers in the same order as ``mkldnn_rnn`` (aten/src/ATen/native/mkldnn/RNN.cpp). What oneDNN
keeps of a layer is a workspace of a size that only oneDNN knows, so a small layer is run to measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ASKED = 16  # steps and samples of the small layer; beyond, the workspace grows linearly with both
LSTM = 2  # number of the mode (rnn_kind in ATen)


def by_layers(torch: ModuleType, really: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch._VF.lstm``.

    Shapes: input (steps, batch, features), or batch first; states (layers * directions, batch, width).
    """

    def lstm(input: Tensor, states: Any, weights: Sequence[Tensor], *rest: Any) -> Any:
        if not isinstance(states, (list, tuple)) or not _goes_to_onednn(torch, input, states):
            return really(input, states, weights, *rest)
        has_biases, layers, dropout, training, bidirectional, batch_first = rest
        directions = 2 if bidirectional else 1
        each = 4 if has_biases else 2
        x = (input.transpose(0, 1) if batch_first else input).contiguous()
        hidden, cells = [], []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                own = list(weights[at * each : (at + 1) * each])
                own += [] if has_biases else [torch.zeros(own[0].shape[0], dtype=own[0].dtype)] * 2
                made = torch.ops.aten.mkldnn_rnn_layer(
                    x,
                    *own,
                    states[0][at],
                    states[1][at],
                    direction == 1,
                    [],
                    LSTM,
                    states[0].shape[2],
                    layers,
                    has_biases,
                    bidirectional,
                    batch_first,
                    training,
                )
                outputs.append(made[0])
                hidden.append(made[1])
                cells.append(made[2])
            x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
            if dropout and training and layer < layers - 1:
                x = torch.dropout(x, dropout, True)
        return x.transpose(0, 1) if batch_first else x, torch.stack(hidden), torch.stack(cells)

    return lstm


def _goes_to_onednn(torch: ModuleType, input: Tensor, states: Sequence[Tensor]) -> bool:
    projected = states[0].shape[2] != states[1].shape[2]
    return bool(
        input.device.type == "cpu"
        and input.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not projected
        and input.numel()
    )


def workspace_bytes(torch: ModuleType, args: Sequence[Any]) -> int:
    """Return the workspace size of ``aten::mkldnn_rnn_layer``. Call it with dispatch modes off."""
    input, weights, rest = args[0], args[1:5], args[7:]
    steps, samples = input.shape[:2]
    width = args[5].shape[-1]
    few_steps, few = min(ASKED, steps), min(ASKED, samples)
    tensors = [
        torch.zeros(few_steps, few, input.shape[2]),
        *(torch.zeros(tuple(weight.shape)) for weight in weights),
        torch.zeros(few, width),
        torch.zeros(few, width),
    ]
    with torch.enable_grad():  # oneDNN keeps nothing without gradients
        asked = torch.ops.aten.mkldnn_rnn_layer(*tensors, *rest)[3].numel()
    return int(asked * (steps * samples) / (few_steps * few))
