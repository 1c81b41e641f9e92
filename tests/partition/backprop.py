"""A reverse mode of a page, to make joint functions for tests of the partition without the rest of the project."""

from __future__ import annotations

import math

from tvm import relax

from autodiff.ir import Call, Function, Var, build_function, op_name, shape
from tests.partition.joints import Builder, op


def collapse(b: Builder, name: str, g: Var, target: tuple[int, ...]) -> Var:
    """Sum ``g`` over the axes that broadcasting added."""
    here = shape(g)
    if here == target:
        return g
    extra = len(here) - len(target)
    axes = [*range(extra), *(i for i in range(extra, len(here)) if target[i - extra] == 1 and here[i] != 1)]
    return b.let(name, op.reshape(b.let(name + "_sum", op.sum(g, axis=axes, keepdims=True)), target))


def const(value: float, like: Var):
    return relax.const(value, str(like.ty.dtype))


def matmul(b, n, v, c, g):
    x, w = c.args
    xt, wt = (b.let(f"{n}_{i}", op.permute_dims(a, _swap(a))) for i, a in (("xt", x), ("wt", w)))
    yield x, b.let(n + "_x", op.matmul(g, wt))
    if len(shape(w)) == 2 < len(shape(x)):
        rows = math.prod(shape(x)[:-1])
        xt = b.let(n + "_xf", op.permute_dims(b.let(n + "_xr", op.reshape(x, (rows, shape(x)[-1])))))
        g = b.let(n + "_gr", op.reshape(g, (rows, shape(g)[-1])))
    yield w, b.let(n + "_w", op.matmul(xt, g))


def _swap(a):
    axes = list(range(len(shape(a))))
    return [*axes[:-2], axes[-1], axes[-2]]


def softmax(b, n, v, c, g):
    gy = b.let(n + "_gy", op.multiply(g, v))
    s = b.let(n + "_s", op.sum(gy, axis=[c.attrs.axis], keepdims=True))
    yield c.args[0], b.let(n + "_x", op.subtract(gy, b.let(n + "_vs", op.multiply(v, s))))


def gelu(b, n, v, c, g):
    x = c.args[0]
    e = b.let(n + "_e", op.erf(b.let(n + "_z", op.multiply(x, const(math.sqrt(0.5), x)))))
    cdf = b.let(n + "_cdf", op.multiply(b.let(n + "_e1", op.add(e, const(1, x))), const(0.5, x)))
    xx = b.let(n + "_xx", op.multiply(b.let(n + "_x2", op.multiply(x, x)), const(-0.5, x)))
    pdf = b.let(n + "_pdf", op.multiply(b.let(n + "_ex", op.exp(xx)), const(1 / math.sqrt(2 * math.pi), x)))
    slope = b.let(n + "_slope", op.add(cdf, b.let(n + "_xp", op.multiply(x, pdf))))
    yield x, b.let(n + "_x", op.multiply(g, slope))


def unary(slope):
    def rule(b, n, v, c, g):
        yield c.args[0], b.let(n + "_x", op.multiply(g, slope(b, n, v, c.args[0])))

    return rule


def product(b, n, v, c, g):
    x, y = c.args
    yield x, b.let(n + "_l", op.multiply(g, y))
    yield y, b.let(n + "_r", op.multiply(g, x))


def mean(b, n, v, c, g):
    x = c.args[0]
    count = math.prod(shape(x)) // math.prod(shape(v))
    scaled = b.let(n + "_sc", op.multiply(g, const(1 / count, g)))
    yield x, b.let(n + "_x", op.broadcast_to(scaled, shape(x)))


RULES = {
    "relax.add": lambda b, n, v, c, g: ((a, g) for a in c.args),
    "relax.subtract": lambda b, n, v, c, g: ((c.args[0], g), (c.args[1], b.let(n + "_neg", op.negative(g)))),
    "relax.multiply": product,
    "relax.matmul": matmul,
    "relax.nn.softmax": softmax,
    "relax.nn.gelu": gelu,
    "relax.exp": unary(lambda b, n, v, x: v),
    "relax.tanh": unary(
        lambda b, n, v, x: b.let(n + "_d", op.subtract(const(1, v), b.let(n + "_sq", op.multiply(v, v))))
    ),
    "relax.rsqrt": unary(
        lambda b, n, v, x: b.let(
            n + "_d", op.multiply(b.let(n + "_v3", op.multiply(b.let(n + "_v2", op.multiply(v, v)), v)), const(-0.5, v))
        )
    ),
    "relax.nn.relu": lambda b, n, v, c, g: (
        (c.args[0], b.let(n + "_x", op.where(b.let(n + "_k", op.greater(c.args[0], const(0, v))), g, const(0, v)))),
    ),
    "relax.mean": mean,
    "relax.sum": lambda b, n, v, c, g: ((c.args[0], b.let(n + "_x", op.broadcast_to(g, shape(c.args[0])))),),
    "relax.permute_dims": lambda b, n, v, c, g: (
        (c.args[0], b.let(n + "_x", op.permute_dims(g, _inverse(c, len(shape(v)))))),
    ),
    "relax.reshape": lambda b, n, v, c, g: ((c.args[0], b.let(n + "_x", op.reshape(g, shape(c.args[0])))),),
    "relax.astype": lambda b, n, v, c, g: (),
}


def _inverse(call: Call, ndim: int) -> list[int]:
    axes = list(range(ndim))[::-1] if call.attrs.axes is None else [int(a) for a in call.attrs.axes]
    return [axes.index(i) for i in range(ndim)]


def differentiate(b: Builder, outputs: list[Var], wanted: list[Var], given=None) -> tuple[Function, int, int]:
    """The joint function of ``b``'s function: a grad_out per output, and the gradients of ``wanted``.

    ``given``: the indices of the outputs that receive a grad_out, all by default.
    """
    num_primals = len(b.params)
    grads: dict[Var, Var] = {}
    for index, output in enumerate(outputs):
        if given is not None and index not in given:
            continue
        g = b.param(f"grad_out_{index}", shape(output), str(output.ty.dtype))
        grads[output] = b.let(f"{output.name}_gg{index}", op.add(grads[output], g)) if output in grads else g
    for var, value in reversed(list(b.body)):
        if var not in grads or not isinstance(value, Call):
            continue
        name = var.name + "_g"
        for index, (operand, g) in enumerate(RULES[op_name(value)](b, name, var, value, grads[var])):
            if not isinstance(operand, Var) or "float" not in str(operand.ty.dtype):
                continue
            g = collapse(b, f"{name}{index}_c", g, shape(operand))
            grads[operand] = b.let(f"{name}{index}_acc", op.add(grads[operand], g)) if operand in grads else g
    zero = [
        b.let(f"{p.name}_zero", op.zeros(shape(p), str(p.ty.dtype))) if p not in grads else grads[p] for p in wanted
    ]
    return build_function(b.params, b.body, [*outputs, *zero]), num_primals, len(outputs)


def bert(
    layers=1, batch=2, seq=16, width=32, heads=4, dropout=True, dtype="float32", scale=1.0
) -> tuple[Function, int, int]:
    """Post-LayerNorm transformer encoder layers and all their gradients, LayerNorm spelled out."""
    b = Builder()
    x = b.param("hidden", (batch, seq, width), dtype)
    wanted = [x]

    def weight(name, *dims):
        wanted.append(b.param(name, dims, dtype))
        return wanted[-1]

    def linear(n, x, out):
        w, bias = weight(n + "_w", shape(x)[-1], out), weight(n + "_b", out)
        return b.let(n, op.add(b.let(n + "_mm", op.matmul(x, w)), bias))

    def drop(n, x):
        if not dropout:
            return x
        kept = b.let(n + "_kept", op.astype(b.param(f"mask_{n}", shape(x), "bool"), dtype))
        return b.let(n + "_drop", op.multiply(b.let(n + "_m", op.multiply(x, kept)), const(1 / 0.9, x)))

    def norm(n, x):
        gamma, beta = weight(n + "_gamma", width), weight(n + "_beta", width)
        c = b.let(n + "_c", op.subtract(x, b.let(n + "_mean", op.mean(x, axis=[-1], keepdims=True))))
        var = b.let(n + "_var", op.mean(b.let(n + "_sq", op.multiply(c, c)), axis=[-1], keepdims=True))
        rstd = b.let(n + "_rstd", op.rsqrt(b.let(n + "_eps", op.add(var, const(1e-5, x)))))
        scaled = b.let(n + "_s", op.multiply(b.let(n + "_n", op.multiply(c, rstd)), gamma))
        return b.let(n + "_y", op.add(scaled, beta))

    def split_heads(n, x):
        parts = b.let(n + "_parts", op.reshape(x, (batch, seq, heads, width // heads)))
        return b.let(n + "_heads", op.permute_dims(parts, [0, 2, 1, 3]))

    for i in range(layers):
        q, k, v = (split_heads(f"l{i}_{n}", linear(f"l{i}_{n}", x, width)) for n in "qkv")
        kt = b.let(f"l{i}_kt", op.permute_dims(k, [0, 1, 3, 2]))
        scores = b.let(f"l{i}_qk", op.matmul(q, kt))
        scaled = b.let(f"l{i}_scores", op.multiply(scores, const(scale * (width // heads) ** -0.5, x)))
        probs = drop(f"l{i}_probs", b.let(f"l{i}_probs", op.nn.softmax(scaled, axis=-1)))
        context = b.let(f"l{i}_ctx", op.permute_dims(b.let(f"l{i}_pv", op.matmul(probs, v)), [0, 2, 1, 3]))
        joined = b.let(f"l{i}_joined", op.reshape(context, (batch, seq, width)))
        attended = drop(f"l{i}_o", linear(f"l{i}_o", joined, width))
        y = norm(f"l{i}_ln1", b.let(f"l{i}_res1", op.add(attended, x)))
        up = b.let(f"l{i}_act", op.nn.gelu(linear(f"l{i}_up", y, 4 * width)))
        down = drop(f"l{i}_down", linear(f"l{i}_down", up, width))
        x = norm(f"l{i}_ln2", b.let(f"l{i}_res2", op.add(down, y)))
    return differentiate(b, [x], wanted)
