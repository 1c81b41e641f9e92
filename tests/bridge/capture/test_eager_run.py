"""Where the shape functions of fake tensors give other strides than eager's kernels, eager's are taken."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from benchmarks.peak import peak_of
from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.capture import capture
from bridge.state import SampleCall
from tests.sampling import sampled, spread


def transposed_input() -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).t().requires_grad_()


class Normalized(nn.Module):
    """A normalization of a transposed tensor: contiguous in eager, transposed on fake tensors."""

    def __init__(self, then):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.then = then

    def forward(self, x):
        return self.then(self.norm(x))


@pytest.mark.parametrize(
    "then",
    [
        lambda y: y,
        lambda y: torch.randn_like(y) * y,
        lambda y: nn.functional.dropout(y, 0.4),
        lambda y: y * torch.empty_like(y).uniform_(),
    ],
    ids=["returned", "randn_like", "dropout", "uniform_"],
)
def test_strides_are_eagers(then):
    x = transposed_input()
    eager = Normalized(then)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, x)
    results = []
    for each in (eager, module):
        torch.manual_seed(0)
        result = each(x)
        after = nn.functional.dropout(result, 0.5)
        results.append((result, after, *torch.autograd.grad(after.sum(), [x, *each.parameters()])))
    assert stats(module).hits == 1
    assert results[0][0].stride() == results[1][0].stride()
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.cpu("a copy in the trace that is a view in the eager run of a CPU")
def test_a_copy_that_is_a_view_in_eager_is_refused():
    """A write through the view changes the normalized tensor in eager and nothing in the traced graph."""

    def write(y):
        y.detach_().reshape(-1).add_(1)
        return y

    module = Normalized(write).eval()
    x = transposed_input()
    expected = module(x)
    with pytest.raises(UnsupportedModule, match="one of the two is written"):
        add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), expected)


def test_the_module_is_as_before_and_its_buffers_are_not_updated():
    module = Normalized(nn.functional.dropout)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(2)
    state = torch.get_rng_state()
    add_tvm_dispatch(module, transposed_input())
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.cpu("strides of a normalization that are others in the eager run of a CPU")
@pytest.mark.parametrize(
    "then",
    [
        lambda y: y * y.stride(0),
        lambda y: y * 2 if y.is_contiguous() else y * 3,
        lambda y: y.sin() if y.is_contiguous() else y.cos(),
        lambda y: y.as_strided((3,), (2,)),
    ],
    ids=["number", "factor", "branch", "as_strided"],
)
def test_code_that_looks_at_strides_is_refused_with_its_line(then):
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(Normalized(then).eval(), transposed_input())
    problem = caught.value.ops[0]
    assert "test_eager_run.py" in problem.where and ("stride" in problem.where or "contiguous" in problem.where)


NOT_WRITTEN = [
    lambda y: y.reshape(-1) * 2,
    lambda y: y.contiguous().sin(),
    lambda y: y.reshape(-1).sin().add_(1),
    lambda y: torch.zeros(3).add_(1).sum() * y.reshape(-1),
]


@pytest.mark.parametrize("then", sampled(NOT_WRITTEN, NOT_WRITTEN[1:3]))
def test_a_copy_that_is_a_view_in_eager_is_fine_where_nobody_writes(then):
    module = Normalized(then)
    eager = copy.deepcopy(module)
    x = transposed_input()
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), eager(x))
    assert stats(module).hits == 1


def test_a_batched_function_inside_forward():
    module = Normalized(lambda y: torch.func.vmap(torch.sin)(y.reshape(-1)))
    eager = copy.deepcopy(module)
    x = transposed_input()
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), eager(x))
    assert stats(module).hits == 1


VIEWS = [
    lambda y: y.permute(2, 1, 0).narrow(0, 0, 3),
    lambda y: y.mT[:, 1:],
    lambda y: y[..., ::2],
    lambda y: y.permute(1, 2, 0),
    lambda y: y[:1].expand(3, -1, -1).mT,
    lambda y: y[:, :1].expand(-1, 4, -1).permute(2, 0, 1),
]


@pytest.mark.parametrize("view", sampled(VIEWS, spread(VIEWS)))
def test_a_draw_for_a_result_falls_as_in_eager(view):
    class Made(nn.Module):
        def forward(self, x):
            return view(x * 2)

    module, eager = Made(), Made()
    x = torch.arange(2.0 * 3 * 5).reshape(2, 3, 5)
    add_tvm_dispatch(module, x)
    drawn = []
    for each in (module, eager):
        torch.manual_seed(0)
        drawn.append(torch.rand_like(each(x)))
    assert stats(module).hits == 1 and torch.equal(*drawn)


ASKING = (torch.compiler.is_compiling, torch.compiler.is_exporting)


def assert_dispatched_as_eager(module):
    eager, x = copy.deepcopy(module), transposed_input()
    add_tvm_dispatch(module, x)
    results = []
    for each in (module, eager):
        torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results)
    assert stats(module).hits == 1


@pytest.mark.composes(
    "branches on `torch.compiler.is_compiling()`",
    "traced as eager goes where they compute other numbers",
    section="Guards",
)
@pytest.mark.parametrize("asks", ASKING)
def test_another_result_where_forward_asks_whether_it_is_traced_is_eagers(asks):
    assert_dispatched_as_eager(Normalized(lambda y: nn.functional.dropout(y.sin() if asks() else y.cos(), 0.3)))


def test_eagers_branch_is_traced_where_the_other_one_cannot_be():
    """As in transformers' LongT5, whose traced branch requires a mask that it does not make."""
    assert_dispatched_as_eager(Normalized(lambda y: y + (None if torch.compiler.is_compiling() else y).sin()))


class Padded(nn.Module):
    """Asks ``is_compiling()`` before it makes a mask, as transformers does."""

    def forward(self, x, kept):
        traced = torch.compiler.is_compiling() or isinstance(kept, torch._subclasses.FakeTensor)
        return x.cos() if traced or not kept.all() else x.sin()


def test_a_number_that_eager_alone_reads_decides_about_the_branch():
    """Nor does forward see there that tensors are fake; elsewhere ``FakeTensor`` keeps its name."""
    x, kept = transposed_input(), torch.ones(4, dtype=torch.bool)
    module = add_tvm_dispatch(Padded(), (x, kept), on_miss="compile")
    for mask in (kept, ~kept, kept):
        torch.testing.assert_close(module(x, mask), Padded()(x, mask))
    assert stats(module).hits == 3 and len(stats(module).entries) == 2
    assert torch._subclasses.FakeTensor is FakeTensor


def test_a_branch_of_eagers_that_numbers_decide_is_refused():
    module = Normalized(lambda y: y.sin() if torch.compiler.is_compiling() else y[y > 0])
    with pytest.raises(UnsupportedModule, match="the shape of a result depends on numbers that forward computes"):
        add_tvm_dispatch(module, transposed_input())


@pytest.mark.parametrize(
    "dtype",
    sampled(
        [torch.complex32, torch.complex64, torch.float16, torch.bool, torch.int8],
        [torch.complex32, torch.complex64, torch.bool],
    ),
)
def test_results_of_every_type_are_compared(dtype):
    """Where they differ, eager's branch is traced. Whatever is then refused is refused by name."""
    for scale in (1, 2):
        module = Normalized(lambda y, scale=scale: (y * (scale if torch.compiler.is_compiling() else 1)).to(dtype))
        eager, x = copy.deepcopy(module.eval()), transposed_input() * 10
        try:
            add_tvm_dispatch(module, x)
        except UnsupportedModule:
            assert dtype == torch.complex32
            continue
        torch.testing.assert_close(module(x), eager(x))
        assert stats(module).hits == 1 and dtype != torch.complex32


@pytest.mark.parametrize("asks", ASKING)
def test_the_same_result_in_another_way_is_fine(asks):
    assert_dispatched_as_eager(Normalized(lambda y: nn.functional.dropout(y * 2 if asks() else y + y, 0.3)))


class Deep(nn.Module):
    """Every layer's activations are saved for the backward; the result is of their size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))

    def forward(self, x):
        y = self.layers(x)
        return y if torch.compiler.is_compiling() else y.clone()


@pytest.mark.cpu("bytes of the host")
def test_capturing_takes_less_memory_than_a_step():
    """It is run twice, as forward asks whether it is traced, and no graph of either holds activations."""
    module, x = Deep(), torch.randn(4096, 64)
    capture(SampleCall(module, (x[:2],), {}))  # imports
    assert peak_of(lambda: capture(SampleCall(module, (x,), {}))) <= 0.5 * peak_of(lambda: module(x).sum().backward())


class Tries(nn.Module):
    """Catches eager's errors; torch's formula of a view on fake tensors raises another type."""

    def __init__(self, shapes):
        super().__init__()
        self.linear, self.shapes = nn.Linear(4, 4, dtype=torch.float64), shapes

    def forward(self, x):
        y = self.linear(x).t()
        for shape in self.shapes:
            try:
                return y.view(shape) * 2
            except RuntimeError as error:
                assert isinstance(error, RuntimeError)
        return y.reshape(-1) * 3


@pytest.mark.parametrize("shapes", [[(-1,)], [(5, -1), (2, 6)], [(-1,), (4, -1)]])
@pytest.mark.parametrize("dims", [None, ({0: torch.export.Dim.AUTO},)], ids=["fixed", "varying"])
def test_errors_that_forward_catches_are_eagers(shapes, dims):
    eager = Tries(shapes)
    module = add_tvm_dispatch(copy.deepcopy(eager), torch.randn(3, 4, dtype=torch.float64), dynamic_shapes=dims)
    for rows in (3, 3) if dims is None else (3, 7):
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(module(x), eager(x))
    assert stats(module).hits == 2 or shapes == [(5, -1), (2, 6)]  # 28 elements are no 2 rows of 6: a miss
