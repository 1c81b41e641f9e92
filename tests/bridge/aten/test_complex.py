"""Complex numbers: outputs, gradients and updates are eager's, in float64 to 1e-10."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, save_compiled, stats
from tests.bridge.compare import Call, Function, check_module
from tests.sampling import sampled


def numbers(*shape, zeros=False):
    found = torch.randn(*shape, dtype=torch.complex128)
    if zeros:
        found.view(-1)[::3] = 0
    return found.requires_grad_()


class Rotary(nn.Module):
    """Rotary embedding as complex multiplication by a complex buffer."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(5.0), 10 ** -torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        q = torch.view_as_complex(self.linear(x).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(q * self.turns[None, : x.shape[1]]).flatten(2)


class Mixing(nn.Module):
    """FNet's token mixing."""

    def forward(self, x):
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class Spectral(nn.Module):
    """A spectral convolution, as of Fourier neural operators, with complex weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.tensor(1j).dtype) / 4)

    def forward(self, x):
        modes = torch.fft.rfft(x)
        kept = torch.einsum("bix,iox->box", modes[..., :5], self.weight)
        out = torch.zeros(x.shape[0], 4, modes.shape[-1], dtype=modes.dtype)
        out[..., :5] = kept
        return torch.fft.irfft(out, n=x.shape[-1])


class DiagonalStates(nn.Module):
    """A diagonal state-space kernel with complex poles (S4D)."""

    def __init__(self):
        super().__init__()
        self.log_real, self.imaginary = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.arange(3.0).repeat(4, 1))
        self.c = nn.Parameter(torch.randn(4, 3, 2))
        self.log_dt = nn.Parameter(torch.full((4,), -2.0))

    def forward(self, u):
        length, c = u.shape[-1], torch.view_as_complex(self.c)
        a = -torch.exp(self.log_real) + 1j * self.imaginary
        da = a * torch.exp(self.log_dt).unsqueeze(-1)
        c = c * (torch.exp(da) - 1.0) / a
        k = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(da.unsqueeze(-1) * torch.arange(length))).real
        return torch.fft.irfft(torch.fft.rfft(k, n=2 * length) * torch.fft.rfft(u, n=2 * length), n=2 * length)[
            ..., :length
        ]


class Waves(nn.Module):
    """Short-time transform, magnitudes and phases."""

    def forward(self, x):
        found = torch.stft(x, 8, 4, window=torch.hann_window(8, dtype=x.dtype, device=x.device), return_complex=True)
        return found.abs(), (found + 9).angle()


MODELS = {
    "rotary": (Rotary, lambda: torch.randn(2, 5, 8, requires_grad=True)),
    "FNet": (Mixing, lambda: torch.randn(2, 5, 6, requires_grad=True)),
    "spectral": (Spectral, lambda: torch.randn(2, 3, 16, requires_grad=True)),
    "S4D": (DiagonalStates, lambda: torch.randn(2, 4, 9, requires_grad=True)),
    "stft": (Waves, lambda: torch.randn(2, 32, requires_grad=True)),
}


@pytest.fixture
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", sampled(MODELS, lambda name: name != "spectral"))
def test_models(name, in_float64):
    torch.manual_seed(0)
    compare(MODELS[name][0](), MODELS[name][1]())


def compare(module, *args):
    """Asserts that results, and gradients of inputs and parameters, equal eager's."""
    eager, given = copy.deepcopy(module), [each.detach().clone().requires_grad_() for each in args]
    wanted, found = eager(*given), add_tvm_dispatch(module, args)(*args)
    assert stats(module).hits == 1
    one = isinstance(wanted, torch.Tensor)
    wanted, found = ([wanted], [found]) if one else (list(wanted), list(found))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    weights = [torch.randn_like(each) for each in wanted]
    for results in (wanted, found):
        torch.autograd.backward(results, weights)
    pairs = zip((*args, *module.parameters()), (*given, *eager.parameters()), strict=True)
    for ours, theirs in ((ours.grad, theirs.grad) for ours, theirs in pairs):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


FUNCTIONS = {
    "add": lambda a, b: a + b,
    "add with a factor": lambda a, b: torch.add(a, b, alpha=2),
    "add a real one with a factor": lambda a, b: torch.add(a, b.real, alpha=3),
    "subtract from a number": lambda a, b: (1 + 2j) - a,
    "real times complex": lambda a, b: a * b.real,
    "divide": lambda a, b: a / (b + 3),
    "divide by a number": lambda a, b: a / (1 - 2j),
    "one over": lambda a, b: 1 / (b + 3),
    "square": lambda a, b: a**2 + b.square(),
    "power": lambda a, b: (a + 4) ** 1.5,
    "size": lambda a, b: a.abs(),
    "sign": lambda a, b: torch.sgn(a),
    "angle": lambda a, b: (a + 2).angle(),
    "conjugate": lambda a, b: a.conj() * b,
    "parts": lambda a, b: a.real * b.imag,
    "exponential": lambda a, b: torch.exp(a) * torch.log(b + 4),
    "roots and waves": lambda a, b: torch.sqrt(a + 4) + torch.sin(b) * torch.tanh(a),
    "sums": lambda a, b: a.sum(0) * b.mean() + a.cumsum(0)[-1] * torch.prod(b + 1, 0),
    "products": lambda a, b: a @ b.mT + (a.mH @ b).sum(),
    "shapes": lambda a, b: torch.cat([a.t().reshape(3, 4)[1:], torch.stack([b.flatten()[:4], a.flatten()[:4]])]).flip(
        0
    ),
    "real among complex": lambda a, b: torch.cat([a, b.real]) * torch.where(torch.tensor([True, False, True]), 2.0, 1j),
    "index": lambda a, b: a[torch.tensor([0, 2, 2])] + torch.nn.functional.pad(b, (0, 0, 0, -1)),
    "write": lambda a, b: a.clone().index_put((torch.tensor([1]),), b[0] * 2) + torch.zeros_like(a).fill_(1 + 1j),
    "views": lambda a, b: torch.view_as_real(a * b).sum(-1),
    "linear algebra": lambda a, b: torch.linalg.solve(a[:3] + 4 * torch.eye(3), b[:3]),
    "waves": lambda a, b: torch.fft.ifft2(torch.fft.fft2(a) * b),
    "a number": lambda a, b: a.sum().flip(0) * b.sum().real.flip(0),
    "types": lambda a, b: a.to(torch.complex64).to(torch.complex128) + b.real.to(torch.complex128),
}


AT_ZERO = ("size", "sign")
ALIKE = ("add with a factor", "subtract from a number", "divide", "conjugate", "index")
"""Functions that another case or a test of special points covers."""
OTHERS = [name for name in FUNCTIONS if name not in (*AT_ZERO, *ALIKE)]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(
    "names",
    sampled(
        [pytest.param(each) for each in (AT_ZERO, ALIKE, *(OTHERS[at::3] for at in range(3)))],
        lambda names: names is not ALIKE,
    ),
    ids=lambda names: f"{names[0]} and others",
)
def test_functions(names):
    torch.manual_seed(0)
    all_of_them = Function(lambda a, b: tuple(FUNCTIONS[name](a, b) for name in names))
    compare(all_of_them, numbers(4, 3, zeros=names is AT_ZERO), numbers(4, 3))


TRANSFORMS = {
    "all axes": lambda a, x: (torch.fft.fftn(a), torch.fft.ifftn(x).imag),
    "one axis": lambda a, x: (torch.fft.fft(a, dim=0, norm="ortho"), torch.fft.ifft(x, n=7, norm="forward").real),
    "half of the frequencies": lambda a, x: (torch.fft.rfft(x), torch.fft.rfft2(x, norm="forward")),
    "half, an even number": lambda a, x: (torch.fft.rfft(x, n=8, dim=0), torch.fft.ihfft(x, n=6)),
    "real results": lambda a, x: (torch.fft.irfft(a, n=5), torch.fft.irfft(a, n=6, dim=0, norm="ortho")),
    "real results of several axes": lambda a, x: (torch.fft.irfftn(a), torch.fft.hfft(a, n=9)),
    "from real to complex and back": lambda a, x: (torch.fft.irfft2(torch.fft.rfft2(x) * torch.fft.fft2(a)[:, :3]),),
    "parts of one": lambda a, x: (torch.view_as_real(torch.fft.fft(x))[..., 0], torch.fft.fft(torch.complex(x, x * 0))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_linear(name):
    """The gradient of a Fourier transform is another one: no transform of the forward is computed again."""
    torch.manual_seed(0)
    module = Function(TRANSFORMS[name])
    compare(module, numbers(4, 5), torch.randn(4, 5, dtype=torch.float64, requires_grad=True))
    assert "operator_vjp" not in str(stats(module).entries[0].backward)


def test_a_transform_reads_the_real_part_of_a_real_tensor(in_float64):
    """FNet's mixing has no concatenations with imaginary zeros, neither forward nor backward."""
    module = add_tvm_dispatch(Mixing(), torch.randn(2, 5, 6, requires_grad=True))
    programs = [str(each) for entry in stats(module).entries for each in (entry.forward, entry.backward)]
    assert all("_fft" in text and "cat(" not in text and "pad(" not in text for text in programs)


def test_training_with_complex_parameters(in_float64):
    torch.manual_seed(0)
    eager = Spectral()
    ours = copy.deepcopy(eager)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    add_tvm_dispatch(ours, x)
    for module in (eager, ours):
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
        for _ in range(10):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert stats(ours).hits == 10
    torch.testing.assert_close(ours.weight, eager.weight, rtol=1e-10, atol=1e-12)


def test_extremes_of_sizes_and_quotients():
    huge = torch.tensor([3e200 + 4e200j, 3e-200 - 4e-200j, 0j, complex("inf"), complex(0, 2)], dtype=torch.complex128)
    module = Function(lambda a: (a.abs(), a[:2] / a[:2].flip(0).conj().flip(0)))
    wanted = module(huge)
    add_tvm_dispatch(module, huge)
    for ours, theirs in zip(module(huge), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


SPECIAL = {
    "exponential": lambda a, b: a.exp(),
    "one over": lambda a, b: a.reciprocal(),
    "quotient": torch.div,
    "size": lambda a, b: a.abs(),
    "angle": lambda a, b: a.angle().detach(),
    "product": torch.mul,
    "sum": torch.add,
    "difference": torch.sub,
    "difference, turned": lambda a, b: torch.rsub(a, b, alpha=2j),
    "sums with numbers and real tensors": lambda a, b: torch.cat([2 - a, a - 2j, b.real - a, a + b.imag]),
    "multiple": lambda a, b: torch.cat([2 * a, b / 2]),
    "product with a real tensor": lambda a, b: b.real * a,
    "quotients with real tensors": lambda a, b: torch.cat([a / b.detach().imag, b.real / a.detach()]),
    "mean": lambda a, b: torch.cat([torch.stack([a, b]).mean(0), torch.stack([a, b], 1).mean(1)]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_parts_that_are_not_finite(name):
    """Values and gradients are eager's for all pairs of parts that are zero of either sign, infinite or nan."""
    function = SPECIAL[name]
    parts = [math.inf, -math.inf, math.nan, 1.0, 0.0, -0.0, -2.0]
    every = torch.tensor([complex(a, b) for a in parts for b in parts], dtype=torch.complex128)
    given = [each.flatten() for each in torch.meshgrid(every, every, indexing="ij")]
    module = add_tvm_dispatch(Function(function), tuple(numbers(*each.shape) for each in given))
    found = []
    for each in (module, function):
        leaves = [parts.clone().requires_grad_() for parts in given]
        made = each(*leaves)
        if made.requires_grad:
            made.backward(torch.full_like(made, 1 + 1j if made.is_complex() else 1.0))
        results = [made.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        found.append([torch.view_as_real(result) if result.is_complex() else result for result in results])
    torch.testing.assert_close(*found, rtol=1e-14, atol=1e-15, equal_nan=True)
    assert stats(module).hits == 1


@pytest.mark.parametrize(
    "function", [lambda x: torch.complex(x, x * 0.5).abs(), lambda x: torch.polar(x.abs(), x * 1e-39).real]
)
def test_gradients_of_huge_sizes(function):
    """The gradient is eager's although a factor of it overflows, and 0 where the absolute value itself does."""
    given = torch.tensor([1e38, -2e38, 3.4e38, 1e-38, 0.0])
    module = Function(function)
    add_tvm_dispatch(module, torch.ones_like(given).requires_grad_())
    found = []
    for each in (module, function):
        x = given.clone().requires_grad_()
        made = each(x)
        found.append(torch.autograd.grad(made, x, torch.full_like(made, -3.0))[0])
    torch.testing.assert_close(*found)
    assert stats(module).hits == 1


@pytest.mark.parametrize("function", [torch.conj, torch.Tensor.mH.__get__, lambda a: (a * 1j).conj()])
def test_conjugate_views(function):
    x = torch.randn(3, 4, dtype=torch.complex64)
    module = add_tvm_dispatch(Function(function), x)
    for given in (x, x.conj()):
        torch.testing.assert_close(module(given), function(given))


def test_a_pending_conjugation_of_an_argument():
    x = torch.randn(3, dtype=torch.complex64)
    module = Function(lambda a: a * 2j)
    wanted = module(x.conj())
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x.conj()), wanted)


def test_check_of_complex_stages():
    lowered = lower(Rotary(), torch.randn(2, 5, 8))
    assert lowered.check()


def drawn(a):
    """Complex draws in several layouts, a mask after them; a tensor that is empty at first."""
    noise = torch.randn(4, 3, dtype=a.dtype, device=a.device) + torch.randn_like(a.t()).t()
    written = torch.empty(3, 5, dtype=a.dtype, device=a.device)
    written[:, :3] = (a * noise)[1:]
    written[:, 3:] = torch.rand_like(a)[1:, :2] * torch.empty_like(a).normal_(0, 2)[:3, 1:]
    return torch.nn.functional.pad(written[None], (1, 2), mode="circular"), torch.dropout(a.abs(), 0.5, True)


def test_complex_draws():
    """Values and gradients are eager's, the generator is where eager leaves it."""
    check_module(lambda: Function(drawn), lambda: Call((numbers(4, 3),)), calls=2, rtol=1e-10, atol=1e-12)


def test_a_gradient_of_a_gradient_through_writes():
    """torch has no derivative of its functional writes of complex numbers, which the traced graph has."""
    function = add_tvm_dispatch(Function(drawn), numbers(4, 3))
    given, found = numbers(4, 3), []
    for module in (function, Function(drawn)):
        torch.manual_seed(1)
        loss = sum(each.abs().square().sum() for each in module(given))
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        found.append(torch.autograd.grad(slope.abs().square().sum(), given)[0])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_half_precision_is_refused_by_name():
    with pytest.raises(UnsupportedModule, match="complex numbers of half precision"):
        add_tvm_dispatch(Function(lambda a: a), torch.zeros(2, dtype=torch.complex32))


def test_a_saved_call_has_no_complex_tensors(tmp_path, in_float64):
    module = add_tvm_dispatch(Rotary(), torch.randn(2, 5, 8))
    with pytest.raises(UnsupportedModule, match="complex numbers: cannot be saved"):
        save_compiled(module, tmp_path / "rotary")
    assert not (tmp_path / "rotary").exists()


def test_a_gradient_penalty(in_float64):
    torch.manual_seed(0)
    eager, x = DiagonalStates(), torch.randn(2, 4, 9)
    ours = add_tvm_dispatch(copy.deepcopy(eager), x.clone().requires_grad_())
    for module in (eager, ours):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(given).square().sum(), given, create_graph=True)
        slope.square().sum().backward()
    torch.testing.assert_close(ours.c.grad, eager.c.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "function", [lambda x: len(x) - x, lambda x: torch.sub(x, x.conj(), alpha=len(x)), lambda x: x / len(x)]
)
def test_sizes_that_vary_as_numbers(function):
    module, x = Function(function), torch.randn(8, dtype=torch.complex128)
    add_tvm_dispatch(module, torch.randn(5, dtype=torch.complex128), dynamic_shapes=(({0: torch.export.Dim("n")},),))
    torch.testing.assert_close(module(x), function(x))
    assert stats(module).hits == 1


def test_the_gradient_of_a_sign_is_finite_where_its_reciprocal_overflows():
    """As in eager, whose kernel of many elements computes it: ``(g - Re(conj(s) g) s) / |z|``."""
    z = torch.full((64,), torch.finfo(torch.complex64).tiny / 16 * (1 + 0.5j), dtype=torch.complex64)
    sign = (1 + 0.5j) / abs(1 + 0.5j)
    cotangent = torch.full((64,), sign * (1 + 1e-3j), dtype=torch.complex64)  # nearly along z
    module = add_tvm_dispatch(Function(lambda z: torch.sgn(z)), z.requires_grad_())
    (found,) = torch.autograd.grad(module(z), z, cotangent)
    wanted = 1e-3j * sign / (torch.finfo(torch.complex64).tiny / 16 * abs(1 + 0.5j))
    assert stats(module).hits == 1
    torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-3, atol=0)


class _Parts(nn.Module):
    def forward(self, z):
        return z.real, z.imag[1:], 2 * z


def test_parts_of_a_conjugated_argument_share_its_memory():
    """The entry is for an argument that is not conjugated; a write to a result is a write to the argument."""
    module, z = _Parts(), torch.randn(3, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    add_tvm_dispatch(module, z)
    for given, twin in ((z.clone(), z.clone()), (z.clone().conj(), z.clone().conj())):
        found, wanted = module(given), _Parts()(twin)
        assert all(map(torch.equal, found, wanted))
        for result in (found, wanted):
            result[0].mul_(3)
            result[1].add_(1)
        assert torch.equal(given, twin)
    assert stats(module).hits == 2
