"""Before and expected of the passes that simplify values: algebra, tuples, common and dead subexpressions."""

# ruff: noqa: F841 - passes remove unread TVMScript variables

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

import autodiff
from autodiff import (
    clean,
    common_subexpression_elimination,
    dead_code_elimination,
    one_zapp,
    zapp_like,
    zero_zapp,
)
from autodiff.clean import project_tuples
from autodiff.reverse import undefined_gradients
from tests.autodiff.golden import golden


@golden(project_tuples)
@I.ir_module
class ProjectTuples:
    """A field of a tuple that is spelled out is read directly; copies disappear."""

    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        with R.dataflow():
            pair = (x, y)
            first = pair[0]
            copy = first
            z = R.exp(copy)
            R.output(z)
        return (z, y)

    @R.function(private=True)
    def expected(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        with R.dataflow():
            z = R.exp(x)
            R.output(z)
        return (z, y)


@golden(autodiff.collectives_in_order)
@I.ir_module
class CollectivesInOrder:
    """Each collective reads the one before it, so that every process calls them in this order."""

    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        with R.dataflow():
            a = R.call_pure_packed(
                "library.collective", x, "copy", "reduce", 0, "0", ty_args=(R.Tensor((2,), "float32"),)
            )
            b = R.exp(x)
            c = R.call_pure_packed(
                "library.collective", y, "copy", "reduce", 0, "0", ty_args=(R.Tensor((2,), "float32"),)
            )
            R.output(a, b, c)
        return (a, b, c)

    @R.function(private=True)
    def expected(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        with R.dataflow():
            a = R.call_pure_packed(
                "library.collective", x, "copy", "reduce", 0, "0", ty_args=(R.Tensor((2,), "float32"),)
            )
            b = R.exp(x)
            c = R.call_pure_packed(
                "library.collective", y, "copy", "reduce", 0, "0", a, ty_args=(R.Tensor((2,), "float32"),)
            )
            R.output(a, b, c)
        return (a, b, c)


@golden(zapp_like)
@I.ir_module
class ZappLike:
    """Shapes are known: ``..._like`` operations do not read their operand, sums and broadcasts are plain."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
        with R.dataflow():
            a = R.zeros_like(x)
            b = R.ones_like(x)
            c = R.full_like(x, R.const(2.0, "float32"))
            d = R.collapse_sum_like(x, y)
            e = R.collapse_sum_to(x, R.shape([2, 1]))
            f = R.collapse_sum_to(x, R.shape([2, 3]))
            g = R.broadcast_to(y, R.shape([1, 3]))
            R.output(a, b, c, d, e, f, g)
        return (a, b, c, d, e, f, g)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
        with R.dataflow():
            a = R.zeros(R.shape([2, 3]), "float32")
            b = R.ones(R.shape([2, 3]), "float32")
            c = R.full(R.shape([2, 3]), R.const(2.0, "float32"), "float32")
            d = R.sum(x, axis=[0])
            e = R.sum(x, axis=[1], keepdims=True)
            g = R.reshape(y, R.shape([1, 3]))
            R.output(a, b, c, d, e, g)
        return (a, b, c, d, e, x, g)


@golden(undefined_gradients)
@I.ir_module
class UndefinedGradients:
    """An unused result of an operator has no gradient, and a gradient with numbers stays."""

    @R.function(private=True)
    def before(x: R.Tensor((3,), "float32"), g: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([3]), "float32")
            a = R.call_pure_packed(
                "library.operator_vjp",
                R.str("aten.frexp.Tensor"),
                R.str("..."),
                0,
                R.shape([0, 1]),
                x,
                g,
                zeros,
                ty_args=(R.Tensor((3,), "float32"),),
            )
            b = R.call_pure_packed(
                "library.operator_vjp",
                R.str("aten.frexp.Tensor"),
                R.str("..."),
                0,
                R.shape([0]),
                x,
                zeros,
                ty_args=(R.Tensor((3,), "float32"),),
            )
            R.output(a, b)
        return (a, b)

    @R.function(private=True)
    def expected(x: R.Tensor((3,), "float32"), g: R.Tensor((3,), "float32")):
        with R.dataflow():
            a = R.call_pure_packed(
                "library.operator_vjp",
                R.str("aten.frexp.Tensor"),
                R.str("..."),
                0,
                R.shape([0]),
                x,
                g,
                ty_args=(R.Tensor((3,), "float32"),),
            )
            b = R.zeros(R.shape([3]), "float32")
            R.output(a, b)
        return (a, b)


@golden(zero_zapp)
@I.ir_module
class ZeroZapp:
    """``x + 0`` and ``x - 0`` are ``x``, broadcast where the zeros gave the shape; ``0 - x`` stays."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([2, 3]), "float32")
            a = R.add(x, zeros)
            b = R.subtract(x, R.const(0.0, "float32"))
            c = R.add(zeros, y)
            d = R.subtract(zeros, x)
            R.output(a, b, c, d)
        return (a, b, c, d)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([2, 3]), "float32")
            c = R.broadcast_to(y, R.shape([2, 3]))
            d = R.subtract(zeros, x)
            R.output(c, d)
        return (x, x, c, d)


@golden(one_zapp)
@I.ir_module
class OneZapp:
    """``1 * x`` and ``x / 1`` are ``x``, broadcast where the ones gave the shape; ``1 / x`` stays."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
        with R.dataflow():
            ones = R.ones(R.shape([2, 3]), "float32")
            a = R.multiply(ones, x)
            b = R.divide(x, R.const(1.0, "float32"))
            c = R.multiply(y, ones)
            d = R.divide(ones, x)
            R.output(a, b, c, d)
        return (a, b, c, d)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
        with R.dataflow():
            ones = R.ones(R.shape([2, 3]), "float32")
            c = R.broadcast_to(y, R.shape([2, 3]))
            d = R.divide(ones, x)
            R.output(c, d)
        return (x, x, c, d)


@golden(common_subexpression_elimination)
@I.ir_module
class CommonSubexpressionElimination:
    """Equal values are computed once, under the first name; ``y * x`` is not ``x * y``."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            product = R.multiply(x, y)
            first = R.sum(product, axis=[0])
            same = R.multiply(x, y)
            second = R.sum(same, axis=[0])
            swapped = R.multiply(y, x)
            third = R.sum(swapped, axis=[1])
            R.output(first, second, third)
        return (first, second, third)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            product = R.multiply(x, y)
            first = R.sum(product, axis=[0])
            swapped = R.multiply(y, x)
            third = R.sum(swapped, axis=[1])
            R.output(first, third)
        return (first, first, third)


@golden(dead_code_elimination)
@I.ir_module
class DeadCodeElimination:
    """Bindings that no result needs are dropped, transitively."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            unread = R.log(x)
            also = R.exp(unread)
            y = R.sin(x)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.sin(x)
            R.output(y)
        return (y,)


@golden(clean)
@I.ir_module
class Clean:
    """All simplifications to a fixed point: reverse mode's leftovers are gone, and ``exp(x)`` is computed once."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), grad: R.Tensor((), "float32")):
        with R.dataflow():
            ones = R.ones_like(grad)
            seed = R.multiply(grad, ones)
            wide = R.broadcast_to(seed, R.shape([2, 3]))
            zeros = R.zeros_like(x)
            left = R.add(zeros, wide)
            transposed = R.permute_dims(x)
            back = R.permute_dims(transposed)
            y = R.exp(back)
            again = R.exp(x)
            dx = R.multiply(left, again)
            R.output(y, dx)
        return (y, dx)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), grad: R.Tensor((), "float32")):
        with R.dataflow():
            y = R.exp(x)
            dx = R.multiply(grad, y)
            R.output(y, dx)
        return (y, dx)
