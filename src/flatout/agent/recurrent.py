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

MEASURED_SIZE = 16  # steps and samples of the small layer; beyond, the workspace grows linearly with both
LSTM_MODE = 2  # number of the mode (rnn_kind in ATen)


def lstm_by_layers(torch: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch._VF.lstm``.

    Shapes: input (steps, batch, features), or batch first; states (layers * directions, batch, width).
    """

    def lstm(input: Tensor, states: Any, weights: Sequence[Tensor], *rest: Any) -> Any:
        if not isinstance(states, (list, tuple)) or not _goes_to_onednn(torch, input, states):
            return original(input, states, weights, *rest)
        has_biases, layers, dropout, training, bidirectional, batch_first = rest
        directions = 2 if bidirectional else 1
        weights_per_layer = 4 if has_biases else 2
        x = (input.transpose(0, 1) if batch_first else input).contiguous()
        hidden, cells = [], []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                i = layer * directions + direction
                layer_weights = list(weights[i * weights_per_layer : (i + 1) * weights_per_layer])
                layer_weights += (
                    []
                    if has_biases
                    else [torch.zeros(layer_weights[0].shape[0], dtype=layer_weights[0].dtype)] * 2
                )
                results = torch.ops.aten.mkldnn_rnn_layer(
                    x,
                    *layer_weights,
                    states[0][i],
                    states[1][i],
                    direction == 1,
                    [],
                    LSTM_MODE,
                    states[0].shape[2],
                    layers,
                    has_biases,
                    bidirectional,
                    batch_first,
                    training,
                )
                outputs.append(results[0])
                hidden.append(results[1])
                cells.append(results[2])
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
    few_steps, few_samples = min(MEASURED_SIZE, steps), min(MEASURED_SIZE, samples)
    tensors = [
        torch.zeros(few_steps, few_samples, input.shape[2]),
        *(torch.zeros(tuple(weight.shape)) for weight in weights),
        torch.zeros(few_samples, width),
        torch.zeros(few_samples, width),
    ]
    with torch.enable_grad():  # oneDNN keeps nothing without gradients
        measured = torch.ops.aten.mkldnn_rnn_layer(*tensors, *rest)[3].numel()
    return int(measured * (steps * samples) / (few_steps * few_samples))
