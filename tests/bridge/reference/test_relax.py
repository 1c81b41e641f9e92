"""The interpreter's operators against TVM's own: two implementations of one definition."""

import pytest
import torch
from tvm import relax

from autodiff.ir import build_function
from autodiff.library import call as library_call
from bridge.reference.relax import interpret
from tests.autodiff.evaluate import evaluate, tensor_type
from tests.autodiff.evaluate import function as flat

op = relax.op
X = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.flip(0) + 0.25
INDEX = torch.tensor([[2, 0], [1, 1]])

CASES = {
    "divide": (op.divide, [X, Y]),
    "power": (op.power, [X.abs(), Y]),
    "clip": (lambda a: op.clip(a, relax.prim_value(-0.5), relax.prim_value(0.25)), [X]),
    "softmax": (lambda a: op.nn.softmax(a, axis=1), [X]),
    "log_softmax": (lambda a: op.nn.log_softmax(a, axis=-1), [X]),
    "prod": (lambda a: op.prod(a, axis=[1, 2]), [X]),
    "slice": (lambda a: op.strided_slice(a, [1, 2], [0, 1], [4, 5], [2, 3]), [X]),
    "pad": (lambda a: op.nn.pad(a, [1, 0, 0, 2, 0, 0], pad_value=3.0), [X]),
    "permute": (lambda a: op.permute_dims(a), [X]),
    "concat": (lambda a, b: op.concat([a, b], 1), [X, Y]),
    "gather": (lambda a, i: op.gather_elements(a, i, axis=2), [X, INDEX.repeat(3, 2, 1)[:, :4] ]),
    "exclusive scan": (lambda a: op.cumsum(a, axis=1, exclusive=True), [X]),
    "flip": (lambda a: op.flip(a, 2), [X]),
    "comparison": (op.less_equal, [X, Y]),
    "where": (op.where, [X > 0, X, Y]),
    "cast": (lambda a: op.astype(a, "float32"), [X]),
    "filled": (lambda a: op.full_like(a, relax.const(2.5, "float64")), [X]),
}  # fmt: skip


def function(build, args):
    params = [relax.Var(f"p{i}", tensor_type(arg)) for i, arg in enumerate(args)]
    builder = relax.BlockBuilder()
    value = builder.normalize(build(*params))
    return params, value


@pytest.mark.parametrize("case", CASES)
def test_as_tvm_has_it(case):
    build, args = CASES[case]

    def emitted(scope, *params):
        return scope.emit(build(*params), "y0")

    func = flat(emitted, *args)
    (wanted,) = evaluate(func, *args)
    (found,) = interpret(func, args).results
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, torch.from_dlpack(wanted), rtol=1e-12, atol=1e-12)


def test_layer_norm_as_torch_has_it():
    """TVM computes it in float32 only."""
    weight, bias = Y[0, 0].clone(), X[0, 0].clone()
    layer = flat(lambda scope, *p: scope.emit(op.nn.layer_norm(*p, axes=[-1], epsilon=1e-3), "y0"), X, weight, bias)
    wanted = torch.nn.functional.layer_norm(X, (5,), weight, bias, 1e-3)
    torch.testing.assert_close(interpret(layer, [X, weight, bias]).results[0], wanted)


def test_an_operator_without_a_definition_is_refused_by_name():
    params, value = function(lambda a: op.tril(a, 1), [X])
    y = relax.Var("y", value.ty)
    with pytest.raises(NotImplementedError, match=r"relax\.tril has no reference semantics"):
        interpret(build_function(params, [(y, value)], [y]), [X])


def test_tuples_library_functions_and_values_by_name():
    x = relax.Var("x", tensor_type(X))
    split = relax.Var("split", relax.TupleType([tensor_type(X[:, :1]), tensor_type(X[:, 1:])]))
    first = relax.Var("first", tensor_type(X[:, :1]))
    y = relax.Var("y", tensor_type(X[:, :1]))
    body = [
        (split, relax.BlockBuilder().normalize(op.split(x, [1], axis=1))),
        (first, relax.TupleGetItem(split, 0)),
        (y, library_call("expm1", [first], first.ty)),
    ]
    run = interpret(build_function([x], body, [y]), [X])
    torch.testing.assert_close(run.results[0], torch.expm1(X[:, :1]))
    assert [tuple(part.shape) for part in run.values["split"]] == [(3, 1, 5), (3, 3, 5)]


def test_integer_sums_keep_their_type():
    x = relax.Var("x", relax.TensorType((4,), "int32"))
    y = relax.Var("y", relax.TensorType((), "int32"))
    body = [(y, relax.BlockBuilder().normalize(op.sum(x)))]
    (total,) = interpret(build_function([x], body, [y]), [torch.arange(4, dtype=torch.int32)]).results
    assert total.dtype == torch.int32 and total.item() == 6


def test_dropout_takes_its_mask_behind_the_parameters():
    x = relax.Var("x", tensor_type(X))
    value = relax.BlockBuilder().normalize(op.nn.dropout(x, 0.5))
    pair, y = relax.Var("pair", value.ty), relax.Var("y", x.ty)
    func = build_function([x], [(pair, value), (y, relax.TupleGetItem(pair, 0))], [y])
    mask = X > 0
    torch.testing.assert_close(interpret(func, [X, mask]).results[0], X * mask * 2)
    with pytest.raises(ValueError, match="a dropout without a mask"):
        interpret(func, [X])
    with pytest.raises(ValueError, match="wanted 1 inputs and 1 dropout masks, got 3 tensors"):
        interpret(func, [X, mask, mask])
