"""Reverse accumulation: the graph equals TVM's ``Gradient`` pass's."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.relax import Tuple, TupleGetItem, op
from tvm.relax.op.grad import no_grad

from autodiff.differentiate import backward_bindings
from autodiff.gradients.registry import RULES
from autodiff.ir import Constant, Function, IRModule, Var, bindings, build_function, results, substitute
from autodiff.products import simplify_transposes
from autodiff.redundancy import live_bindings
from tests.autodiff.evaluate import function
from tests.autodiff.gradcheck import draw


def _linear(s, x, w):
    """A transposed weight, the product transposed again, and a transpose of a transpose."""
    h = s.emit(op.matmul(x, s.emit(op.permute_dims(w))))
    turned = s.emit(op.permute_dims(h))
    again = s.emit(op.permute_dims(turned))
    return s.emit(op.sum(s.emit(op.multiply(s.emit(op.tanh(again)), s.emit(op.permute_dims(s.emit(op.exp(turned))))))))


def _both_transposed(s, x, w):
    product = op.matmul(s.emit(op.permute_dims(x)), s.emit(op.permute_dims(s.emit(op.permute_dims(w)))))
    return s.emit(op.sum(s.emit(op.sin(s.emit(product)))))


def _batched(s, x, w):
    wide = s.emit(op.reshape(x, (1, 2, 3)))
    product = s.emit(op.matmul(wide, s.emit(op.permute_dims(s.emit(op.reshape(w, (1, 2, 3))), [0, 2, 1]))))
    return s.emit(op.sum(s.emit(op.exp(s.emit(op.permute_dims(product, [0, 2, 1]))))))


def _fields(s, x, w):
    """Items of a split, one of them twice, one not at all; a tuple bound to a variable; copies; constants."""
    parts = s.emit(op.split(x, 3, 1))
    first, last = s.emit(TupleGetItem(parts, 0)), s.emit(TupleGetItem(parts, 2))
    again = s.emit(TupleGetItem(parts, 0))
    pair = s.emit(Tuple([s.emit(op.multiply(first, last)), relax.const([[1.0], [2.0]], "float64"), again]))
    joined = s.emit(op.concat(pair, 1))
    item = s.emit(TupleGetItem(pair, 2))
    stacked = s.emit(op.concat(Tuple([joined, s.emit(op.multiply(item, item)), w]), 1))
    return s.emit(op.sum(s.emit(op.multiply(stacked, stacked))))


def _library_and_rules(s, x, w):
    y = s.emit(op.nn.softmax(s.emit(op.multiply(x, s.emit(op.add(w, relax.const(1.0, "float64")))))))
    z = s.emit(op.mean(s.emit(op.nn.gelu(y)), [1], keepdims=True))
    return s.emit(op.sum(s.emit(op.subtract(s.emit(op.divide(y, z)), s.emit(op.maximum(x, w))))))


@pytest.fixture(scope="module", autouse=True)
def rules_of_tvm():
    """TVM's pass takes our rules."""
    for name, rule in [(name, rule) for name, rule in RULES.items() if name.startswith("relax.")]:

        def partials(var, call, gradient, builder, rule=rule):
            found = rule(call, var, gradient, lambda value: value if isinstance(value, Var) else builder.emit(value))
            return [no_grad(arg) if each is None else each for arg, each in zip(call.args, found, strict=True)]

        op.register_gradient(name, partials, level=11)  # TVM's own are of level 10


@pytest.mark.parametrize("build", [_linear, _both_transposed, _batched, _fields, _library_and_rules])
@pytest.mark.parametrize("required", [[0, 1], [1]], ids=str)
def test_the_same_bindings_as_the_pass_of_tvm(build, required):
    func = function(lambda s, x, w: build(_Forward(s), x, w), draw(2, 3), draw(2, 3, seed=1))
    body, (scalar,) = list(bindings(func)), results(func)
    wanted = [func.params[index] for index in required]
    backward, gradients = backward_bindings(body, scalar)
    tvm.ir.assert_structural_equal(
        _function(func, backward, [gradients[param] for param in wanted]), _tvm(func, wanted)
    )


class _Forward:
    """A scope whose variables have names that TVM's pass does not make."""

    def __init__(self, scope):
        self._scope = scope

    def emit(self, value):
        return self._scope.emit(value, "forward")


def _function(func, backward, gradients) -> Function:
    body = live_bindings([*bindings(func), *backward], gradients)
    return build_function(func.params, body, gradients)


def _tvm(func, wanted) -> Function:
    """TVM's backward of ``func``, without copies and transposes of products, on the variables of ``func``."""
    scalar = results(func)[0]
    single = relax.Function(func.params, relax.SeqExpr(func.body.blocks, scalar), scalar.ty)
    module = relax.transform.Normalize()(IRModule({"main": single}))
    params = [param for param in module["main"].params if param.name in {var.name for var in wanted}]
    joint = relax.transform.Gradient("main", require_grads=params)(module)["main_adjoint"]
    names = {var.name: var for var in [*func.params, *(var for var, _ in bindings(func))]}
    known = dict(zip(joint.params, func.params, strict=True))
    backward = []
    for var, value in bindings(joint):
        if var.name in names:
            known[var] = names[var.name]
            continue
        value = substitute(value, known)
        if isinstance(value, Var | Constant):
            known[var] = value
        else:
            known[var] = relax.Var("bw", var.ty)
            backward.append((known[var], value))
    gradients = joint.body.body.fields[1]
    fields = dict(backward)[known[gradients]].fields if isinstance(gradients, Var) else gradients.fields
    backward, equal = simplify_transposes(list(bindings(func)), backward)
    fields = [known.get(field, field) for field in fields]
    return _function(func, backward, [equal.get(field, field) for field in fields])
