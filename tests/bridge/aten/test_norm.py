"""Normalization layers in train mode: statistics, buffers, affine parameters, reparametrized weights."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bridge import add_tvm_dispatch, stats
from bridge.capture.passes.decompositions import instance_norm
from tests.bridge.compare import check_module
from tests.sampling import sampled

SHAPES = {1: (5, 4, 6), 2: (3, 4, 5, 6), 3: (2, 4, 3, 2, 5)}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("rank", "options"),
    sampled(
        itertools.product(
            (1, 2, 3), ({}, {"momentum": None}, {"momentum": 0.3, "affine": False}, {"track_running_stats": False})
        ),
        lambda case: case[0] == 2 or (case[0] == 1 and not case[1]),
    ),
    ids=str,
)
def test_batch_norm(rank, options):
    check_module(lambda: BATCH_NORMS[rank](4, **options), lambda: leaf(*SHAPES[rank]), calls=3)


@pytest.mark.sweep  # behind a layer, below
def test_batch_norm_of_rows():
    check_module(lambda: nn.BatchNorm1d(4, momentum=None), lambda: leaf(7, 4), calls=3)


def averaged(x, dispatched):
    """A cumulative average's running statistics after three batches."""
    norm = nn.BatchNorm2d(3, momentum=None)
    if dispatched:
        add_tvm_dispatch(norm, x)
    for factor in (1, 2, 3):
        norm(x * factor)
    assert not dispatched or stats(norm).hits == 3
    return list(norm.buffers())


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str)
def test_cumulative_average_of_half_types_is_of_statistics_in_float32(dtype):
    x = (torch.randn(16, 3, 5, 5) + 3).to(dtype)
    for ours, eager in zip(averaged(x, True), averaged(x, False), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_a_batch_without_elements_leaves_a_cumulative_average_as_it_is():
    x = torch.empty(0, 3, 5, 5)
    assert all(map(torch.equal, averaged(x, True), averaged(x, False)))


def test_cumulative_average_in_a_model_that_keeps_its_modules():
    model = check_module(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU()), lambda: leaf(5, 3), calls=3
    )
    assert "forward" not in model[1].__dict__
    assert model[1].num_batches_tracked.item() == 3


@pytest.mark.parametrize(
    ("rank", "options"),
    sampled(
        itertools.product((1, 2, 3), ({}, {"affine": True, "track_running_stats": True})),
        lambda case: case[0] == 2 or (case[0] == 1 and not case[1]),
    ),
    ids=str,
)
def test_instance_norm(rank, options):
    check_module(lambda: INSTANCE_NORMS[rank](4, **options), lambda: leaf(*SHAPES[rank]), calls=2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("tracked", "from_images"), [(True, True), (True, False), (False, True)])
def test_the_formula_of_instance_norm_on_a_gpu(tracked, from_images, affine):
    x, found = leaf(3, 4, 5, 6), []
    scale = [torch.rand(4, dtype=x.dtype), torch.rand(4, dtype=x.dtype)] if affine else [None, None]
    running = [torch.rand(4, dtype=x.dtype), torch.rand(4, dtype=x.dtype) + 1]
    for formula in (torch.instance_norm, instance_norm):
        moved = [each.clone() for each in running] if tracked else [None, None]
        y = formula(x, *scale, *moved, from_images, 0.3, 1e-4, True)
        if formula is instance_norm and tracked:  # a frozen module refuses its writes
            assert all((each._version > 0) is from_images for each in moved)
        found.append([y, *torch.autograd.grad(y.sin().sum(), x), *(each for each in moved if tracked)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("module", [nn.BatchNorm2d, nn.InstanceNorm2d], ids=lambda module: module.__name__)
def test_running_statistics_in_eval_mode(module):
    def make():
        layer = module(4, affine=True, track_running_stats=True)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        return layer.eval()

    check_module(make, lambda: leaf(3, 4, 5, 6))


OTHER_NORMS = {
    "group": lambda: nn.GroupNorm(2, 4),
    "group_plain": lambda: nn.GroupNorm(4, 4, affine=False),
    "layer": lambda: nn.LayerNorm(6),
    "layer_2d": lambda: nn.LayerNorm((5, 6), eps=1e-3),
    "layer_no_bias": lambda: nn.LayerNorm(6, bias=False),
    "layer_plain": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(6),
    "rms_plain": lambda: nn.RMSNorm((5, 6), eps=1e-3, elementwise_affine=False),
    "response": lambda: nn.LocalResponseNorm(3),
}


@pytest.mark.parametrize("name", sampled(OTHER_NORMS, ("group", "layer_2d", "layer_no_bias", "rms", "response")))
def test_other_norms(name):
    check_module(OTHER_NORMS[name], lambda: leaf(3, 4, 5, 6))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: parametrizations.weight_norm(nn.Linear(5, 3)),
            marks=pytest.mark.cpu("eager's weight_norm of float64 is as exact as float32 on a GPU"),
        ),
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2), dim=None),
        lambda: parametrizations.spectral_norm(nn.Linear(5, 3)),
        lambda: parametrizations.orthogonal(nn.Linear(5, 5), orthogonal_map="matrix_exp"),
        lambda: parametrizations.orthogonal(nn.Linear(5, 5), orthogonal_map="cayley"),
    ],
    ids="weight_norm weight_norm_all spectral_norm matrix_exp cayley".split(),
)
def test_parametrized_weights(make):
    sample = (2, 4, 6) if isinstance(make(), nn.Conv1d) else (2, 5)
    check_module(make, lambda: leaf(*sample))


class Average(nn.Module):
    """An exponential moving average that the module keeps itself, a counter, and a codebook."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
                chosen = torch.nn.functional.one_hot(nearest, 3).to(y.dtype)
                self.codes.lerp_(chosen.t() @ y, 0.1)
        quantized = self.codes[nearest]
        return y + (quantized - y).detach() - self.mean


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_the_module_updates(training):
    check_module(lambda: Average().train(training), lambda: leaf(6, 4), calls=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_norm_of_half_types_is_computed_in_float32(dtype):
    """A row of one element has one direction: its gradient is zero but for float32's rounding."""
    torch.manual_seed(0)
    eager = parametrizations.weight_norm(nn.Linear(1, 64)).to(dtype)
    ours, x = copy.deepcopy(eager), torch.ones(1, 1, dtype=dtype)
    add_tvm_dispatch(ours, x)
    for module in (eager, ours):
        module(x).sin().sum().backward()
    assert stats(ours).hits == 1 and torch.equal(ours(x), eager(x))
    (norms, directions), (own, _) = ([p.grad for p in m.parametrizations.weight.parameters()] for m in (ours, eager))
    assert torch.equal(norms, own) and directions.abs().max() < 1e-6


def root_mean_square(x, extents, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(wide.pow(2).mean(list(range(-len(extents), 0)), keepdim=True) + eps)
    return (wide * rstd * (1 if weight is None else weight)).to(x.dtype), rstd


@pytest.fixture
def fused_rms_norm():
    """``nn.RMSNorm`` is one operator here, as on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", root_mean_square, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("options", "dtype"),
    sampled(
        itertools.product(({}, {"eps": 0.1}, {"elementwise_affine": False}), (torch.float64, torch.bfloat16)),
        lambda case: case[1] == torch.float64 or not case[0],
    ),
    ids=str,
)
def test_rms_norm_in_one_operator(options, dtype, fused_rms_norm):
    module = nn.RMSNorm((4, 16), **options, dtype=dtype)
    if module.weight is not None:
        nn.init.uniform_(module.weight)
    x = torch.randn(3, 4, 16, dtype=dtype).mul(0.1).requires_grad_()
    add_tvm_dispatch(module, x)
    y = module(x)
    (entry,) = stats(module).entries
    assert "_fused_rms_norm" in str(entry.lowered.captured.graph)
    leaves = [x] if module.weight is None else [x, module.weight]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    eps = module.eps or torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    wanted, _ = root_mean_square(wide[0], (4, 16), wide[1] if len(wide) > 1 else None, eps)
    grad = torch.randn_like(y)
    rtol = 1e-10 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(y.double(), wanted, rtol=rtol, atol=rtol)
    found = torch.autograd.grad(y, leaves, grad)
    expected = torch.autograd.grad(wanted, wide, grad.double())
    torch.testing.assert_close([g.double() for g in found], list(expected), rtol=rtol, atol=10 * rtol)
