"""Recurrent layers by oneDNN: one direction of one layer over a whole sequence, and its VJP."""

from __future__ import annotations

import json

import torch

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []

_HAS_BIASES = 5  # among the options of aten.mkldnn_rnn_layer


@library_function("recurrent_layer", aten.mkldnn_rnn_layer)
def recurrent_layer(options, *tensors):
    """Outputs, last hidden and cell state; ``options``: the operator's, as JSON."""
    return tuple(aten.mkldnn_rnn_layer(*(tensor.contiguous() for tensor in tensors), *json.loads(options))[:3])


@library_function("recurrent_layer_backward", aten.mkldnn_rnn_layer)
def recurrent_layer_backward(options, *tensors_and_grads):
    """VJPs with respect to all tensors, from the gradients of the three results; computes the forward again."""
    tensors, grads = tensors_and_grads[:-3], tensors_and_grads[-3:]
    options = json.loads(options)
    leaves = [tensor.detach().contiguous() for tensor in tensors]
    # without biases, the library's gradients of the zeros in their place do not have those zeros' shape
    wanted = leaves if options[_HAS_BIASES] else [*leaves[:3], *leaves[5:]]
    for leaf in wanted:
        leaf.requires_grad_()
    with torch.enable_grad():
        made = aten.mkldnn_rnn_layer(*leaves, *options)[:3]
        found = iter(torch.autograd.grad(made, wanted, grads))
    return tuple(next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves)
