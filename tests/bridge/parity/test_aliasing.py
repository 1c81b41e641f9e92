"""Memory seen under several names: detach, no_grad regions, views, results that share memory. Found by tests.fuzz."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.capture.inplace_rules import share_elements
from tests.bridge.compare import Function, check_module


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(0)).requires_grad_()


class _Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.zeros(4))


class DetachedBuffer(_Buffered):
    def forward(self, x):
        self.b.detach().add_(1)
        return x * self.b


class ViewMadeWithoutGrad(_Buffered):
    def forward(self, x):
        with torch.no_grad():
            view = self.b.view(2, 2)
        view.add_(1)
        return x * self.b


class ViewWrittenInsideAndOutside(_Buffered):
    def forward(self, x):
        with torch.no_grad():
            view = self.b.view(2, 2)
            view.add_(x.mean())
        view.mul_(2)
        return x * self.b


class UpdatedTwiceWithoutGrad(_Buffered):
    def forward(self, x):
        with torch.no_grad():
            self.b.copy_(self.b * 0.5 + x.mean())
        y = x + self.b
        with torch.no_grad():
            self.b.copy_(self.b * 0.5 + y.mean())
        return y * self.b


class DetachedConstant(nn.Module):
    def forward(self, x):
        zeros = torch.zeros(4, dtype=x.dtype)
        zeros.detach().add_(1)
        return zeros * x


class MadeWithoutGradWrittenLater(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
            view = y.view(-1)
        view.mul_(3)
        return y * x


class DetachThenCompute(nn.Module):
    def forward(self, x):
        y = x.detach() * 2
        with torch.no_grad():
            y.mul_(3)
        return y.add_(1) * x


class StaysItselfWithoutGrad(nn.Module):
    """Operators that do nothing return their operand, which autograd still follows; so does a module's ``to``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.linear.to(x.device)
        y = self.linear(x)
        with torch.no_grad():
            same, (whole, _) = y.contiguous(), torch.atleast_1d(y, x)
            viewed = same.view(-1)
        return same * y.sin() + whole * viewed.view_as(y)


class CumulativeTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        return self.norm(self.norm(x) + 1)


class DetachedThenFollowed(nn.Module):
    def forward(self, x):
        y = torch.zeros(4, dtype=x.dtype)
        z = y.detach()
        z.add_(1)
        y.copy_(x[0])
        return y * x


MODULES = [
    DetachedBuffer,
    DetachedThenFollowed,
    ViewMadeWithoutGrad,
    ViewWrittenInsideAndOutside,
    UpdatedTwiceWithoutGrad,
    DetachedConstant,
    MadeWithoutGradWrittenLater,
    DetachThenCompute,
    StaysItselfWithoutGrad,
    CumulativeTwice,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_writes_are_seen_under_every_name(module):
    check_module(module, rows)


class DetachesItsArgument(nn.Module):
    def forward(self, x):
        y = x * x
        x.detach_()
        return y


class TransposesItsArgument(nn.Module):
    def forward(self, x):
        x.t_()
        return x * 2


@pytest.mark.parametrize("module", [DetachesItsArgument, TransposesItsArgument])
def test_what_a_graph_cannot_say_is_refused(module):
    x = rows().detach() if module is TransposesItsArgument else rows()
    shape = x.shape
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(module(), x)
    assert x.requires_grad is (module is not TransposesItsArgument) and x.shape == shape


class Results(nn.Module):
    def forward(self, x):
        y = torch.tan(x.t())
        same = x.movedim(-1, -1)
        return y, y.detach(), y[..., :1], same, same


def test_results_share_memory_as_in_eager():
    module = add_tvm_dispatch(Results(), rows())
    x = rows()
    y, detached, first, same, again = module(x)
    assert same is again
    assert detached.data_ptr() == y.data_ptr() == first.data_ptr() and same.data_ptr() == x.data_ptr()
    assert not detached.requires_grad and y.requires_grad
    detached.zero_()
    assert not y.any()


class PartAndWhole(nn.Module):
    def forward(self, x):
        y = torch.tan(x)
        part = y[:, 0]
        return part, y.detach(), part, y


def test_a_part_is_returned_before_the_whole():
    x = rows()
    part, detached, again, y = add_tvm_dispatch(PartAndWhole(), x)(x)
    assert part is again and part.data_ptr() == detached.data_ptr() == y.data_ptr()
    assert part.requires_grad and y.requires_grad and not detached.requires_grad
    (gradient,) = torch.autograd.grad(part.sum() + y.sum(), x)
    eager = x.detach().requires_grad_()
    part, _, _, y = PartAndWhole()(eager)
    torch.testing.assert_close(gradient, torch.autograd.grad(part.sum() + y.sum(), eager)[0])


class Parts(nn.Module):
    def __init__(self, *slices):
        super().__init__()
        self.slices = slices

    def forward(self, x):
        y = x * 2
        return tuple(y[part] for part in self.slices)


@pytest.mark.parametrize(
    "slices",
    [
        *((np.s_[:2], np.s_[1:]), (np.s_[:, 1:], np.s_[0, :2]), (np.s_[1:], np.s_[1:])),  # the whole is not returned
        *((np.s_[:1], np.s_[1:]), (np.s_[:, 1:], np.s_[:, :1]), (np.s_[::2], np.s_[1::2]), (np.s_[:2], np.s_[...])),
    ],
    ids=str,
)
def test_what_is_written_to_a_part_is_seen_in_another(slices):
    module, eager, x = add_tvm_dispatch(Parts(*slices), rows()), Parts(*slices), rows()
    results, wanted = module(x), eager(x)
    for each in (*results, *wanted):
        each.detach()[0] = 7
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected)
    assert stats(module).hits == 1


OVERLAPPING = {
    "expand": lambda y: y[:1].sin().expand(3, 4),
    "detached": lambda y: (y, y[:1].sin().detach().expand(3, 4)),
    "of a number": lambda y: (y, y.mean().expand(4)),
    "broadcast_tensors": lambda y: {"a": [torch.broadcast_tensors(y[:1].sin(), y)[0]]},
    "windows": lambda y: y.unfold(1, 2, 1),
    "as_strided": lambda y: y.as_strided((2, 3, 2), (4, 1, 1)),
    "a written one": lambda y: torch.zeros(1, 4).add_(y[:1]).expand(2, 4),
    "of a linear layer": lambda y: nn.functional.linear(y[None, :1], y[:2]).expand(2, 3, 2),
}


@pytest.mark.parametrize("function", OVERLAPPING.values(), ids=OVERLAPPING)
def test_elements_of_a_result_share_memory_as_in_eager(function):
    module = add_tvm_dispatch(Function(lambda x: function(x * 2)), rows())
    found = []
    for run in (module, Function(lambda x: function(x * 2))):
        x = rows()
        results = torch.utils._pytree.tree_leaves(run(x))
        (slope,) = torch.autograd.grad(sum(each.square().sum() for each in results), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), x)
        for each in results:
            each.detach()[(0,) * each.dim()] = 5
        found.append([*results, slope, again])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, check_stride=True)
    assert stats(module).hits == 1


def test_where_views_of_one_memory_meet():
    """Every pair of some views of a tensor of distinct numbers: views that share a number share an element."""
    base = torch.arange(24)
    tables = [base, base.view(4, 6), base.view(2, 3, 4), base.view(2, 3, 4).permute(2, 0, 1), base.view(4, 6).T[::2]]
    starts = [(table, dim, start) for table in tables for dim in range(table.dim()) for start in range(2)]
    views = [table.narrow(dim, start, 1 + (table.shape[dim] - start) // 2) for table, dim, start in starts]
    views += [base[:0], base[5], base.view(4, 6)[1:, 2:5].expand(2, 3, 3), base.view(4, 6)[:, ::3]]
    for one, other in itertools.product(views, views):
        meet = bool(set(one.flatten().tolist()) & set(other.flatten().tolist()))
        assert share_elements(one, other) is meet
    assert share_elements(base, base.view(torch.int32))


class SumsOfOne(nn.Module):
    """A sum over an axis of one element is the element: but it must not be the same memory."""

    def forward(self, x):
        y = torch.cosh(x[:1, :1])
        return y.sum(0), y, x.sum(1, keepdim=True), torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1)])
def test_results_do_not_share_what_eager_does_not_share(shape):
    x = rows(*shape).detach()
    module = add_tvm_dispatch(SumsOfOne(), x)
    for _ in range(2):
        before = x.clone()
        results = module(x)
        eager = SumsOfOne()(x)
        for result, expected in zip(results, eager, strict=True):
            torch.testing.assert_close(result, expected)
            result.fill_(7.0)
        assert torch.equal(x, before)


class Empty(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[:0] = 3.0
        return torch.softmax(x[:, :0], -1), y, torch.maximum(x[:0], x[:0])


class Backwards(nn.Module):
    def forward(self, x):
        return x[..., torch.arange(3, -1, -1)], torch.arange(5, 0, -2), torch.arange(1.0, -1.0, -0.5, dtype=x.dtype)


@pytest.mark.parametrize("module", [Empty, Backwards])
def test_empty_ranges_and_negative_steps(module):
    check_module(module, rows)


class WritesThroughStrides(nn.Module):
    def forward(self, x):
        y = x * 2
        y.as_strided((2, 3), (1, 4), 1).mul_(torch.arange(6, dtype=x.dtype).view(2, 3))
        return y


def test_as_strided_in_place():
    """torch's own derivative of ``as_strided_scatter`` is wrong where the source was written."""
    check_module(WritesThroughStrides, rows)


STRIDED_VIEWS = {
    "transposed": lambda y: y.t().as_strided((4, 2), (1, 4)),
    "copied into": lambda y: torch.empty(4, 3).to(y).t().copy_(y).as_strided((4, 2), (1, 3)),
    "a half": lambda y: y.chunk(2, 1)[1].as_strided((3, 2), (4, 1)),
    "chunks that overlap": lambda y: y.t()[1:].reshape(1, 3, 3).as_strided((3, 2, 2), (1, 4, 4)),
}


@pytest.mark.parametrize("function", STRIDED_VIEWS.values(), ids=STRIDED_VIEWS)
def test_as_strided_of_a_view(function):
    """transformers' Longformer makes chunks that overlap of a view."""
    check_module(lambda: Function(lambda x: function(x * 2)), rows)


@pytest.mark.parametrize(
    "function",
    [lambda y: y.chunk(2, 1)[1].as_strided((3, 2), (4, 1), 0), lambda y: y.unfold(1, 2, 1).as_strided((3, 2), (1, 4))],
)
def test_as_strided_of_other_memory_than_the_views_is_refused(function):
    with pytest.raises(UnsupportedModule, match=r"begins inside another|elements share memory"):
        add_tvm_dispatch(Function(lambda x: function(x * 2)), rows())


class BufferOfAnotherType(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.count = self.count * 0.5 + 0.1
        return x * 2


class MakesALeaf(nn.Module):
    def forward(self, x):
        return x.detach().requires_grad_() * 2


def test_what_a_graph_would_take_for_something_else_is_refused():
    with pytest.raises(UnsupportedModule, match="inside forward"):
        add_tvm_dispatch(MakesALeaf(), rows())


def test_a_buffer_that_the_first_call_gives_another_type():
    module, eager = BufferOfAnotherType(), BufferOfAnotherType()
    add_tvm_dispatch(module, rows())
    for step in range(3):
        x = rows()
        assert torch.equal(module(x), eager(x)) and torch.equal(module.count, eager.count)
        assert module.count.dtype == eager.count.dtype and stats(module).hits == step


class RunsDifferentiableAutograd(nn.Module):
    def forward(self, x):
        return x * torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


def test_a_gradient_that_is_differentiated_again():
    check_module(RunsDifferentiableAutograd, rows)


class WritesIntoDropped(nn.Module):
    """``self.drop(x)`` is ``x`` itself where nothing is dropped."""

    def __init__(self, rate: float):
        super().__init__()
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        h = x * 2
        y = self.drop(h)
        y += 1
        return h + y


@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.4, False), (0.4, True)])
def test_dropout_that_drops_nothing_is_its_argument(rate, training):
    check_module(lambda: WritesIntoDropped(rate).train(training), rows)


class Deviations(nn.Module):
    def forward(self, x):
        constant = x[:, :1] + torch.zeros(3, 4, dtype=x.dtype)
        degenerate = (x[:1, 0] + 0).std(-1, unbiased=False)
        return constant.std(-1), x.std(0), torch.std_mean(x, 0)[0], degenerate, x.std()


def test_standard_deviation_of_constant_rows():
    """Its gradient is zero there; the root of a variance has none."""
    check_module(Deviations, rows)


class EmptyTopk(nn.Module):
    def forward(self, x):
        y = x.topk(1, -3)[0]
        return y, y.sin().sum()


def test_gradients_of_empty_tensors_by_parts():
    x = torch.randn(1, 0, 3).requires_grad_()
    module = add_tvm_dispatch(EmptyTopk(), x)
    for chosen in (0, 1):
        (gradient,) = torch.autograd.grad(module(x)[chosen].sum(), x)
        assert gradient.shape == x.shape


@pytest.mark.parametrize("scatter", [torch.as_strided_scatter, torch.Tensor.as_strided_scatter])
def test_as_strided_scatter_has_torchs_own_derivative(scatter):
    """Torch's derivative is wrong where the source is written; so the operator is refused as a write."""
    x, y = torch.randn(5, requires_grad=True), torch.randn(2, requires_grad=True)
    module = add_tvm_dispatch(Function(lambda x, y: scatter(x * 2, y, (2,), (2,), 1)), (x, y))
    found = module(x, y), scatter(x * 2, y, (2,), (2,), 1)
    assert torch.equal(*found)
    ours, eager = (torch.autograd.grad(each.square().sum(), (x, y)) for each in found)
    torch.testing.assert_close(ours, eager)
    assert stats(module).hits == 1
    with pytest.raises(UnsupportedModule, match="torch's own derivative"):
        add_tvm_dispatch(Function(lambda x, y: torch.ops.aten.as_strided_scatter(x, y, (2,), (2,), 1)), (x, y))
