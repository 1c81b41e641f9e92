"""Custom ``autograd.Function`` → Relax: outputs whose gradients are computed by the traced backward.

:mod:`bridge.capture.custom_functions` has the operators, :mod:`autodiff.differentiate` resolves the calls. Each part of
a complex number is a value with its own gradient and tangent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import relax

from autodiff.ir import Expr
from bridge.aten.activations import with_derivative
from bridge.aten.complex_arithmetic import COMPLEX
from bridge.aten.complex_value import Complex, separated
from bridge.aten.registry import converts
from bridge.capture import APPLY, BACKWARD, COLLECTIVE, CUSTOM_GRADIENT, OVERWRITTEN, TANGENT, WITH_GRADIENT

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


@converts(COLLECTIVE)
def collective(importer, node, x, *options):
    return importer.library("collective", [x, *options], node.meta["val"])


@converts(APPLY)
def apply_opaque(importer, node, key, tensors):
    made = importer.library("apply_opaque", [key, *tensors], node.meta["val"])
    return tuple(importer.item(made, index) for index in range(len(node.meta["val"])))


@converts(BACKWARD)
def backward_opaque(importer, node, key, state, gradients):
    made = importer.library("backward_opaque", [key, state, *gradients], node.meta["val"])
    return tuple(importer.item(made, index) for index in range(len(node.meta["val"])))


@converts(WITH_GRADIENT)
def with_gradient(importer, node, output, gradient):
    if gradient is None:
        return importer.emit(op.grad.no_grad(output))
    return with_derivative(importer, output, gradient)


@converts(OVERWRITTEN)
@converts(OVERWRITTEN, table=COMPLEX)
def overwritten(importer, node, x, name):
    made = importer.in_memory(importer.whole_of(x), importer.captured.names.placeholders[name])
    return separated(importer, made) if isinstance(x, Complex) else made


@converts(TANGENT, table=COMPLEX)
def complex_tangent(importer, node, like, number, index):
    """Two tangents; the imaginary one has a negative index, which no output of the Function has."""
    return Complex(
        *(tangent(importer, node, part, number, of) for part, of in zip(like.parts, (index, -1 - index), strict=True))
    )


@converts(CUSTOM_GRADIENT, table=COMPLEX)
def complex_custom_gradient(importer, node, inputs, gradients, tangents):
    inputs, gradients, parts = ([*_parts(each)] for each in (inputs, gradients, tangents))
    stopped = [importer.emit(op.grad.no_grad(gradient)) for gradient in gradients]
    forms = [form for form, each in zip(node.meta["val"], tangents, strict=True) for _ in _parts([each])]
    made = importer.library("custom_gradient", [len(inputs), *inputs, *stopped, *parts], forms)
    fields = iter([importer.item(made, index) for index in range(len(parts))])
    return tuple(
        Complex(next(fields), next(fields)) if isinstance(each, Complex) else next(fields) for each in tangents
    )


@converts(WITH_GRADIENT, table=COMPLEX)
def complex_with_gradient(importer, node, output, gradient):
    gradients = (None, None) if gradient is None else gradient.parts
    return Complex(*(with_gradient(importer, node, *each) for each in zip(output.parts, gradients, strict=True)))


def _parts(values: Iterable[Any]) -> Iterable[Expr]:
    for value in values:
        yield from value.parts if isinstance(value, Complex) else (value,)
