"""The joint function: parameters, results, names, unsupported operators; and seeding the VJP."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import TupleGetItem, op

from autodiff import UndifferentiableOp, clean, differentiate, unique_names
from autodiff.ir import Function, bindings, build_function, dtype, op_name, results, shape
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import draw


def _two_outputs(scope, x, w, index):
    h = scope.emit(op.multiply(x, w), "h")
    return [scope.emit(op.tanh(h), "first"), scope.emit(op.exp(h), "second"), index]


ARGS = [draw(2, 3), draw(3, seed=1), torch.tensor([1, 2])]


def test_parameters_and_results_are_in_order():
    joint = differentiate(function(_two_outputs, *ARGS, names=["x", "w", "index"]), [1, 0], [1, 0])
    assert [param.name for param in joint.params] == ["x", "w", "index", "grad_out_1", "grad_out_0"]
    names = [result.name for result in results(joint)]
    assert names == ["first", "second", "index", "grad_w", "grad_x"]
    assert [shape(result) for result in results(joint)[3:]] == [(3,), (2, 3)]


@pytest.mark.parametrize("outputs", [[0], [1], [0, 1], [1, 0]], ids=str)
def test_only_listed_outputs_are_differentiated(outputs):
    joint = clean(differentiate(function(_two_outputs, *ARGS), outputs, [0, 1]))
    grad_outs = [draw(2, 3, seed=5 + index) for index in outputs]
    got = evaluate(joint, *ARGS, *grad_outs)[3:]
    leaves = [arg.clone().requires_grad_() for arg in ARGS[:2]]
    h = leaves[0] * leaves[1]
    wanted = torch.autograd.grad([[h.tanh(), h.exp()][index] for index in outputs], leaves, grad_outs)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_independent_parameters_get_exact_zeros():
    func = function(lambda s, x, unused: op.exp(x), draw(2), draw(3))
    joint = clean(differentiate(func, [0], [1, 0]))
    assert op_name(dict(bindings(joint))[results(joint)[1]]) == "relax.zeros"
    assert torch.equal(evaluate(joint, draw(2), draw(3), draw(2))[1], torch.zeros(3).double())
    constant = function(lambda s, x: relax.op.ones((2,), "float64"), draw(2))
    assert torch.equal(evaluate(differentiate(constant, [0], [0]), draw(2), draw(2))[1], torch.zeros(2).double())


def test_nothing_required_is_the_forward_with_grad_outs():
    joint = differentiate(function(_two_outputs, *ARGS), [0], [])
    assert [var.name for var, _ in bindings(joint)] == ["h", "first", "second"]
    assert len(joint.params) == 4


def test_an_output_that_is_a_parameter():
    joint = clean(differentiate(function(lambda s, x: x, draw(2)), [0], [0]))
    assert not list(bindings(joint))
    assert [result.name for result in results(joint)] == ["p0", "grad_out_0"]


def test_a_parameter_used_as_two_outputs():
    func = function(lambda s, x: [x, op.exp(x)], draw(2))
    joint = clean(differentiate(func, [0, 1], [0]))
    x, a, b = draw(2), draw(2, seed=1), draw(2, seed=2)
    torch.testing.assert_close(evaluate(joint, x, a, b)[2], a + b * x.exp(), rtol=1e-12, atol=0)


def test_no_grad_stops_gradients_and_disappears():
    def build(scope, x):
        stopped = scope.emit(op.grad.no_grad(scope.emit(op.exp(x), "e")), "stopped")
        return scope.emit(op.multiply(stopped, x), "y")

    x, grad_out = draw(3), draw(3, seed=1)
    joint = differentiate(function(build, x), [0], [0])
    assert "relax.grad.no_grad" not in [op_name(value) for _, value in bindings(joint)]
    y, grad = evaluate(clean(joint), x, grad_out)
    torch.testing.assert_close(y, x.exp() * x, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, grad_out * x.exp(), rtol=1e-12, atol=0)


def test_forward_bindings_survive_in_order_and_by_name():
    def build(scope, x, w):
        transposed = scope.emit(op.permute_dims(scope.emit(op.matmul(x, w), "product")), "transposed")
        return scope.emit(op.permute_dims(transposed), "back")

    # TVM's pass rewrites both transposes, forward included; the joint must not
    func = function(build, draw(2, 3), draw(3, 4, seed=1))
    joint = differentiate(func, [0], [0, 1])
    forward = list(bindings(joint))[:3]
    assert [var.name for var, _ in forward] == ["product", "transposed", "back"]
    assert [op_name(value) for _, value in forward] == ["relax.matmul", "relax.permute_dims", "relax.permute_dims"]


def test_names_are_unique_even_where_the_forward_uses_ours():
    def build(scope, x):
        return scope.emit(op.exp(scope.emit(op.exp(x), "bw")), "grad_x")

    joint = differentiate(function(build, draw(2), names=["x"]), [0], [0])
    names = [var.name for var in joint.params] + [var.name for var, _ in bindings(joint)]
    assert len(names) == len(set(names))
    assert names[2:4] == ["bw", "grad_x"]


def test_unique_names():
    x, y = relax.Var("x", relax.TensorType((2,), "float32")), relax.Var("x", relax.TensorType((2,), "float32"))
    first, second = relax.Var("y", x.ty), relax.Var("y", x.ty)
    func = build_function([x, y], [(first, op.exp(x)), (second, op.add(first, y))], [second])
    renamed = unique_names(func)
    names = [var.name for var in renamed.params] + [var.name for var, _ in bindings(renamed)]
    assert names == ["x", "x_1", "y", "y_1"]
    tvm.ir.assert_structural_equal(renamed, func)
    assert unique_names(renamed) is renamed


def test_what_is_refused_by_index():
    func = function(_two_outputs, *ARGS)
    for outputs, required, text in [
        ([3], [0], "output index below 3, got 3"),
        ([2], [0], "floating point tensor as output 2"),
        ([0, 0], [0], "each output once"),
        ([], [0], "at least one output"),
        ([0], [7], "parameter index below 3, got 7"),
        ([0], [2], "floating point parameter, got 'p2'"),
        ([0], [1, 1], "each parameter once"),
    ]:
        with pytest.raises(ValueError, match=text):
            differentiate(func, outputs, required)
    with pytest.raises(ValueError, match="'grad_out_0' is taken"):
        differentiate(function(lambda s, x: op.exp(x), draw(2), names=["grad_out_0"]), [0], [0])


def test_an_operator_without_gradient_is_refused_by_name_where_it_matters():
    def build(scope, x, w):
        ordered = scope.emit(op.sort(x), "ordered")
        return scope.emit(op.multiply(ordered, w), "y")

    func = function(build, draw(3), draw(3, seed=1))
    with pytest.raises(UndifferentiableOp, match=r"relax\.sort, bound to 'ordered'") as caught:
        differentiate(func, [0], [0])
    assert (caught.value.op, caught.value.binding) == ("relax.sort", "ordered")
    x, w, grad_out = draw(3), draw(3, seed=1), draw(3, seed=2)
    got = evaluate(differentiate(func, [0], [1]), x, w, grad_out)[1]
    torch.testing.assert_close(got, grad_out * x.sort().values, rtol=1e-12, atol=0)


def test_variants_without_gradient_are_refused_by_name():
    func = function(lambda s, x: op.nn.pad(x, [1, 1, 1, 1], "reflect"), draw(3, 3))
    with pytest.raises(UndifferentiableOp, match="pad_mode 'constant', got 'reflect'"):
        differentiate(func, [0], [0])


@pytest.mark.parametrize("element_type", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_have_the_parameters_type(element_type):
    args = [draw(4, 3).to(element_type), draw(3, seed=1).to(element_type)]
    joint = clean(differentiate(function(lambda s, x, w: op.multiply(x, w), *args), [0], [0, 1]))
    grad_out = draw(4, 3, seed=2).to(element_type)
    _, dx, dw = evaluate(joint, *args, grad_out)
    assert dx.dtype == dw.dtype == element_type
    assert torch.equal(dx, grad_out * args[1])  # the casts of seeding are gone
    exact = (grad_out.double() * args[0].double()).sum(0)
    torch.testing.assert_close(dw.double(), exact, rtol=3 * torch.finfo(element_type).eps, atol=0.02)


def test_mixed_element_types():
    def build(scope, x, h):
        return [op.multiply(scope.emit(op.astype(h, "float32")), x), op.exp(h)]

    args = [draw(3).float(), draw(3, seed=1).bfloat16()]
    joint = clean(differentiate(function(build, *args), [0, 1], [0, 1]))
    assert [dtype(result) for result in results(joint)] == ["float32", "bfloat16", "float32", "bfloat16"]


def test_tuples_and_multi_output_operators():
    def build(scope, x):
        parts = scope.emit(op.split(x, 3, 0))
        pair = scope.emit(relax.Tuple([scope.emit(TupleGetItem(parts, 2)), scope.emit(TupleGetItem(parts, 0))]))
        return op.multiply(scope.emit(TupleGetItem(pair, 0)), scope.emit(TupleGetItem(pair, 1)))

    x, grad_out = draw(3, 2), draw(1, 2, seed=1)
    got = evaluate(clean(differentiate(function(build, x), [0], [0])), x, grad_out)[1]
    wanted = torch.cat([grad_out * x[2:], torch.zeros(1, 2).double(), grad_out * x[:1]])
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


def test_attributes_of_the_function_survive():
    func = function(lambda s, x: op.exp(x), draw(2)).with_attr("note", "kept")
    joint = clean(differentiate(func, [0], [0]))
    assert isinstance(joint, Function) and str(joint.attrs["note"]) == "kept"
