"""Operators without a conversion: torch's own kernel and derivative; non-functional operators are refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from bridge import UnsupportedModule, add_tvm_dispatch, lower, save_compiled, stats
from tests.bridge.compare import Call, Function, assert_same, check_module, run
from tests.sampling import sampled


def square(*extents):
    return torch.randn(*(extents or (4, 4)), dtype=torch.float64, requires_grad=True)


def gram(x):
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def resynthesized(x, window):
    return torch.istft(torch.stft(x, 4, 1, window=window, return_complex=True), 4, 1, window=window.flip(0), length=3)


OPERATORS = {
    "eigenvalues": lambda x: torch.linalg.eigvalsh(gram(x)),
    "eigenvectors": lambda x: torch.linalg.eigh(gram(x))[1].abs(),
    "singular values": torch.linalg.svdvals,
    "singular vectors": lambda x: torch.linalg.svd(x)[0].abs(),
    "both factors": lambda x: torch.linalg.qr(x),
    "one factor of three": lambda x: torch.linalg.svd(x)[2].square(),
    "condition": torch.linalg.cond,
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "a function of two": lambda x: torch.special.zeta(x.detach().abs() + 2, torch.tensor(1.5)) * x,
    "polynomials": lambda x: torch.special.hermite_polynomial_h(x.detach(), 3) * x,
    "integers beside": lambda x: torch.histogram(x.detach(), 4).hist.sum() * x,
    "several dtypes": lambda x: torch.linalg.lu_factor(x)[0] * torch.geqrf(x.detach())[1],
}


OPERATORS |= {
    "covariances": lambda x: torch.cov(x, fweights=torch.arange(1, 5, device=x.device), aweights=x[0].detach().abs()),
    "correlations": torch.corrcoef,
    "combinations": lambda x: torch.combinations(x[0], 3) * torch.combinations(x[1], 2, True)[:4, :1],
    "quantiles": lambda x: torch.quantile(x, x[0, :2].detach().sigmoid(), dim=1) * x.nanquantile(0.3),
    "a signal": lambda x: resynthesized(x, x[0].sin() + 2),
    "least squares": lambda x: torch.linalg.lstsq(x[:, :2], x[:, 2:]).solution + torch.linalg.lstsq(x, x.sum(1))[0][:2],
    "a random basis": lambda x: torch.svd_lowrank(x, 2)[1],
    "a user's operator": lambda x: torch.ops.bridge_tests.cubed(x) + torch.ops.bridge_tests.cubed(x.mean()),
}


@torch.library.custom_op("bridge_tests::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cubed.register_fake
def _(x):
    return torch.empty_like(x)


cubed.register_autograd(
    lambda ctx, grad: 3.5 * grad * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("bridge_tests::mixed_flat", mutates_args=())
def mixed_flat_op(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x + y * z).flatten()


@mixed_flat_op.register_fake
def _(x, y, z):
    return x.new_empty(x.numel())


mixed_flat_op.register_autograd(
    lambda ctx, grad: (
        grad.view_as(ctx.saved_tensors[0]),
        *(grad.view_as(each) * each for each in ctx.saved_tensors[::-1]),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


@torch.library.custom_op("bridge_tests::doubled_into", mutates_args={"y"})
def doubled_into(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(2 * x)


doubled_into.register_fake(lambda x, y: None)


@torch.library.custom_op("bridge_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


_HOST = pytest.mark.cpu("torch has this operator on the CPU alone")


_ALIKE = {
    "eigenvalues",
    "eigenvectors",
    "singular vectors",
    "one factor of three",
    "polynomials",
    "correlations",
    "condition",
}
"""Operators whose kind another case covers: arguments, and which results are differentiated."""


@pytest.mark.parametrize(
    "operator",
    sampled(
        [pytest.param(n, marks=_HOST) if n == "integers beside" else n for n in OPERATORS], lambda n: n not in _ALIKE
    ),
)
def test_results_and_gradients(operator):
    check_module(lambda: Function(OPERATORS[operator]), lambda: Call((square(),)), calls=1, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", ["a user's", "of complex numbers"])
def test_a_derivative_that_is_a_view_of_the_gradient(function):
    """The gradient's memory is dead then, and the gradients of y are added up there."""

    def users(x, y):
        return torch.ops.bridge_tests.mixed_flat(x, y, y) * 2

    def complex_numbers(x, y):
        return torch.view_as_real(torch.addcmul(*map(torch.view_as_complex, (x, y, y)))) * 2

    taken = users if function == "a user's" else complex_numbers
    made = partial(Function, lambda x, y, weight: taken(x @ weight, y @ weight))
    check_module(made, lambda: Call((square(4, 2), square(4, 2), square(2, 2))), calls=1, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("product", ["addmm", "addmv", "baddbmm", "addbmm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_times_zero_is_read_where_torchs_kernel_reads_it(product, dtype):
    """Whether infinite and nan are read depends on type, size and library."""

    def call():
        x, y = (square(2, 3, 3).detach().to(dtype) for _ in range(2))
        x[:, 0, 1], x[:, 2, 2] = math.inf, math.nan
        matrices = {"addmm": (x[0], y[0]), "addmv": (x[0], y[0, 0])}.get(product, (x, y))
        added = y[:, 0] if product == "baddbmm" else y[0, 0]
        added = added[:, None] if product == "baddbmm" else added
        return Call(tuple(each.clone().requires_grad_() for each in (added, *matrices)))

    check_module(lambda: Function(partial(getattr(torch, product), alpha=0, beta=0.5)), call, calls=1, rtol=0, atol=0)


@pytest.mark.parametrize(
    "operator",
    [
        torch.cov,
        lambda x: torch.combinations(x[0]),
        lambda x: resynthesized(x, x[0].detach().sin() + 2),
    ],
)
def test_a_result_that_is_written(operator):
    """The run on fake tensors replays no rows whose results change; torch's formula reads numbers there."""
    module = Function(lambda x: operator(x).mul_(2).sin())
    check_module(lambda: module, lambda: Call((square(),)), calls=1, rtol=1e-10, atol=1e-12)


def test_what_nothing_uses_has_no_gradient():
    """For equal singular values the vectors' terms would be 0 / 0; eager leaves them out."""

    def values(x):
        return torch.linalg.svd(torch.eye(3, dtype=x.dtype, device=x.device) * x.sum())[1]

    check_module(lambda: Function(values), lambda: Call((square(),)), calls=1)


@pytest.mark.cpu("a GPU's kernel has bfloat16 alone")
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.float32, 12), (torch.float16, 8)])
def test_products_of_groups(dtype, width, caplog):
    """torch's formula for fake tensors has bfloat16 alone: transformers' mixtures of experts were refused."""
    groups = torch._grouped_mm
    function = Function(
        lambda rows, matrices, ends: groups(rows, matrices.mT, offs=ends) * groups(rows, matrices.mT, offs=ends).mul_(2)
    )
    eager = Function(function.function)
    given = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((12, 16), (4, width, 16))]
    add_tvm_dispatch(function, (*given, torch.tensor([3, 6, 6, 12]).int()))
    assert not any("meta" in each.getMessage() for each in caplog.records)  # torch's, of a formula that fails
    for ends in ([3, 6, 6, 12], [0, 1, 9, 12]):
        call = Call((*given, torch.tensor(ends).int()))
        assert_same(run(function, call), run(eager, call), rtol=0, atol=0)
    assert stats(function).hits == 2


def test_an_operator_without_a_derivative_is_for_inference():
    function = Function(lambda x: torch.linalg.ldl_factor(gram(x))[0])
    x = square().detach()
    expected = function(x)
    torch.testing.assert_close(add_tvm_dispatch(function, x)(x), expected, rtol=0, atol=0)
    assert stats(function).hits == 1


def test_a_size_that_varies():
    function = Function(torch.linalg.svdvals)
    add_tvm_dispatch(function, square(5, 3, 4), dynamic_shapes={"args": ({0: torch.export.Dim.DYNAMIC},)})
    for batch in (2, 5, 7):
        x = square(batch, 3, 4)
        mine, eagers = (x.detach().clone().requires_grad_() for _ in range(2))
        expected = run(Function(torch.linalg.svdvals), Call((eagers,)))
        assert_same(run(function, Call((mine,))), expected, rtol=1e-10, atol=1e-12)
    assert stats(function).hits == 3


def test_weights_that_eager_refuses_are_its_error_at_the_call():
    function = Function(lambda x, weights: torch.cov(x, aweights=weights))
    add_tvm_dispatch(function, (square(), torch.ones(4, dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="aweights cannot be negative"):
        function(square(), torch.tensor([1.0, -1, 1, 1], dtype=torch.float64))
    assert stats(function).misses.total() == 1


@pytest.mark.cpu("torch wants the places on the CPU")
def test_a_split_at_places_is_a_number_that_is_read():
    function = Function(lambda x, places: torch.tensor_split(x, places, dim=1)[1] * 2)
    add_tvm_dispatch(function, (square(), torch.tensor([1, 3])))
    for places in (torch.tensor([1, 3]), torch.tensor([0, 3])):
        x = square()
        torch.testing.assert_close(function(x, places), x[:, places[0] : places[1]] * 2)
    assert stats(function).hits == 1 and stats(function).misses.total() == 1


@pytest.mark.parametrize("view", [torch.view_as_real, torch.real, torch.imag])
def test_parts_of_an_argument_are_a_view_of_it(view):
    z = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    function = add_tvm_dispatch(Function(lambda z: (view(z), z * 2)), z)
    mine, eagers = z.detach().clone().requires_grad_(), z.detach().clone().requires_grad_()
    (part, double), (expected, _) = function(mine), (view(eagers), eagers * 2)
    assert part.untyped_storage()._cdata == mine.untyped_storage()._cdata and part.stride() == expected.stride()
    torch.testing.assert_close(part, expected)
    (part.sin().sum() + double.abs().sum()).backward()
    (expected.sin().sum() + (eagers * 2).abs().sum()).backward()
    torch.testing.assert_close(mine.grad, eagers.grad)
    assert stats(function).hits == 1


def test_a_complex_view_of_a_real_argument():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    function = add_tvm_dispatch(Function(torch.view_as_complex), x)
    found = function(x)
    assert found.untyped_storage()._cdata == x.untyped_storage()._cdata
    torch.testing.assert_close(found, torch.view_as_complex(x))
    (gradient,) = torch.autograd.grad(found.abs().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(torch.view_as_complex(x).abs().sum(), x)[0])


REFUSED = {
    "an operator of a user's that writes": (
        lambda x: (y := torch.empty_like(x), torch.ops.bridge_tests.doubled_into(x.detach(), y), x * y)[2],
        "writes into its arguments",
    ),
    "a draw that no tag tells": (lambda x: torch.ops.bridge_tests.noisy(x.detach()) * x, "has no tag that says so"),
    "sparse tensors": (lambda x: x.to_sparse().to_dense(), "_to_sparse.default: makes a tensor of layout"),
    "a draw": (lambda x: torch.nn.functional.rrelu(x, 0.2, 0.2, training=True), "closer than"),
    "residuals": (lambda x: torch.linalg.lstsq(x, x).residuals, "the shape of a result depends on the numbers"),
    "a complex norm": (lambda x: torch.linalg.vector_norm(x * 1j, 0), "a norm of order 0: eager has no gradient there"),
    "a distance": (lambda x: torch.dist(x, x * 2, 0), "a norm of order 0: eager has no gradient there"),
    "no reflections": (
        lambda x: torch.linalg.householder_product(x * 1j, x[0, :0] + 0j),
        "eager has no gradient there",
    ),
    "memory": (lambda x: x + torch.ops.aten._lazy_clone(x), "about memory"),
    "an effect": (
        lambda x: x + torch.ops.aten._functional_assert_async.msg(x[0, 0] < 9, "", x[0, 0]),
        "beside its result",
    ),
}


@pytest.mark.parametrize("operator", [pytest.param(n, marks=_HOST) if n == "an effect" else n for n in REFUSED])
def test_refused_by_name(operator):
    function, words = REFUSED[operator]
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(Function(function), square())


def test_it_is_named_in_the_program():
    text = str(lower(Function(torch.linalg.svdvals), square())["imported"].function)
    assert 'R.str("aten._linalg_svd.default")' in text


def test_no_native_form(tmp_path):
    function = add_tvm_dispatch(Function(torch.linalg.svdvals).eval(), square().detach())
    with pytest.raises((ValueError, UnsupportedModule), match="_linalg_svd"):
        save_compiled(function, tmp_path / "out", native=True)
