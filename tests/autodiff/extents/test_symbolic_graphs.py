"""Graphs with symbolic extents through the whole pipeline: at any size equal to the static pipeline's result."""

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.relax import op

from autodiff.extents import ExtentScope
from autodiff.ir import Constant, ShapeExpr, TensorType, Tuple, TupleGetItem, TupleType, shape
from autodiff.library import call, number
from tests.autodiff import bert
from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import integers
from tests.autodiff.symbolic import compare, function_of, pipeline
from tests.sampling import sampled


def test_a_normalization_over_symbolic_axes():
    """Batch and positions vary; the channels stay."""

    def build(s, x, w, b):
        y = s.emit(op.nn.layer_norm(x, w, b, [1], 1e-5))
        return s.emit(op.multiply(y, y))

    scope = compare(build, [draw(3, 4), draw(4, seed=1), draw(4, seed=2)], {(0, 0): "n"})
    assert not scope.guards


@pytest.mark.parametrize("layers", sampled([1, 2], [1]))
def test_a_bert_layer_of_any_batch_and_length(layers):
    args = bert.arguments(torch.float64)
    places = {(0, 0): "batch", (0, 1): "length", (1, 0): "batch", (1, 3): "length"}
    sizes = [{"batch": b, "length": n} for b, n in [(2, 2), (3, 7), (bert.BATCH, bert.LENGTH), (2, 13)]]
    scope = compare(bert.layers_of(layers), args, places, sizes)
    assert not scope.guards


def test_the_plan_of_symbolic_extents_is_the_samples_with_formulas():
    args = bert.arguments(torch.float32)
    places = {(0, 0): "batch", (0, 1): "length", (1, 0): "batch", (1, 3): "length"}
    static = pipeline(function_of(bert.layers_of(1), args)).parts.plan
    scope = ExtentScope()
    plan = pipeline(function_of(bert.layers_of(1), args, places, scope)).parts.plan
    assert [saved.name for saved in plan.saved_tensors] == [saved.name for saved in static.saved_tensors]
    assert [saved.name for saved in plan.free] == [saved.name for saved in static.free]
    assert (plan.bytes, plan.save_all_bytes, plan.cost) == (static.bytes, static.save_all_bytes, static.cost)
    assert scope.value(plan.size, {"batch": bert.BATCH, "length": bert.LENGTH}) == static.bytes == static.size
    doubled = {"batch": 2 * bert.BATCH, "length": bert.LENGTH}
    assert scope.value(plan.size, doubled) == 2 * static.bytes
    text = str(plan)
    assert f"{plan.bytes:,} = {plan.size} bytes" in text and "batch*length" in str(plan.size)
    largest = max(plan.saved_tensors, key=lambda saved: saved.bytes)
    assert f"{largest.bytes:,} = {largest.size}" in text and "x".join(map(str, largest.shape)) in text


def _shifted_loss(s, x, labels):
    """The loss of the next token: logits without the last position, labels without the first."""
    batch, length, classes = shape(x)
    logits = s.emit(op.strided_slice(x, [1], [0], [length - 1]))
    wanted = s.emit(op.strided_slice(labels, [1], [1], [length]))
    rows = batch * (length - 1)
    logits = s.emit(op.reshape(logits, (rows, classes)))
    logs = s.emit(op.nn.log_softmax(logits, -1))
    picked = s.emit(op.gather_elements(logs, s.emit(op.reshape(wanted, (rows, 1))), 1))
    return s.emit(op.negative(s.emit(op.divide(s.emit(op.sum(picked)), _bound(s, number(rows, "float64"))))))


def _bound(s, value):
    return value if isinstance(value, Constant) else s.emit(value)


def _positions(s, x, table):
    """The first positions of a table, added; the rest of the table gets zeros."""
    length = shape(x)[1]
    rows = s.emit(op.strided_slice(table, [0], [0], [length]))
    return s.emit(op.multiply(s.emit(op.add(x, rows)), x))


def _last_token(s, x):
    """The first and the last position, and the mean of all."""
    length = shape(x)[1]
    first = s.emit(op.strided_slice(x, [1], [0], [1]))
    last = s.emit(op.strided_slice(x, [1], [length - 1], [length]))
    mean = s.emit(op.mean(x, [1], keepdims=True))
    joined = s.emit(op.concat(Tuple([first, last, mean, x]), axis=1))
    return s.emit(op.tanh(joined))


def _thirds(s, x):
    """Query, key and value out of one tensor, attending."""
    size = shape(x)[2] // 3
    q, k, v = (s.emit(op.strided_slice(x, [2], [i * size], [(i + 1) * size])) for i in range(3))
    scores = s.emit(op.matmul(q, s.emit(op.permute_dims(k, [0, 2, 1]))))
    return s.emit(op.matmul(s.emit(op.nn.softmax(scores, -1)), v))


def _causal(s, x):
    """A causal mask: later positions are not seen."""
    length = shape(x)[1]
    position = s.emit(op.arange(0, length, 1, "int64"))
    later = s.emit(op.less(s.emit(op.reshape(position, (length, 1))), s.emit(op.reshape(position, (1, length)))))
    scores = s.emit(op.matmul(x, s.emit(op.permute_dims(x, [0, 2, 1]))))
    fill = s.emit(op.full(shape(scores), relax.const(-1e9, "float64"), "float64"))
    return s.emit(op.matmul(s.emit(op.nn.softmax(s.emit(op.where(later, fill, scores)), -1)), x))


def _pooled(s, x, w):
    """A convolution and a pooling of the library, with explicit types."""
    batch, _, rows, columns = shape(x)
    ones, zeros = ShapeExpr([1, 1]), ShapeExpr([0, 0])
    geometry = [ones, ShapeExpr([1, 1]), ones, zeros, relax.prim_value(0), relax.prim_value(1)]
    y = s.emit(call("convolution", [x, w, *geometry], TensorType((batch, shape(w)[0], rows, columns), "float64")))
    halves = (batch, shape(w)[0], rows // 2, columns // 2)
    twos = ShapeExpr([2, 2])
    types = TupleType([TensorType(halves, "float64"), TensorType(halves, "int64")])
    pooled = s.emit(call("max_pool", [y, twos, twos, zeros, ones, relax.prim_value(0)], types))
    return s.emit(op.mean(s.emit(TupleGetItem(pooled, 0)), [2, 3]))


def _embedded(s, indices, weight):
    args = [weight, indices, relax.prim_value(-1), relax.prim_value(0)]
    rows = s.emit(call("embedding", args, TensorType((*shape(indices), shape(weight)[1]), "float64")))
    squares = s.emit(op.multiply(rows, rows))
    return [s.emit(op.mean(squares, [1])), s.emit(op.mean(squares, [0, 1]))]


#: Build function, arguments, and the number of arguments whose batch and length (height) vary.
GRAPHS = {
    "shifted loss": (_shifted_loss, [draw(2, 5, 6), integers(2, 5, below=6)], 2),
    "positions": (_positions, [draw(2, 5, 3), draw(13, 3, seed=1)], 1),
    "tokens": (_last_token, [draw(2, 5, 3)], 1),
    "thirds": (_thirds, [draw(2, 5, 6)], 1),
    "causal": (_causal, [draw(2, 5, 3)], 1),
    "pooled": (_pooled, [draw(2, 3, 6, 6), draw(4, 3, 3, 3, seed=1)], 1),
    "embedded": (_embedded, [integers(2, 5, below=2), draw(6, 3, seed=1)], 1),
}
#: Guards of the graphs: a table ends somewhere.
GUARDS = {"positions": ["13 >= n"]}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_any_size(name):
    build, args, varying = GRAPHS[name]
    second = 2 if name == "pooled" else 1
    places = {(index, axis): symbol for index in range(varying) for axis, symbol in ((0, "b"), (second, "n"))}
    scope = compare(build, args, places, [{"b": b, "n": n} for b, n in [(2, 2), (3, 7), (2, 5), (2, 13)]], apart=2)
    assert [str(guard) for guard in scope.guards] == GUARDS.get(name, [])
