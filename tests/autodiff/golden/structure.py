"""Before and expected of the passes that change structure: views, pads, products, dropout, names."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from autodiff import (
    deduplicate_views,
    fuse_bias_epilogues,
    join_pads,
    join_products,
    mask_dropout,
    sink_channel_permutes,
    sink_head_permutes,
    unique_names,
)
from tests.autodiff.golden import golden


@golden(join_pads)
@I.ir_module
class JoinPads:
    """Three disjoint paddings that are added up are one concatenation; the unfilled gap is zeros."""

    @R.function(private=True)
    def before(a: R.Tensor((3, 2), "float32"), b: R.Tensor((3, 3), "float32"), c: R.Tensor((3, 1), "float32")):
        with R.dataflow():
            p = R.nn.pad(a, (0, 0, 3, 3))
            q = R.nn.pad(b, (0, 0, 0, 5))
            r = R.nn.pad(c, (0, 0, 7, 0))
            s = R.add(p, q)
            y = R.add(r, s)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(a: R.Tensor((3, 2), "float32"), b: R.Tensor((3, 3), "float32"), c: R.Tensor((3, 1), "float32")):
        with R.dataflow():
            gap = R.zeros(R.shape([3, 2]), "float32")
            y = R.concat((b, a, gap, c), axis=1)
            R.output(y)
        return (y,)


@golden(deduplicate_views)
@I.ir_module
class DeduplicateViews:
    """A view of a view is one view; ``multiply`` reads the narrow row, ``exp`` runs before the broadcast; casts go."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32"), row: R.Tensor((4,), "float32"), h: R.Tensor((2,), "float16")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 0, 2])
            b = R.permute_dims(a, axes=[2, 1, 0])
            c = R.reshape(x, R.shape([6, 4]))
            d = R.reshape(c, R.shape([24]))
            wide = R.broadcast_to(row, R.shape([2, 3, 4]))
            e = R.multiply(x, wide)
            f = R.exp(wide)
            up = R.astype(h, "float32")
            g = R.astype(up, "float16")
            R.output(b, d, e, f, g)
        return (b, d, e, f, g)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32"), row: R.Tensor((4,), "float32"), h: R.Tensor((2,), "float16")):
        with R.dataflow():
            b = R.permute_dims(x, axes=[2, 0, 1])
            d = R.reshape(x, R.shape([24]))
            e = R.multiply(x, row)
            narrow = R.exp(row)
            f = R.broadcast_to(narrow, R.shape([2, 3, 4]))
            R.output(b, d, e, f)
        return (b, d, e, f, h)


@golden(join_products)
@I.ir_module
class JoinProducts:
    """Two gradients of one weight are one product along a longer inner axis; the other term stays a sum."""

    @R.function(private=True)
    def before(
        x: R.Tensor((2, 8), "float32"),
        g: R.Tensor((2, 9), "float32"),
        y: R.Tensor((3, 8), "float32"),
        h: R.Tensor((3, 9), "float32"),
        other: R.Tensor((8, 9), "float32"),
    ):
        with R.dataflow():
            a = R.permute_dims(x)
            first = R.matmul(a, g)
            s = R.add(first, other)
            b = R.permute_dims(y, axes=[1, 0])
            second = R.matmul(b, h)
            total = R.add(s, second)
            R.output(total)
        return (total,)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 8), "float32"),
        g: R.Tensor((2, 9), "float32"),
        y: R.Tensor((3, 8), "float32"),
        h: R.Tensor((3, 9), "float32"),
        other: R.Tensor((8, 9), "float32"),
    ):
        with R.dataflow():
            joined = R.concat((x, y), axis=0)
            joined_1 = R.permute_dims(joined)
            joined_2 = R.concat((g, h), axis=0)
            sum = R.matmul(joined_1, joined_2, out_dtype="float32")
            total = R.add(other, sum)
            R.output(total)
        return (total,)


@golden(unique_names)
@I.ir_module
class UniqueNames:
    """A variable whose name an earlier one has is renamed."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.exp(x)
            y = R.add(y, x)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.exp(x)
            y_1 = R.add(y, x)
            R.output(y_1)
        return (y_1,)


@golden(mask_dropout)
@I.ir_module
class MaskDropout:
    """Each dropout multiplies by a mask that is a new parameter, in the order of the dropouts."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), z: R.Tensor((4,), "float32")):
        with R.dataflow():
            pair = R.nn.dropout(z, rate=0.5)
            w = pair[0]
            second = R.nn.dropout(x, rate=0.75)
            y = second[0]
            R.output(w, y)
        return (w, y)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 3), "float32"),
        z: R.Tensor((4,), "float32"),
        mask_0: R.Tensor((4,), "bool"),
        mask_1: R.Tensor((2, 3), "bool"),
    ):
        with R.dataflow():
            mask_0_noise = R.astype(mask_0, "float32")
            mask_0_scaled = R.multiply(mask_0_noise, R.const(2.0, "float32"))
            mask_0_dropout = R.multiply(z, mask_0_scaled)
            mask_1_noise = R.astype(mask_1, "float32")
            mask_1_scaled = R.multiply(mask_1_noise, R.const(4.0, "float32"))
            mask_1_dropout = R.multiply(x, mask_1_scaled)
            R.output(mask_0_dropout, mask_1_dropout)
        return (mask_0_dropout, mask_1_dropout)


@golden(sink_channel_permutes)
@I.ir_module
class SinkChannelPermutes:
    """Point-wise operators and a mean on the convolution's own order; the result is permuted back."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4, 5), "float32"), w: R.Tensor((6, 3, 1, 1), "float32")):
        with R.dataflow():
            c = R.call_pure_packed(
                "library.convolution_last",
                x,
                w,
                R.shape([1, 1]),
                R.shape([0, 0]),
                R.shape([1, 1]),
                R.shape([0, 0]),
                0,
                1,
                ty_args=(R.Tensor((2, 4, 5, 6), "float32"),),
            )
            y = R.permute_dims(c, axes=[0, 3, 1, 2])
            z = R.nn.relu(y)
            m = R.mean(z, axis=[2, 3])
            R.output(z, m)
        return (z, m)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4, 5), "float32"), w: R.Tensor((6, 3, 1, 1), "float32")):
        with R.dataflow():
            c = R.call_pure_packed(
                "library.convolution_last",
                x,
                w,
                R.shape([1, 1]),
                R.shape([0, 0]),
                R.shape([1, 1]),
                R.shape([0, 0]),
                0,
                1,
                ty_args=(R.Tensor((2, 4, 5, 6), "float32"),),
            )
            z_last = R.nn.relu(c)
            z = R.permute_dims(z_last, axes=[0, 3, 1, 2])
            m = R.mean(z_last, axis=[1, 2])
            R.output(z, m)
        return (z, m)


@golden(sink_channel_permutes)
@I.ir_module
class ColumnsOfAPermutation:
    """A sum that keeps the permuted operand's last axis sinks; a permutation whose sums keep another axis stays."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 4, 5, 6), "float32"), a: R.Tensor((2, 6, 4, 5), "float32")):
        with R.dataflow():
            y = R.permute_dims(x, axes=[0, 3, 1, 2])
            z = R.negative(y)
            m = R.mean(z, axis=[0, 2, 3], keepdims=True)
            c = R.concat((z, a), axis=1)
            s = R.strided_slice(c, axes=[1, 3], begin=[2, 0], end=[9, 3])
            b = R.permute_dims(s, axes=[0, 2, 3, 1])
            p = R.permute_dims(a, axes=[0, 3, 1, 2])
            q = R.sum(p, axis=[0, 1, 2])
            R.output(m, b, q)
        return (m, b, q)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 4, 5, 6), "float32"), a: R.Tensor((2, 6, 4, 5), "float32")):
        with R.dataflow():
            z_last = R.negative(x)
            m_last = R.mean(z_last, axis=[0, 1, 2], keepdims=True)
            m = R.permute_dims(m_last, axes=[0, 3, 1, 2])
            lv = R.permute_dims(a, axes=[0, 2, 3, 1])
            c_last = R.concat((z_last, lv), axis=3)
            s_last = R.strided_slice(c_last, axes=[3, 2], begin=[2, 0], end=[9, 3])
            b = R.permute_dims(s_last, axes=[0, 1, 2, 3])
            p = R.permute_dims(a, axes=[0, 3, 1, 2])
            q = R.sum(p, axis=[0, 1, 2])
            R.output(m, b, q)
        return (m, b, q)


@golden(sink_channel_permutes)
@I.ir_module
class GroupsOfChannels:
    """A permutation turned back; its channels are cut into groups and joined again. Rows and columns are no neighbours
    of channels in memory: a reshape that joins them stays."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 6, 4, 5), "float32")):
        with R.dataflow():
            b = R.permute_dims(x, axes=[0, 2, 3, 1])
            y = R.permute_dims(b, axes=[0, 3, 1, 2])
            g = R.reshape(y, R.shape([2, 3, 2, 4, 5]))
            m = R.sum(g, axis=[2, 3, 4])
            e = R.exp(g)
            z = R.reshape(e, R.shape([2, 6, 4, 5]))
            r = R.reshape(z, R.shape([2, 120]))
            o = R.permute_dims(z, axes=[0, 2, 3, 1])
            n = R.permute_dims(o, axes=[0, 3, 1, 2])
            h = R.negative(n)
            R.output(m, r, h)
        return (m, r, h)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 6, 4, 5), "float32")):
        with R.dataflow():
            b = R.permute_dims(x, axes=[0, 2, 3, 1])
            g_last = R.reshape(b, R.shape([2, 4, 5, 3, 2]))
            m = R.sum(g_last, axis=[1, 2, 4])
            e_last = R.exp(g_last)
            z_last = R.reshape(e_last, R.shape([2, 4, 5, 6]))
            z = R.permute_dims(z_last, axes=[0, 3, 1, 2])
            r = R.reshape(z, R.shape([2, 120]))
            h_last = R.negative(z_last)
            h = R.permute_dims(h_last, axes=[0, 3, 1, 2])
            R.output(m, r, h)
        return (m, r, h)


@golden(sink_head_permutes)
@I.ir_module
class SinkHeadPermutes:
    """A rotation of queries where rows lie outside of heads; keys are an argument, values another order."""

    @R.function(private=True)
    def before(
        x: R.Tensor((2, 5, 3, 4), "float32"),
        k: R.Tensor((2, 3, 5, 4), "float32"),
        c: R.Tensor((1, 1, 5, 4), "float32"),
    ):
        with R.dataflow():
            q = R.permute_dims(x, axes=[0, 2, 1, 3])
            a = R.strided_slice(q, axes=[3], begin=[2], end=[4])
            b = R.strided_slice(q, axes=[3], begin=[0], end=[2])
            n = R.negative(a)
            t = R.concat((n, b), axis=3)
            z = R.multiply(t, c)
            v = R.negative(k)
            o = R.call_pure_packed(
                "library.attention",
                R.str("flash"),
                z,
                k,
                v,
                0,
                0,
                R.prim_value(0.5),
                ty_args=(R.Tuple(R.Tensor((2, 5, 3, 4), "float32"), R.Tensor((2, 3, 5), "float32")),),
            )
            y = o[0]
            R.output(y)
        return (y,)

    @R.function(private=True)
    def expected(
        x: R.Tensor((2, 5, 3, 4), "float32"),
        k: R.Tensor((2, 3, 5, 4), "float32"),
        c: R.Tensor((1, 1, 5, 4), "float32"),
    ):
        with R.dataflow():
            a_rows = R.strided_slice(x, axes=[3], begin=[2], end=[4])
            b_rows = R.strided_slice(x, axes=[3], begin=[0], end=[2])
            n_rows = R.negative(a_rows)
            t_rows = R.concat((n_rows, b_rows), axis=3)
            lv = R.reshape(c, R.shape([1, 5, 1, 4]))
            z_rows = R.multiply(t_rows, lv)
            z = R.permute_dims(z_rows, axes=[0, 2, 1, 3])
            v = R.negative(k)
            o = R.call_pure_packed(
                "library.attention",
                R.str("flash"),
                z,
                k,
                v,
                0,
                0,
                R.prim_value(0.5),
                ty_args=(R.Tuple(R.Tensor((2, 5, 3, 4), "float32"), R.Tensor((2, 3, 5), "float32")),),
            )
            y = o[0]
            R.output(y)
        return (y,)


@golden(fuse_bias_epilogues)
@I.ir_module
class FuseBiasEpilogues:
    """The product's own reader adds a vector, behind a reshape: one call; a product that two read stays."""

    @R.function(private=True)
    def before(x: R.Tensor((256, 16), "float16"), w: R.Tensor((16, 8), "float16"), b: R.Tensor((8,), "float16")):
        with R.dataflow():
            p = R.matmul(x, w)
            q = R.reshape(p, R.shape([2, 128, 8]))
            y = R.add(q, b)
            r = R.matmul(x, w)
            s = R.add(r, b)
            u = R.negative(r)
            R.output(y, s, u)
        return (y, s, u)

    @R.function(private=True)
    def expected(x: R.Tensor((256, 16), "float16"), w: R.Tensor((16, 8), "float16"), b: R.Tensor((8,), "float16")):
        with R.dataflow():
            y = R.call_pure_packed(
                "library.matmul_bias", x, w, b, R.shape([2, 128, 8]), ty_args=(R.Tensor((2, 128, 8), "float16"),)
            )
            r = R.matmul(x, w)
            s = R.add(r, b)
            u = R.negative(r)
            R.output(y, s, u)
        return (y, s, u)
