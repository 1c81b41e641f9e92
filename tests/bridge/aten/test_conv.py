"""Convolutions and pools of every rank, interpolation, padding, folding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Function, check_module
from tests.sampling import sampled

EXTENTS = {1: (9,), 2: (9, 8), 3: (6, 7, 5)}


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class Functions(nn.Module):
    """Several functions with one argument each, compiled at once."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, *args):
        return tuple(function(x) for function, x in zip(self.functions, args, strict=True))


def check(functions, *shapes):
    shapes = shapes * len(functions) if len(shapes) == 1 else shapes
    check_module(lambda: Functions(functions), lambda: tuple(leaf(*shape) for shape in shapes), calls=1)


@pytest.mark.parametrize("rank", sampled([1, 2, 3], [1, 2]))
def test_convolutions(rank):
    plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]

    def make():
        return nn.ModuleList(
            [
                plain(4, 6, 3),
                plain(4, 6, 2, stride=2, padding=1, groups=2, bias=False),
                plain(4, 4, 2, dilation=2, groups=4, padding="same"),
                plain(4, 6, 3, padding=1, padding_mode="circular"),
                transposed(4, 6, 3, stride=2, output_padding=1, padding=1),
                transposed(4, 4, 2, dilation=2, groups=2, bias=False),
            ]
        )

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make()

        def forward(self, x):
            return tuple(layer(x) for layer in self.layers)

    check_module(All, lambda: leaf(2, 4, *EXTENTS[rank]), calls=1)


def test_convolution_without_a_batch():
    check_module(lambda: nn.Conv2d(3, 4, 2), lambda: leaf(3, 5, 6), calls=1)


@pytest.mark.parametrize("rank", sampled([1, 2, 3], [1, 3]))
def test_pools(rank):
    maximum, average, adaptive_max, adaptive_avg, lp = (
        getattr(F, f"{name}_pool{rank}d") for name in ("max", "avg", "adaptive_max", "adaptive_avg", "lp")
    )
    functions = [
        lambda x: maximum(x, 2),
        lambda x: maximum(x, 3, stride=2, padding=1, ceil_mode=True),
        lambda x: maximum(x, 2, dilation=2, return_indices=True),
        lambda x: average(x, 2),
        lambda x: average(x, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        lambda x: adaptive_max(x, 3),
        lambda x: adaptive_avg(x, 3),
        lambda x: adaptive_avg(x, 1),
        lambda x: lp(x, 3.0, 2),
    ]
    check(functions, (2, 3, *EXTENTS[rank]))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_pooled_rows_of_a_transpose_lie_as_eagers(requires_grad):
    """Where autograd does not follow it, eager has another kernel; draws like the result follow its strides."""

    def pooled(x):
        y = F.max_pool1d(x, 2)
        return y, F.max_pool1d(x, 3, 2, 1), y + torch.randn_like(y)

    x = torch.randn(2, 6, 8).transpose(1, 2).requires_grad_(requires_grad)
    eager = Function(pooled)
    module = add_tvm_dispatch(Function(pooled), x)
    torch.manual_seed(0)
    made = module(x)
    torch.manual_seed(0)
    for one, other in zip(made, eager(x), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    assert stats(module).hits == 1


def test_unpooling_and_folding():
    def unpool(x):
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)

    functions = [
        unpool,
        lambda x: F.unfold(x, 2, dilation=2, padding=1),
        lambda x: F.fold(x.reshape(2, 12, 8)[:, :, :6], (3, 4), 2),
        lambda x: F.pixel_shuffle(x.reshape(2, 12, 2, 4), 2),
        lambda x: F.pixel_unshuffle(x, 2),
        lambda x: F.channel_shuffle(x.reshape(2, 6, 4, 4), 3),
    ]
    check(functions, (2, 3, 4, 8))


@pytest.mark.parametrize("antialias", [False, True])
def test_interpolation_of_images(antialias):
    modes = ["bilinear", "bicubic"] if antialias else ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]
    options = {"antialias": True} if antialias else {}
    functions = [lambda x, mode=mode: F.interpolate(x, (7, 3), mode=mode, **options) for mode in modes]
    functions += [lambda x, mode=mode: F.interpolate(x, scale_factor=1.6, mode=mode, **options) for mode in modes]
    if not antialias:
        functions.append(lambda x: F.interpolate(x, (7, 9), mode="bilinear", align_corners=True))
        functions.append(lambda x: F.interpolate(x, scale_factor=(2, 3), mode="bicubic", align_corners=True))
    check(functions, (2, 3, 4, 5))


def test_interpolation_of_sequences_and_volumes():
    functions = [
        lambda x: F.interpolate(x, 9, mode="linear"),
        lambda x: F.interpolate(x, 9, mode="linear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, (3, 5, 7), mode="trilinear"),
        lambda x: F.interpolate(x, (3, 5, 7), mode="nearest-exact"),
    ]
    check(functions, *[(2, 3, 5)] * 3, *[(2, 3, 2, 4, 3)] * 3)


def test_sampling_from_a_grid():
    class Sample(nn.Module):
        def forward(self, x, grid):
            nearest = F.grid_sample(x, grid, mode="nearest", padding_mode="border", align_corners=True)
            return F.grid_sample(x, grid, align_corners=False), nearest

    check_module(Sample, lambda: (leaf(2, 3, 4, 5), (leaf(2, 3, 3, 2) / 2).detach().requires_grad_()), calls=1)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding(mode):
    functions = [
        lambda x: F.pad(x, (1, 2), mode),
        lambda x: F.pad(x, (1, 2, 0, 1), mode),
        lambda x: F.pad(x, (1, 2, 0, 1, 2, 1), mode),
        lambda x: F.pad(x, (-1, 2, 1, -1), mode),
    ]
    check(functions, (2, 3, 5), (2, 3, 4, 5), (2, 3, 4, 5, 4), (2, 3, 4, 5))
