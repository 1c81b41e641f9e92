"""A user's own ``autograd.Function`` → Relax: outputs whose gradients go through the backward that was traced.

See :mod:`bridge.capture.own_functions` for the operators, :mod:`autodiff.own_gradients` for what becomes of them.
"""

from __future__ import annotations

from tvm import relax

from bridge.aten.derivative import with_derivative
from bridge.aten.registry import converts
from bridge.capture import CUSTOM_GRADIENT, TANGENT, WITH_GRADIENT

__all__: list[str] = []

op = relax.op


@converts(TANGENT)
def tangent(importer, node, like, number, index):
    stopped = importer.emit(op.grad.no_grad(like))
    return importer.library("tangent", [stopped, number, index], node.meta["val"])


@converts(CUSTOM_GRADIENT)
def custom_gradient(importer, node, inputs, gradients, tangents):
    stopped = [importer.emit(op.grad.no_grad(gradient)) for gradient in gradients]
    made = importer.library("custom_gradient", [len(inputs), *inputs, *stopped, *tangents], node.meta["val"])
    return tuple(importer.item(made, index) for index in range(len(tangents)))


@converts(WITH_GRADIENT)
def with_gradient(importer, node, output, gradient):
    if gradient is None:
        return importer.emit(op.grad.no_grad(output))
    return with_derivative(importer, output, gradient)
