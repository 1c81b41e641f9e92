"""A size as a number of a function, and functions with symbolic extents turned into static ones."""

import pytest
import torch
from tvm import relax
from tvm.relax import op

from autodiff import clean, differentiate
from autodiff.body import Scope
from autodiff.extents import ExtentScope
from autodiff.ir import Constant, DataflowVar, Expr, Function, Var, bindings, build_function, library_name, used_vars
from autodiff.library import number
from bridge.reference.relax import interpret
from partition import partition
from tests.autodiff.instantiate import instantiate


def of_sizes(n, m) -> Function:
    """``(x * n + m, flat x, n)`` of ``x`` of shape (n, 3, m)."""
    x = Var("x", relax.TensorType((n, 3, m), "float32"))
    scope = Scope(["x"])
    scaled = scope.emit(op.multiply(x, scope.emit(number(n, "float32"), "n_number")), "scaled")
    count = number(2 * m, "float32")
    shifted = scope.emit(op.add(scaled, count if isinstance(count, Constant) else scope.emit(count)), "shifted")
    flat = scope.emit(op.reshape(x, (n * m, 3)), "flat")
    pair = scope.emit(op.split(x, 3, axis=1), "pair")
    part = scope.emit(relax.TupleGetItem(pair, 1), "part")
    return build_function([x], scope.body, [shifted, flat, part])


@pytest.fixture
def extents():
    scope = ExtentScope()
    yield scope.symbol("n", 4), scope.symbol("m", 5)
    assert not scope.guards


@pytest.mark.parametrize("sizes", [(2, 7), (4, 5), (3, 3)], ids=str)
def test_the_function_of_some_sizes(extents, sizes):
    n, m = sizes
    func = instantiate(of_sizes(*extents), {"n": n, "m": m})
    assert [param.ty for param in func.params] == [relax.TensorType((n, 3, m), "float32")]
    assert [var.name for var, _ in bindings(func)] == ["scaled", "shifted", "flat", "pair", "part"]
    x = torch.randn(n, 3, m)
    shifted, flat, part = interpret(func, [x]).results
    assert torch.equal(shifted, x * n + 2 * m)
    assert torch.equal(flat, x.reshape(n * m, 3)) and torch.equal(part, x[:, 1:2])


def test_a_static_function_is_its_own_instance():
    func = of_sizes(2, 3)
    assert instantiate(func, {}) is func


def test_sizes_that_the_function_is_not_made_for_are_refused():
    scope = ExtentScope()
    n, m = scope.symbol("n", 4), scope.symbol("m", 5)
    func = of_sizes(n, m)
    assert n != m
    for sizes, message in [
        ({"n": 4}, "none for m"),
        ({"n": 3, "m": 3}, "sizes with n != m"),
        ({"n": 1, "m": 3}, "n >= 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            instantiate(func, sizes)


@pytest.mark.parametrize("element_type", ["float32", "float64", "int64", "bool"])
def test_a_number_is_a_constant(element_type):
    found = number(3, element_type)
    assert (isinstance(found, Constant) and found.value.numpy() == 3) or element_type == "bool"
    assert str(found.ty.dtype) == element_type


def test_the_number_of_an_extent_reads_nothing_and_is_not_taken_for_another(extents):
    n, m = extents
    one, other = number(n, "float32"), number(n * m + 1, "float32")
    assert library_name(one) == library_name(other) == "library.extent"
    assert used_vars(one) == used_vars(other) == []
    x = Var("x", relax.TensorType((n, m), "float32"))
    scope = Scope()
    total: Expr = x
    for size, dtype in [(n, "float32"), (m, "float32"), (n, "float32"), (n + m, "float32"), (m, "float32")]:
        total = scope.emit(op.multiply(total, scope.emit(number(size, dtype), "size")))
    cleaned = clean(build_function([x], scope.body, [total]))
    kept = [str(value.args[1]) for _, value in bindings(cleaned) if library_name(value) == "library.extent"]
    assert len(kept) == 3
    (got,) = interpret(instantiate(cleaned, {"n": 2, "m": 3}), [torch.ones(2, 3)]).results
    assert torch.equal(got, torch.full((2, 3), 2.0 * 3 * 2 * 5 * 3))


def test_slices_and_fills_of_other_extents_are_not_merged(extents):
    n, m = extents
    x = Var("x", relax.TensorType((n + m, n), "float32"))
    scope = Scope()
    parts = [scope.emit(op.strided_slice(x, [0], [0], [size])) for size in (n, m, n)]
    cleaned = clean(build_function([x], scope.body, parts))
    assert len(list(bindings(cleaned))) == 2


def test_the_number_of_an_extent_has_no_gradient_and_is_not_saved(extents):
    n, m = extents
    x = Var("x", relax.TensorType((n, m), "float64"))
    scope = Scope()
    size = scope.emit(number(n, "float64"), "size")
    y = scope.emit(op.multiply(scope.emit(op.exp(x)), size))
    func = build_function([x], scope.body, [y, size])
    joint = clean(differentiate(func, [0, 1], [0]))
    parts = partition(joint, num_primals=1, num_outputs=2)
    assert not [saved.name for saved in parts.plan.saved_tensors if saved.name == "size"]
    data, grad = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    found = instantiate(joint, {"n": 3, "m": 2})
    y, size, dx = interpret(found, [data, grad, torch.ones((), dtype=torch.float64)]).results
    assert size.item() == 3
    torch.testing.assert_close(dx, 3 * data.exp() * grad, rtol=1e-12, atol=0)
    assert [type(var) for var, _ in bindings(found)].count(DataflowVar) > 0
