"""Every pass of partition, and every strategy with a name, against golden joint, forward and backward functions."""

from __future__ import annotations

import pytest
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import partition as package
from autodiff import Body
from autodiff.ir import Function, TensorType, TupleGetItem, Var, bindings, build_function, results
from autodiff.scan import Scan, backward_of, body_text, is_scan, scan_call, scan_of
from partition import STRATEGIES, differentiable_scans, partition, rebuild_backward
from partition.graph import normalize
from tests.autodiff.golden import assert_same, is_pass


@I.ir_module
class Product:
    """``sin(exp(x @ w)) @ v`` and two gradients; ``save_all`` saves ``e`` and ``s``, ``min_cut`` ``e`` alone."""

    @R.function(private=True)
    def joint(
        x: R.Tensor((4, 8), "float32"),
        w: R.Tensor((8, 16), "float32"),
        v: R.Tensor((16, 8), "float32"),
        grad_out_0: R.Tensor((4, 8), "float32"),
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            e = R.exp(h)
            s = R.sin(e)
            y = R.matmul(s, v)
            st = R.permute_dims(s)
            grad_v = R.matmul(st, grad_out_0)
            vt = R.permute_dims(v)
            ds = R.matmul(grad_out_0, vt)
            c = R.cos(e)
            de = R.multiply(ds, c)
            dh = R.multiply(de, e)
            xt = R.permute_dims(x)
            grad_w = R.matmul(xt, dh)
            R.output(y, grad_w, grad_v)
        return (y, grad_w, grad_v)

    @R.function(private=True)
    def save_all_forward(
        x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 16), "float32"), v: R.Tensor((16, 8), "float32")
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            e = R.exp(h)
            s = R.sin(e)
            y = R.matmul(s, v)
            R.output(e, s, y)
        return (y, e, s)

    @R.function(private=True)
    def save_all_backward(
        x: R.Tensor((4, 8), "float32"),
        v: R.Tensor((16, 8), "float32"),
        e: R.Tensor((4, 16), "float32"),
        s: R.Tensor((4, 16), "float32"),
        grad_out_0: R.Tensor((4, 8), "float32"),
    ):
        with R.dataflow():
            vt = R.permute_dims(v)
            ds = R.matmul(grad_out_0, vt)
            c = R.cos(e)
            de = R.multiply(ds, c)
            dh = R.multiply(de, e)
            xt = R.permute_dims(x)
            grad_w = R.matmul(xt, dh)
            st = R.permute_dims(s)
            grad_v = R.matmul(st, grad_out_0)
            R.output(grad_w, grad_v)
        return (grad_w, grad_v)

    @R.function(private=True)
    def recompute_all_forward(
        x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 16), "float32"), v: R.Tensor((16, 8), "float32")
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            e = R.exp(h)
            s = R.sin(e)
            y = R.matmul(s, v)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def recompute_all_backward(
        x: R.Tensor((4, 8), "float32"),
        w: R.Tensor((8, 16), "float32"),
        v: R.Tensor((16, 8), "float32"),
        grad_out_0: R.Tensor((4, 8), "float32"),
    ):
        with R.dataflow():
            vt = R.permute_dims(v)
            ds = R.matmul(grad_out_0, vt)
            h = R.matmul(x, w)
            e = R.exp(h)
            c = R.cos(e)
            de = R.multiply(ds, c)
            dh = R.multiply(de, e)
            xt = R.permute_dims(x)
            grad_w = R.matmul(xt, dh)
            s = R.sin(e)
            st = R.permute_dims(s)
            grad_v = R.matmul(st, grad_out_0)
            R.output(grad_w, grad_v)
        return (grad_w, grad_v)

    @R.function(private=True)
    def min_cut_forward(
        x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 16), "float32"), v: R.Tensor((16, 8), "float32")
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            e = R.exp(h)
            s = R.sin(e)
            y = R.matmul(s, v)
            R.output(e, y)
        return (y, e)

    @R.function(private=True)
    def min_cut_backward(
        x: R.Tensor((4, 8), "float32"),
        v: R.Tensor((16, 8), "float32"),
        e: R.Tensor((4, 16), "float32"),
        grad_out_0: R.Tensor((4, 8), "float32"),
    ):
        with R.dataflow():
            s = R.sin(e)
            st = R.permute_dims(s)
            grad_v = R.matmul(st, grad_out_0)
            vt = R.permute_dims(v)
            ds = R.matmul(grad_out_0, vt)
            c = R.cos(e)
            de = R.multiply(ds, c)
            dh = R.multiply(de, e)
            xt = R.permute_dims(x)
            grad_w = R.matmul(xt, dh)
            R.output(grad_v, grad_w)
        return (grad_w, grad_v)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partition(strategy):
    """A strategy without a forward and a backward above fails here."""
    parts = partition(Product["joint"], num_primals=3, num_outputs=1, strategy=strategy)
    assert_same(parts.forward, Product[f"{strategy}_forward"])
    assert_same(parts.backward, Product[f"{strategy}_backward"])


@I.ir_module
class OtherGradient:
    """The backward of ``partial``, which has one grad_out, from the saved tensors of ``joint``: ``y`` and ``e``."""

    @R.function(private=True)
    def joint(
        x: R.Tensor((4,), "float32"), grad_out_0: R.Tensor((4,), "float32"), grad_out_1: R.Tensor((4,), "float32")
    ):
        with R.dataflow():
            y = R.exp(x)
            e = R.sin(x)
            z = R.multiply(e, e)
            bw = R.multiply(grad_out_0, y)
            bw_1 = R.multiply(grad_out_1, e)
            grad_x = R.add(bw, bw_1)
            R.output(y, z, grad_x)
        return (y, z, grad_x)

    @R.function(private=True)
    def partial(x: R.Tensor((4,), "float32"), grad_out_1: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.exp(x)
            e = R.sin(x)
            z = R.multiply(e, e)
            half = R.multiply(e, R.const(0.5, "float32"))
            grad_x = R.multiply(grad_out_1, half)
            R.output(y, z, grad_x)
        return (y, z, grad_x)

    @R.function(private=True)
    def backward(y: R.Tensor((4,), "float32"), e: R.Tensor((4,), "float32"), grad_out_1: R.Tensor((4,), "float32")):
        with R.dataflow():
            half = R.multiply(e, R.const(0.5, "float32"))
            grad_x = R.multiply(grad_out_1, half)
            R.output(grad_x)
        return (grad_x,)


def test_rebuild_backward():
    plan = partition(OtherGradient["joint"], num_primals=1, num_outputs=2, strategy="save_all").plan
    found = rebuild_backward(OtherGradient["partial"], plan, num_primals=1, num_outputs=2)
    assert_same(found, OtherGradient["backward"])


@I.ir_module
class Normalize:
    """``zeros_like`` does not read ``e``, and ``pair`` is rebuilt from items, which can be captured; ``y`` stays."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), g: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            e = R.exp(x)
            pair = R.split(e, 3, axis=1)
            y = pair[0]
            zeros = R.zeros_like(e)
            again = R.concat(pair, axis=1)
            product = R.multiply(again, g)
            dx = R.add(product, zeros)
            R.output(y, dx)
        return (y, dx)

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), g: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            e = R.exp(x)
            pair = R.split(e, 3, axis=1)
            y = pair[0]
            zeros = R.zeros(R.shape([2, 3]), "float32")
            pair_1 = pair[1]
            pair_2 = pair[2]
            pair_rebuilt = (y, pair_1, pair_2)
            again = R.concat(pair_rebuilt, axis=1)
            product = R.multiply(again, g)
            dx = R.add(product, zeros)
            R.output(y, dx)
        return (y, dx)


def test_normalize():
    def normalized(func: Function) -> Function:
        body = Body.of(func)
        normalize(body, body.outputs[:1])
        return body.function()

    assert_same(normalized(Normalize["before"]), Normalize["expected"])
    assert_same(normalized(Normalize["expected"]), Normalize["expected"])


@I.ir_module
class Scanned:
    """The body of a scan: ``h`` after a step is ``tanh(h + x) * w``."""

    @R.function(private=True)
    def body(h: R.Tensor((2, 3), "float32"), x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            s = R.add(h, x)
            t = R.tanh(s)
            y = R.multiply(t, w)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def saving(h: R.Tensor((2, 3), "float32"), x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            s = R.add(h, x)
            t = R.tanh(s)
            y = R.multiply(t, w)
            R.output(y)
        return (y, y)

    @R.function(private=True)
    def backward(
        grad_out_0: R.Tensor((2, 3), "float32"),
        total_2: R.Tensor((3,), "float32"),
        h: R.Tensor((2, 3), "float32"),
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((3,), "float32"),
    ):
        with R.dataflow():
            dt = R.multiply(grad_out_0, w)
            s = R.add(h, x)
            t = R.tanh(s)
            p = R.multiply(grad_out_0, t)
            dw = R.sum(p, axis=[0])
            tt = R.multiply(t, t)
            d = R.subtract(R.const(1.0, "float32"), tt)
            dh = R.multiply(dt, d)
            total = R.add(total_2, dw)
            R.output(dh, total)
        return (dh, total, dh)


def test_differentiable_scans():
    """The states are saved as one tensor; the backward runs the other way and adds to the weights' gradient."""
    tensors = [Var("h", TensorType((2, 3), "float32")), Var("x", TensorType((5, 2, 3), "float32"))]
    tensors.append(Var("w", TensorType((3,), "float32")))
    call = scan_call(Scan(body_text(Scanned["body"]), 1, 1, 5), tensors)
    made, last = Var("made", call.ty_args[0]), Var("last", tensors[0].ty)
    func = build_function(tensors, [(made, call), (last, TupleGetItem(made, 0))], [last])

    def scan_in(function: Function) -> Scan:
        return next(scan_of(value)[0] for _, value in bindings(function) if is_scan(value))

    saving = scan_in(differentiable_scans(func, [0, 1, 2]))
    assert_same(saving.function, Scanned["saving"])
    backward = scan_in(backward_of(saving))
    assert (backward.length, backward.reverse, backward.carries, backward.xs) == (5, True, 2, 2)
    assert_structural_equal(backward.function, Scanned["backward"])
    plain = scan_in(differentiable_scans(func, []))
    assert plain.gradient is None and len(results(plain.function)) == 1


def test_every_pass_is_tested_here():
    exported = [name for name in package.__all__ if is_pass(getattr(package, name), ("Function", "Partitioned"))]
    assert sorted(exported) == ["differentiable_scans", "partition", "rebuild_backward"], (
        "add a golden test above for the new pass"
    )
