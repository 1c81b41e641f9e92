"""Custom ``autograd.Function`` → Relax: outputs whose gradients are computed by the traced backward.

:mod:`bridge.capture.custom_functions` has the operators, :mod:`autodiff.differentiate` resolves the calls. Each part of
a complex number is a value with its own gradient and tangent.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

from tvm import relax

from bridge.aten.activations import with_derivative
from bridge.aten.complex_arithmetic import COMPLEX
from bridge.aten.complex_value import Complex, of_parts, parts_of, separated
from bridge.aten.registry import converts
from bridge.capture import APPLY, BACKWARD, COLLECTIVE, CUSTOM_GRADIENT, OVERWRITTEN, TANGENT, WITH_GRADIENT

op = relax.op


def _of_both(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a conversion for real and for complex operands."""
    return lambda convert: converts(overload, table=COMPLEX)(converts(overload)(convert))


@_of_both(TANGENT)
def tangent(importer, node, like, number, index):
    """A tangent for each part; an imaginary one has a negative index, which no output of the Function has."""
    return of_parts(
        importer.library("tangent", [importer.emit(op.grad.no_grad(part)), number, of], node.meta["val"])
        for part, of in zip(parts_of(like), (index, -1 - index), strict=False)
    )


@_of_both(CUSTOM_GRADIENT)
def custom_gradient(importer, node, inputs, gradients, tangents):
    inputs, gradients, parts = ([*chain(*map(parts_of, each))] for each in (inputs, gradients, tangents))
    stopped = [importer.emit(op.grad.no_grad(gradient)) for gradient in gradients]
    forms = [form for form, each in zip(node.meta["val"], tangents, strict=True) for _ in parts_of(each)]
    made = importer.library("custom_gradient", [len(inputs), *inputs, *stopped, *parts], forms)
    fields = iter([importer.item(made, index) for index in range(len(parts))])
    return tuple(of_parts(islice(fields, len(parts_of(each)))) for each in tangents)


@_of_both(WITH_GRADIENT)
def with_gradient(importer, node, output, gradient):
    parts = parts_of(output)
    gradients = [None] * len(parts) if gradient is None else parts_of(gradient)
    return of_parts(
        importer.emit(op.grad.no_grad(part)) if each is None else with_derivative(importer, part, each)
        for part, each in zip(parts, gradients, strict=True)
    )


@_of_both(OVERWRITTEN)
def overwritten(importer, node, x, name):
    made = importer.in_memory(importer.whole_of(x), importer.captured.names.placeholders[name])
    return separated(importer, made) if isinstance(x, Complex) else made


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
