"""Before and expected of the decomposition of every normalization."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from autodiff import spell_out
from tests.autodiff.golden import golden


@golden(spell_out)
@I.ir_module
class LayerNorm:
    """Mean, centred variance, rstd, multiply and add."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), gamma: R.Tensor((3,), "float32"), beta: R.Tensor((3,), "float32")):
        with R.dataflow():
            y = R.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=0.5)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), gamma: R.Tensor((3,), "float32"), beta: R.Tensor((3,), "float32")):
        with R.dataflow():
            layer_norm_mean = R.mean(x, axis=[1], keepdims=True)
            layer_norm_centred = R.subtract(x, layer_norm_mean)
            layer_norm_squared = R.square(layer_norm_centred)
            layer_norm_variance = R.mean(layer_norm_squared, axis=[1], keepdims=True)
            layer_norm_shifted = R.add(layer_norm_variance, R.const(0.5, "float32"))
            layer_norm_rstd = R.rsqrt(layer_norm_shifted)
            layer_norm_normalized = R.multiply(layer_norm_centred, layer_norm_rstd)
            layer_norm_scaled = R.multiply(layer_norm_normalized, gamma)
            y = R.add(layer_norm_scaled, beta)
            R.output(y)
        return (y,)


@golden(spell_out)
@I.ir_module
class HalfLayerNorm:
    """Half types are normalized in float32 and rounded once."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float16"), gamma: R.Tensor((3,), "float16"), beta: R.Tensor((3,), "float16")):
        with R.dataflow():
            y = R.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=0.5)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float16"), gamma: R.Tensor((3,), "float16"), beta: R.Tensor((3,), "float16")):
        with R.dataflow():
            layer_norm_wide = R.astype(x, "float32")
            layer_norm_mean = R.mean(layer_norm_wide, axis=[1], keepdims=True)
            layer_norm_centred = R.subtract(layer_norm_wide, layer_norm_mean)
            layer_norm_squared = R.square(layer_norm_centred)
            layer_norm_variance = R.mean(layer_norm_squared, axis=[1], keepdims=True)
            layer_norm_shifted = R.add(layer_norm_variance, R.const(0.5, "float32"))
            layer_norm_rstd = R.rsqrt(layer_norm_shifted)
            layer_norm_normalized = R.multiply(layer_norm_centred, layer_norm_rstd)
            layer_norm_scale = R.astype(gamma, "float32")
            layer_norm_scaled = R.multiply(layer_norm_normalized, layer_norm_scale)
            layer_norm_offset = R.astype(beta, "float32")
            layer_norm_shifted_1 = R.add(layer_norm_scaled, layer_norm_offset)
            y = R.astype(layer_norm_shifted_1, "float16")
            R.output(y)
        return (y,)
