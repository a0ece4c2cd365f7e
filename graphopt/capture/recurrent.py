"""The CPU's LSTM layer, which behaves differently with gradients off, as an operator of our own.

``aten.mkldnn_rnn_layer`` returns the workspace that its backward needs only while gradients are enabled, and torch's
fake implementation says that the workspace is empty. A compiled step runs with gradients off, so this operator turns
them on around the call, and reports the true size. It can go when torch takes the ``train`` argument at its word.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, fx

aten = torch.ops.aten


@torch.library.custom_op("graphopt::lstm_layer", mutates_args=())
def lstm_layer(
    x: Tensor,
    w0: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    hx: Tensor,
    cx: Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, last hidden state, last cell state and the workspace (bytes) for backward, as eager computes them."""
    tensors = [tensor.detach() for tensor in (x, w0, w1, w2, w3, hx, cx)]
    with torch.enable_grad():
        results = aten.mkldnn_rnn_layer.default(
            *tensors,
            reverse,
            batch_sizes,
            mode,
            hidden_size,
            num_layers,
            has_biases,
            bidirectional,
            batch_first,
            train,
        )
    return results[0], results[1], results[2], results[3]


@lstm_layer.register_fake
def _lstm_layer_fake(*arguments: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = arguments[:7]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors if isinstance(tensor, Tensor))
    options = tuple(tuple(value) if isinstance(value, list) else value for value in arguments[7:])
    output, hidden, cell, _ = aten.mkldnn_rnn_layer.default(*arguments)
    num_bytes = _workspace_bytes(shapes, output.dtype, options)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=output.device)
    return output, hidden, cell, workspace


@functools.cache
def _workspace_bytes(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: tuple[object, ...]) -> int:
    """The size of the workspace, found by running the layer once on zeros of these shapes."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        arguments = [list(value) if isinstance(value, tuple) else value for value in options]
        return lstm_layer(*zeros, *arguments)[3].numel()  # type: ignore[arg-type]


def use_lstm_operator(graph: fx.Graph) -> None:
    """Let every CPU LSTM layer of a traced graph run through ``graphopt.lstm_layer``."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.mkldnn_rnn_layer.default:
            node.target = torch.ops.graphopt.lstm_layer.default
