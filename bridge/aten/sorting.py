"""Order statistics (sort, top-k, max along an axis) → library functions that return values and indices."""

from __future__ import annotations

from autodiff.ir import shape
from bridge.aten.dims import numbers_only
from bridge.aten.places import lies_elsewhere
from bridge.aten.registry import UnsupportedUse, converts
from bridge.base.torch_internals import aten, schema


def _require_device(node):
    """The host's kernels and a GPU's may bring equal numbers in other orders."""
    if lies_elsewhere(node.args[0]):
        hint = "sort it on the GPU, or with stable=True"
        raise UnsupportedUse("an order of equal numbers, on the host beside a GPU's tensors", hint)


def _pair(importer, node, name, args):
    pair = importer.library(name, args, node.meta["val"])
    return importer.item(pair, 0), importer.item(pair, 1)


def _of_scalar(importer, node, x):
    """Along the only axis that a 0-d tensor does not have: itself, at position 0."""
    return x, importer.filled(node.meta["val"][1], 0)


@converts(aten.sort.default)
def sort(importer, node, x, dim=-1, descending=False):
    if not shape(x):
        return _of_scalar(importer, node, x)
    _require_device(node)
    return _pair(importer, node, "sort", [x, dim % len(shape(x)), bool(descending), False])


@converts(aten.sort.stable)
def sort_stable(importer, node, x, *, stable=False, dim=-1, descending=False):
    if not shape(x):
        return _of_scalar(importer, node, x)
    if not stable:
        _require_device(node)
    return _pair(importer, node, "sort", [x, dim % len(shape(x)), bool(descending), bool(stable)])


@converts(aten.topk.default)
def topk(importer, node, x, k, dim=-1, largest=True, sorted=True):
    if not shape(x):
        return _of_scalar(importer, node, x)
    numbers_only("top-k", k)
    _require_device(node)
    return _pair(importer, node, "topk", [x, dim % len(shape(x)), k, bool(largest), bool(sorted)])


@converts(aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default)
def along(importer, node, x, dim=-1, keepdim=False):
    if not shape(x):
        return _of_scalar(importer, node, x)
    _require_device(node)
    name = schema(node.target).name.removeprefix("aten::") + "_dim"
    dim %= len(shape(x))
    kept = [fake if keepdim else fake.unsqueeze(dim) for fake in node.meta["val"]]
    pair = importer.library(name, [x, dim], kept)
    return tuple(importer.reshape(importer.item(pair, i), fake.shape) for i, fake in enumerate(node.meta["val"]))


@converts(aten.kthvalue.default)
def kthvalue(importer, node, x, k, dim=-1, keepdim=False):
    if not shape(x):
        return _of_scalar(importer, node, x)
    dim %= len(shape(x))
    numbers_only("the k-th value", k)
    _require_device(node)
    kept = [fake if keepdim else fake.unsqueeze(dim) for fake in node.meta["val"]]
    pair = importer.library("kthvalue", [x, dim, k], kept)
    return tuple(importer.reshape(importer.item(pair, i), fake.shape) for i, fake in enumerate(node.meta["val"]))


@converts(aten.cummax.default, aten.cummin.default)
def cummax(importer, node, x, dim):
    if not shape(x):
        return _of_scalar(importer, node, x)
    return _pair(importer, node, schema(node.target).name.removeprefix("aten::"), [x, dim % len(shape(x))])
