"""Before and expected of the passes for inference; the first parameters are frozen."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from autodiff.inference import fold_scales, merge_products
from tests.autodiff.golden import golden


@golden(fold_scales, frozen=3)
@I.ir_module
class ScaleAndShift:
    """The scale goes into the weight, which stays a transpose; the shift behind it is added as it was."""

    @R.function(private=True)
    def before(
        w: R.Tensor((4, 6), "float32"),
        s: R.Tensor((4,), "float32"),
        t: R.Tensor((4,), "float32"),
        x: R.Tensor((5, 6), "float32"),
    ):
        with R.dataflow():
            p = R.matmul(x, R.permute_dims(w))
            q = R.multiply(p, s)
            y = R.add(q, t)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(
        w: R.Tensor((4, 6), "float32"),
        s: R.Tensor((4,), "float32"),
        t: R.Tensor((4,), "float32"),
        x: R.Tensor((5, 6), "float32"),
    ):
        with R.dataflow():
            p_scale = R.multiply(R.const(1.0, "float32"), s)
            p_channels = R.reshape(p_scale, R.shape([4, 1]))
            p_weight = R.multiply(w, p_channels)
            p_weight_1 = R.permute_dims(p_weight)
            p_1 = R.matmul(x, p_weight_1)
            y = R.add(p_1, t)
            R.output(y)
        return (y,)


@golden(merge_products, frozen=2)
@I.ir_module
class TwoProductsOfOneInput:
    """One product with the weights side by side, and its two parts."""

    @R.function(private=True)
    def before(a: R.Tensor((6, 4), "float32"), b: R.Tensor((6, 3), "float32"), x: R.Tensor((5, 6), "float32")):
        with R.dataflow():
            p = R.matmul(x, a)
            q = R.matmul(x, b)
            y = R.exp(p)
            R.output(y, q)
        return (y, q)

    @R.function(private=True)
    def expected(a: R.Tensor((6, 4), "float32"), b: R.Tensor((6, 3), "float32"), x: R.Tensor((5, 6), "float32")):
        with R.dataflow():
            merged_weight = R.concat((a, b), axis=1)
            merged = R.matmul(x, merged_weight, out_dtype="float32")
            p = R.strided_slice(merged, (1,), (0,), (4,), assume_inbound=False)
            q = R.strided_slice(merged, (1,), (4,), (7,), assume_inbound=False)
            y = R.exp(p)
            R.output(y, q)
        return (y, q)
