"""Tile kernels: products of float32 matrices on a GPU by the kernels of :mod:`bridge.compile.cuda.tile_source`.

A way is ``"mm_tile"`` and the numbers of its tile, then the parts of the inner axis. Whatever the matrices' memory is,
a way's sums are added in one order; where the kernel cannot read them as they lie, it is given copies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

import torch

from bridge.base.torch_cuda import current_device, current_stream
from bridge.compile.cuda.driver import DriverError, at_any_moment, call, library, name_of
from bridge.compile.cuda.nvrtc import compiled
from bridge.compile.cuda.tile_source import CUDA, Tile, kernel_of
from bridge.library import ALIGNMENT, out_kernel

__all__ = ["TILED", "Kernel", "architecture", "load", "multiply", "way_of"]

TILED = "mm_tile"
"""First word of the ways; the others are numbers."""

_MOST_SHARED = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``."""

_CLUSTER = 4
"""``CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION``."""

_NO_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: of a thread that has not called CUDA yet."""

_VECTOR = ALIGNMENT // 4
_MOST_EXTENT = 2**19
"""Of a matrix: so many rows or columns are no more tiles than one launch has."""


def architecture(index: int) -> str:
    """A GPU's architecture by the name that NVRTC knows it by, as in ``"sm_90"``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def way_of(tile: Tile, parts: int) -> str:
    """The way of a tile, of so many parts of the inner axis; how operands lie is no part of it."""
    return " ".join(map(str, (TILED, *tile.numbers, parts)))


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


class _Arguments(ctypes.Structure):
    """Of a kernel."""

    _fields_ = (
        *((name, c_uint64) for name in ("a", "b", "c")),
        *((name, c_int) for name in ("m", "n", "k", "step_a", "step_b")),
    )


_PLACES = tuple(getattr(_Arguments, name).offset for name, _ in _Arguments._fields_)
_Addresses = c_void_p * len(_PLACES)


@dataclass(frozen=True)
class Kernel:
    """A way's kernel on a device: the driver's function, what it computes, the parts of the inner axis."""

    function: c_void_p
    tile: Tile
    parts: int


@functools.lru_cache(None)  # none goes: recorded graphs launch them
def load(index: int, numbers: tuple[int, ...], a_inner: bool, b_inner: bool) -> Kernel:
    """The kernel of a way's numbers on a device, compiled and loaded once, for matrices that lie so.

    Raises:
        RuntimeError: there is no NVRTC, or it or the driver refuses the kernel.
    """
    *of_tile, parts = numbers
    tile = Tile(*of_tile, a_inner, b_inner)
    return Kernel(_function(index, tile), tile, parts)


@functools.lru_cache(None)
def _function(index: int, tile: Tile) -> c_void_p:
    code = compiled(CUDA + kernel_of(tile), architecture(index))
    module, function = c_void_p(), c_void_p()
    with torch.cuda.device(index), at_any_moment():
        _enter(index)
        call("cuModuleLoadData", byref(module), code)
        call("cuModuleGetFunction", byref(function), module, tile.name.encode())
        call("cuFuncSetAttribute", function, _MOST_SHARED, tile.shared_bytes)
    return function


def _enter(index: int) -> None:
    """This thread's calls of the driver are about a device, as torch's are."""
    call("cuCtxSetCurrent", _context(index))


@functools.cache
def _context(index: int) -> c_void_p:
    """A device's context, which torch uses."""
    device, context = c_int(), c_void_p()
    call("cuDeviceGet", byref(device), index)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, numbers: Sequence[int]) -> None:
    """``out = a @ b`` of float32 matrices, ``out`` dense, on this thread's current stream of their device.

    By torch where no copy of theirs has rows that begin at multiples of 16 bytes.
    """
    first, second = _readable(a), _readable(b)
    if first is None or second is None or out.data_ptr() % ALIGNMENT or max(*a.shape, *b.shape) > _MOST_EXTENT:
        torch.mm(a, b, out=out)
    elif current_device() == a.device.index:
        _launch(first, second, out, numbers)
    else:
        with torch.cuda.device(a.device):
            _launch(first, second, out, numbers)


def _readable(x: torch.Tensor) -> torch.Tensor | None:
    """The matrix, or a copy of it, as the kernels read it; ``None`` where there is none."""
    if _dense_axis(x) is not None:
        return x
    dense = x.clone(memory_format=torch.contiguous_format)
    return dense if _dense_axis(dense) is not None else None


def _dense_axis(x: torch.Tensor) -> int | None:
    """The axis along which a matrix is dense and, across it, at multiples of 16 bytes."""
    if x.data_ptr() % ALIGNMENT == 0:
        for axis in (1, 0):
            if x.stride(axis) == 1 and (x.shape[1 - axis] == 1 or x.stride(1 - axis) % _VECTOR == 0):
                return axis
    return None


def _launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, numbers: Sequence[int]) -> None:
    (m, k), n, index = a.shape, b.shape[1], a.device.index
    a_axis, b_axis = _dense_axis(a), _dense_axis(b)
    kernel = load(index, tuple(numbers), a_axis == 1, b_axis == 0)
    tile, parts = kernel.tile, kernel.parts
    steps = a.stride(1 - a_axis), b.stride(1 - b_axis)
    arguments = _Arguments(a.data_ptr(), b.data_ptr(), out.data_ptr(), m, n, k, *steps)
    begin = ctypes.addressof(arguments)
    addresses = _Addresses(*[begin + place for place in _PLACES])
    cluster = _Attribute(_CLUSTER, 0, (parts, 1, 1))
    grid = parts, -(-m // tile.rows), -(-n // tile.columns)
    config = _Config(grid, (tile.threads, 1, 1), tile.shared_bytes, current_stream(index))
    if parts > 1:
        config.attributes, config.count = ctypes.pointer(cluster), 1
    launch = library().cuLaunchKernelEx
    status = launch(byref(config), kernel.function, addresses, None)
    if status == _NO_CONTEXT:
        _enter(index)
        status = launch(byref(config), kernel.function, addresses, None)
    if status:
        raise DriverError(f"cuLaunchKernelEx: {name_of(status)}")


@out_kernel(TILED)
def _mm_tile(outs: Sequence[torch.Tensor], args: Sequence[torch.Tensor], *numbers: int) -> None:
    """A product of float32 matrices by the kernel of a tile, on a GPU; elsewhere by torch."""
    if args[0].is_cuda:
        multiply(args[0], args[1], outs[0], numbers)
    else:
        torch.mm(args[0], args[1], out=outs[0])
