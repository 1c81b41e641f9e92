"""Before and expected of the decomposition of every normalization."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from autodiff import spell_out
from tests.autodiff.golden import golden

__all__ = []


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


@golden(spell_out)
@I.ir_module
class RMSNorm:
    """Mean of squares, rstd and multiply."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), weight: R.Tensor((3,), "float32")):
        with R.dataflow():
            y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=0.5)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), weight: R.Tensor((3,), "float32")):
        with R.dataflow():
            rms_norm_squared = R.square(x)
            rms_norm_moment = R.mean(rms_norm_squared, axis=[1], keepdims=True)
            rms_norm_shifted = R.add(rms_norm_moment, R.const(0.5, "float32"))
            rms_norm_rstd = R.rsqrt(rms_norm_shifted)
            rms_norm_normalized = R.multiply(x, rms_norm_rstd)
            y = R.multiply(rms_norm_normalized, weight)
            R.output(y)
        return (y,)


@golden(spell_out)
@I.ir_module
class GroupNorm:
    """The channels of a group are an axis of their own while they are normalized."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 4, 5), "float32"), gamma: R.Tensor((4,), "float32"), beta: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.nn.group_norm(x, gamma, beta, num_groups=2, channel_axis=1, axes=[2], epsilon=0.5)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 4, 5), "float32"), gamma: R.Tensor((4,), "float32"), beta: R.Tensor((4,), "float32")):
        with R.dataflow():
            group_norm_groups = R.reshape(x, R.shape([2, 2, 2, 5]))
            group_norm_mean = R.mean(group_norm_groups, axis=[2, 3], keepdims=True)
            group_norm_centred = R.subtract(group_norm_groups, group_norm_mean)
            group_norm_squared = R.square(group_norm_centred)
            group_norm_variance = R.mean(group_norm_squared, axis=[2, 3], keepdims=True)
            group_norm_shifted = R.add(group_norm_variance, R.const(0.5, "float32"))
            group_norm_rstd = R.rsqrt(group_norm_shifted)
            group_norm_normalized = R.multiply(group_norm_centred, group_norm_rstd)
            group_norm_ungrouped = R.reshape(group_norm_normalized, R.shape([2, 4, 5]))
            group_norm_channel = R.reshape(gamma, R.shape([4, 1]))
            group_norm_channel_1 = R.reshape(beta, R.shape([4, 1]))
            group_norm_scaled = R.multiply(group_norm_ungrouped, group_norm_channel)
            y = R.add(group_norm_scaled, group_norm_channel_1)
            R.output(y)
        return (y,)


@golden(spell_out)
@I.ir_module
class InstanceNorm:
    """As LayerNorm, with one weight per channel."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 4, 5), "float32"), gamma: R.Tensor((4,), "float32"), beta: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.nn.instance_norm(x, gamma, beta, channel_axis=1, axes=[2], epsilon=0.5)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 4, 5), "float32"), gamma: R.Tensor((4,), "float32"), beta: R.Tensor((4,), "float32")):
        with R.dataflow():
            instance_norm_mean = R.mean(x, axis=[2], keepdims=True)
            instance_norm_centred = R.subtract(x, instance_norm_mean)
            instance_norm_squared = R.square(instance_norm_centred)
            instance_norm_variance = R.mean(instance_norm_squared, axis=[2], keepdims=True)
            instance_norm_shifted = R.add(instance_norm_variance, R.const(0.5, "float32"))
            instance_norm_rstd = R.rsqrt(instance_norm_shifted)
            instance_norm_normalized = R.multiply(instance_norm_centred, instance_norm_rstd)
            instance_norm_channel = R.reshape(gamma, R.shape([4, 1]))
            instance_norm_channel_1 = R.reshape(beta, R.shape([4, 1]))
            instance_norm_scaled = R.multiply(instance_norm_normalized, instance_norm_channel)
            y = R.add(instance_norm_scaled, instance_norm_channel_1)
            R.output(y)
        return (y,)


@golden(spell_out)
@I.ir_module
class BatchNorm:
    """Batch statistics, and the running averages of the *biased* variance, as TVM's operator has it."""

    @R.function(private=True)
    def before(
        x: R.Tensor((2, 4, 5), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
        running_mean: R.Tensor((4,), "float32"),
        running_variance: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            triple = R.nn.batch_norm(
                x, gamma, beta, running_mean, running_variance, axis=1, epsilon=0.5, momentum=0.25, training=True
            )
            y = triple[0]
            new_mean = triple[1]
            new_variance = triple[2]
            R.output(y, new_mean, new_variance)
        return (y, new_mean, new_variance)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 4, 5), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
        running_mean: R.Tensor((4,), "float32"),
        running_variance: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            batch_norm_mean = R.mean(x, axis=[0, 2], keepdims=True)
            batch_norm_centred = R.subtract(x, batch_norm_mean)
            batch_norm_squared = R.square(batch_norm_centred)
            batch_norm_variance = R.mean(batch_norm_squared, axis=[0, 2], keepdims=True)
            batch_norm_shifted = R.add(batch_norm_variance, R.const(0.5, "float32"))
            batch_norm_rstd = R.rsqrt(batch_norm_shifted)
            batch_norm_normalized = R.multiply(batch_norm_centred, batch_norm_rstd)
            batch_norm_mean_1 = R.reshape(batch_norm_mean, R.shape([4]))
            batch_norm_variance_1 = R.reshape(batch_norm_variance, R.shape([4]))
            batch_norm_channel = R.reshape(gamma, R.shape([4, 1]))
            batch_norm_channel_1 = R.reshape(beta, R.shape([4, 1]))
            batch_norm_scaled = R.multiply(batch_norm_normalized, batch_norm_channel)
            batch_norm_shifted_1 = R.add(batch_norm_scaled, batch_norm_channel_1)
            running_mean_remaining = R.multiply(running_mean, R.const(0.75, "float32"))
            running_mean_new = R.multiply(batch_norm_mean_1, R.const(0.25, "float32"))
            running_mean_average = R.add(running_mean_remaining, running_mean_new)
            running_variance_remaining = R.multiply(running_variance, R.const(0.75, "float32"))
            running_variance_new = R.multiply(batch_norm_variance_1, R.const(0.25, "float32"))
            running_variance_average = R.add(running_variance_remaining, running_variance_new)
            triple = (batch_norm_shifted_1, running_mean_average, running_variance_average)
            y = triple[0]
            new_mean = triple[1]
            new_variance = triple[2]
            R.output(y, new_mean, new_variance)
        return (y, new_mean, new_variance)


@golden(spell_out)
@I.ir_module
class BatchNormInference:
    """Given statistics; the running averages pass through."""

    @R.function(private=True)
    def before(
        x: R.Tensor((2, 4, 5), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
        running_mean: R.Tensor((4,), "float32"),
        running_variance: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            triple = R.nn.batch_norm(
                x, gamma, beta, running_mean, running_variance, axis=1, epsilon=0.5, momentum=0.25, training=False
            )
            y = triple[0]
            mean = triple[1]
            R.output(y, mean)
        return (y, mean)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 4, 5), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
        running_mean: R.Tensor((4,), "float32"),
        running_variance: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            batch_norm_shifted = R.add(running_variance, R.const(0.5, "float32"))
            batch_norm_rstd = R.rsqrt(batch_norm_shifted)
            batch_norm_channel = R.reshape(running_mean, R.shape([4, 1]))
            batch_norm_channel_1 = R.reshape(batch_norm_rstd, R.shape([4, 1]))
            batch_norm_channel_2 = R.reshape(gamma, R.shape([4, 1]))
            batch_norm_channel_3 = R.reshape(beta, R.shape([4, 1]))
            batch_norm_centred = R.subtract(x, batch_norm_channel)
            batch_norm_normalized = R.multiply(batch_norm_centred, batch_norm_channel_1)
            batch_norm_scaled = R.multiply(batch_norm_normalized, batch_norm_channel_2)
            batch_norm_shifted_1 = R.add(batch_norm_scaled, batch_norm_channel_3)
            triple = (batch_norm_shifted_1, running_mean, running_variance)
            y = triple[0]
            mean = triple[1]
            R.output(y, mean)
        return (y, mean)
