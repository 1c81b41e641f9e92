"""Before and expected of differentiation: seeding the VJP, folding normalizations, the joint function."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from autodiff import differentiate, drop_gradients, seed_vjp
from autodiff.ir import Function, bindings, results, with_outputs
from autodiff.normalization import fold_normalizations
from tests.autodiff.golden import golden


def fold(func: Function) -> Function:
    """:func:`fold_normalizations`, which takes bindings, of a function with one result."""
    (result,), body = results(func), list(bindings(func))
    folded = fold_normalizations(body, result)
    return func if folded is body else with_outputs(func, folded, [result])


@golden(seed_vjp, outputs=[0, 1])
@I.ir_module
class SeedVjp:
    """The first result is the scalar whose gradients are the vector-Jacobian products of both outputs."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            y = R.multiply(x, w)
            z = R.exp(w)
            R.output(y, z)
        return (y, z)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((3,), "float32"),
        grad_out_0: R.Tensor((2, 3), "float32"),
        grad_out_1: R.Tensor((3,), "float32"),
    ):
        with R.dataflow():
            y = R.multiply(x, w)
            z = R.exp(w)
            weighted_0 = R.multiply(y, grad_out_0)
            vjp_0 = R.sum(weighted_0)
            weighted_1 = R.multiply(z, grad_out_1)
            vjp_1 = R.sum(weighted_1)
            vjp = R.add(vjp_0, vjp_1)
            R.output(y, z, vjp)
        return (vjp, y, z)


@golden(seed_vjp, outputs=[1])
@I.ir_module
class SeedVjpOfHalfTypes:
    """A half type's scalar is in float32."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), h: R.Tensor((2,), "bfloat16")):
        with R.dataflow():
            y = R.exp(h)
            R.output(y)
        return (x, y)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), h: R.Tensor((2,), "bfloat16"), grad_out_1: R.Tensor((2,), "bfloat16")):
        with R.dataflow():
            y = R.exp(h)
            wide_1 = R.astype(y, "float32")
            grad_out_1_wide = R.astype(grad_out_1, "float32")
            weighted_1 = R.multiply(wide_1, grad_out_1_wide)
            vjp_1 = R.sum(weighted_1)
            R.output(y, vjp_1)
        return (vjp_1, x, y)


@golden(differentiate, outputs=[0], require_grads=[1, 2])
@I.ir_module
class Differentiate:
    """The gradient of ``w`` in the forward's own variables; a parameter that no output needs gets zeros."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), unused: R.Tensor((5,), "float32")):
        with R.dataflow():
            h = R.matmul(x, w)
            y = R.tanh(h)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((3, 4), "float32"),
        unused: R.Tensor((5,), "float32"),
        grad_out_0: R.Tensor((2, 4), "float32"),
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            y = R.tanh(h)
            bw = R.ones(R.shape([]), "float32")
            bw_1 = R.reshape(bw, R.shape([1, 1]))
            bw_2 = R.broadcast_to(bw_1, R.shape([2, 4]))
            bw_3 = R.multiply(bw_2, grad_out_0)
            bw_4 = R.multiply(y, y)
            bw_5 = R.subtract(R.const(1.0, "float32"), bw_4)
            bw_6 = R.multiply(bw_3, bw_5)
            bw_7 = R.reshape(bw_6, R.shape([2, 4]))
            bw_8 = R.permute_dims(x, axes=[1, 0])
            grad_w = R.matmul(bw_8, bw_7)
            grad_unused = R.zeros(R.shape([5]), "float32")
            R.output(y, grad_w, grad_unused)
        return (y, grad_w, grad_unused)


@golden(differentiate, outputs=[0], require_grads=[0])
@I.ir_module
class StopGradient:
    """``no_grad(x)`` stops gradients and becomes ``x``."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            e = R.exp(x)
            stopped = R.grad.no_grad(e)
            y = R.multiply(stopped, x)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), grad_out_0: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            e = R.exp(x)
            y = R.multiply(e, x)
            bw = R.ones(R.shape([]), "float32")
            bw_1 = R.reshape(bw, R.shape([1, 1]))
            bw_2 = R.broadcast_to(bw_1, R.shape([2, 3]))
            bw_3 = R.multiply(bw_2, grad_out_0)
            grad_x = R.multiply(bw_3, e)
            R.output(y, grad_x)
        return (y, grad_x)


@golden(drop_gradients)
@I.ir_module
class DropGradients:
    """The backward of a custom autograd Function is dropped where nothing is differentiated."""

    @R.function(private=True)
    def before(x: R.Tensor((3,), "float32")):
        with R.dataflow():
            y = R.sin(x)
            t = R.call_pure_packed("library.tangent", y, 0, 0, ty_args=(R.Tensor((3,), "float32"),))
            g = R.multiply(t, x)
            both = R.call_pure_packed(
                "library.custom_gradient", 1, x, g, t, ty_args=(R.Tuple(R.Tensor((3,), "float32")),)
            )
            field = both[0]
            out = R.call_pure_packed("library.with_derivative", y, field, ty_args=(R.Tensor((3,), "float32"),))
            z = R.exp(out)
            R.output(z)
        return (z,)

    @R.function(private=True)
    def expected(x: R.Tensor((3,), "float32")):
        with R.dataflow():
            y = R.sin(x)
            z = R.exp(y)
            R.output(z)
        return (z,)


@golden(fold)
@I.ir_module
class FoldLayerNorm:
    """``y`` becomes one function of the centred ``x`` and ``rstd``."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            mean = R.mean(x, axis=[1], keepdims=True)
            centred = R.subtract(x, mean)
            squared = R.square(centred)
            variance = R.mean(squared, axis=[1], keepdims=True)
            shifted = R.add(variance, R.const(0.5, "float32"))
            rstd = R.rsqrt(shifted)
            y = R.multiply(centred, rstd)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            mean = R.mean(x, axis=[1], keepdims=True)
            centred = R.subtract(x, mean)
            squared = R.square(centred)
            variance = R.mean(squared, axis=[1], keepdims=True)
            shifted = R.add(variance, R.const(0.5, "float32"))
            rstd = R.rsqrt(shifted)
            y = R.call_pure_packed("library.normalize", x, rstd, 1, ty_args=(R.Tensor((2, 3), "float32"),))
            R.output(y)
        return (y,)


@golden(fold)
@I.ir_module
class FoldRMSNorm:
    """``scaled`` is one function of ``x`` and ``rstd``; the moment that ``y`` reads stays."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            squared = R.multiply(x, x)
            moment = R.mean(squared, axis=[1], keepdims=True)
            rstd = R.rsqrt(moment)
            scaled = R.multiply(rstd, x)
            y = R.add(scaled, moment)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            squared = R.multiply(x, x)
            moment = R.mean(squared, axis=[1], keepdims=True)
            rstd = R.rsqrt(moment)
            scaled = R.call_pure_packed("library.normalize", x, rstd, 0, ty_args=(R.Tensor((2, 3), "float32"),))
            y = R.add(scaled, moment)
            R.output(y)
        return (y,)
