"""Joint functions built by hand, small enough to know every strategy's right plan."""

from __future__ import annotations

from tvm import relax

from autodiff.ir import Expr, Function, TensorType, Tuple, TupleGetItem, TupleType, Var, build_function


class Builder:
    """Bindings in order, each with the name it is given."""

    def __init__(self):
        self.params: list[Var] = []
        self.body: list[tuple[Var, Expr]] = []

    def param(self, name: str, shape, dtype="float32") -> Var:
        var = Var(name, TensorType(list(shape), dtype))
        self.params.append(var)
        return var

    def let(self, name: str, value: Expr) -> Var:
        value = relax.BlockBuilder().normalize(value)
        var = relax.DataflowVar(name, value.ty)
        self.body.append((var, value))
        return var

    def build(self, *results: Expr) -> Function:
        return build_function(self.params, self.body, results)


op = relax.op
F32 = "float32"


def mlp(rows=8, width=16, hidden=64) -> tuple[Function, int, int]:
    """``relu(x @ w1 + b1) @ w2`` and all its gradients; 4 primals, 1 output."""
    b = Builder()
    x, w1 = b.param("x", (rows, width)), b.param("w1", (width, hidden))
    b1, w2 = b.param("b1", (hidden,)), b.param("w2", (hidden, width))
    g = b.param("grad_out", (rows, width))
    h = b.let("h", op.matmul(x, w1))
    a = b.let("a", op.add(h, b1))
    r = b.let("r", op.nn.relu(a))
    y = b.let("y", op.matmul(r, w2))
    rt = b.let("rt", op.permute_dims(r))
    dw2 = b.let("dw2", op.matmul(rt, g))
    w2t = b.let("w2t", op.permute_dims(w2))
    dr = b.let("dr", op.matmul(g, w2t))
    positive = b.let("positive", op.greater(a, relax.const(0, F32)))
    da = b.let("da", op.where(positive, dr, relax.const(0, F32)))
    db1 = b.let("db1", op.sum(da, axis=[0]))
    xt = b.let("xt", op.permute_dims(x))
    dw1 = b.let("dw1", op.matmul(xt, da))
    w1t = b.let("w1t", op.permute_dims(w1))
    dx = b.let("dx", op.matmul(da, w1t))
    return b.build(y, dx, dw1, db1, dw2), 4, 1


def layer_norm(rows=8, width=32) -> tuple[Function, int, int]:
    """Dropout by mask, residual, LayerNorm, product; and the gradients. 5 primals, 1 output."""
    b = Builder()
    x, h = b.param("x", (rows, width)), b.param("h", (rows, width))
    mask = b.param("mask_0", (rows, width), "bool")
    gamma, w = b.param("gamma", (width,)), b.param("w", (width, width))
    g = b.param("grad_out", (rows, width))
    e = b.let("e", op.tanh(h))
    kept = b.let("kept", op.astype(mask, F32))
    d = b.let("d", op.multiply(e, kept))
    s = b.let("s", op.add(d, x))
    mean = b.let("mean", op.mean(s, axis=[1], keepdims=True))
    c = b.let("c", op.subtract(s, mean))
    c2 = b.let("c2", op.multiply(c, c))
    var = b.let("var", op.mean(c2, axis=[1], keepdims=True))
    ve = b.let("ve", op.add(var, relax.const(1e-5, F32)))
    rstd = b.let("rstd", op.rsqrt(ve))
    n = b.let("n", op.multiply(c, rstd))
    o = b.let("o", op.multiply(n, gamma))
    y = b.let("y", op.matmul(o, w))
    ot = b.let("ot", op.permute_dims(o))
    dw = b.let("dw", op.matmul(ot, g))
    wt = b.let("wt", op.permute_dims(w))
    do = b.let("do", op.matmul(g, wt))
    dg = b.let("dg", op.multiply(do, n))
    dgamma = b.let("dgamma", op.sum(dg, axis=[0]))
    dn = b.let("dn", op.multiply(do, gamma))
    m1 = b.let("m1", op.mean(dn, axis=[1], keepdims=True))
    dnn = b.let("dnn", op.multiply(dn, n))
    m2 = b.let("m2", op.mean(dnn, axis=[1], keepdims=True))
    nm2 = b.let("nm2", op.multiply(n, m2))
    t = b.let("t", op.subtract(dn, m1))
    t2 = b.let("t2", op.subtract(t, nm2))
    ds = b.let("ds", op.multiply(t2, rstd))
    dd = b.let("dd", op.multiply(ds, kept))
    e2 = b.let("e2", op.multiply(e, e))
    de = b.let("de", op.subtract(relax.const(1, F32), e2))
    dh = b.let("dh", op.multiply(dd, de))
    return b.build(y, ds, dh, dgamma, dw), 5, 1


def library_call(name: str, args, result) -> Expr:
    return op.call_pure_packed("library." + name, *args, ty_args=result)


def tuples(rows=4, width=8) -> tuple[Function, int, int]:
    """A library call with two results, read by item, as a whole in the backward, and split. 1 primal, 2 outputs."""
    b = Builder()
    x = b.param("x", (rows, width))
    g = b.param("grad_out", (rows, width))
    g2 = b.param("grad_out_1", (rows, width // 2))
    pair_type = TupleType([TensorType([rows, width], F32), TensorType([rows, width], "bool")])
    e = b.let("e", op.exp(x))
    pair = b.let("pair", library_call("twice_and_sign", [e], pair_type))
    twice = b.let("twice", TupleGetItem(pair, 0))
    y = b.let("y", op.tanh(twice))
    halves = b.let("halves", op.split(twice, 2, axis=1))
    left = b.let("left", TupleGetItem(halves, 0))
    y2 = b.let("y2", op.multiply(left, left))
    joined = b.let("joined", library_call("join", [pair, g], TensorType([rows, width], F32)))
    g3 = b.let("g3", op.multiply(g2, left))
    g3g3 = b.let("g3g3", op.concat([g3, g3], axis=1))
    both = b.let("both", Tuple([joined, g3g3]))
    first = b.let("first", TupleGetItem(both, 0))
    dx = b.let("dx", op.add(first, g3g3))
    return b.build(y, y2, dx), 1, 2


def corners() -> tuple[Function, int, int]:
    """Odd results: outputs that are a parameter, a constant and a duplicate; gradients that are a forward value, a
    parameter, a constant, a grad_out and a value that depends on no grad_out. 2 primals, 4 outputs."""
    b = Builder()
    x, w = b.param("x", (4, 4)), b.param("w", (4, 4))
    g = b.param("grad_out", (4, 4))
    e = b.let("e", op.exp(x))
    y = b.let("y", op.add(e, w))
    square = b.let("square", op.multiply(x, x))
    scaled = b.let("scaled", op.multiply(g, e))
    one = relax.const(1.0, F32)
    return b.build(y, x, one, y, e, w, one, g, square, scaled, scaled), 2, 4
