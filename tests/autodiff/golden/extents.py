"""Before and expected of instantiation; TVMScript has no variables of a scope, so ``before`` is built."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

from autodiff.body import Scope
from autodiff.extents import ExtentScope
from autodiff.ir import Function, Var, build_function
from autodiff.library import number
from tests.autodiff.golden import GOLDEN, Golden
from tests.autodiff.instantiate import instantiate

SCOPE = ExtentScope()


def _before() -> Function:
    n = SCOPE.symbol("n", 6)
    x = Var("x", relax.TensorType((n, 4), "float32"))
    scope = Scope(["x"])
    count = scope.emit(number(2 * n, "float32"), "count")
    mean = scope.emit(op.divide(x, count), "mean")
    y = scope.emit(op.reshape(mean, (2, 2 * n)), "y")
    return build_function([x], scope.body, [y])


@R.function(private=True)
def _expected(x: R.Tensor((3, 4), "float32")):
    with R.dataflow():
        mean = R.divide(x, R.const(6.0, "float32"))
        y: R.Tensor((2, 6), "float32") = R.reshape(mean, R.shape([2, 6]))
        R.output(y)
    return (y,)


GOLDEN["Instantiate"] = Golden(instantiate, _before(), _expected, {"sizes": {"n": 3}})
