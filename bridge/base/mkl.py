"""MKL's packed matrix products: a weight is packed once for the processor's kernels, and each product reads it packed.

Through ctypes, from the MKL inside torch's library; unavailable where that has no MKL or hides its symbols.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

__all__ = ["can_pack", "multiply_packed", "packed"]

_ROW_MAJOR, _PLAIN, _TRANSPOSED, _PACKED, _SECOND = 101, 111, 112, 151, 162
"""CBLAS constants: row-major; operand as it is, transposed, packed; the second operand is packed."""

_ALIGNED = 64
"""Bytes."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The functions with their signatures; ``None`` where one of them is missing."""
    try:
        found = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"))))
        size, pack, compute = found.cblas_sgemm_pack_get_size, found.cblas_sgemm_pack, found.cblas_sgemm_compute
    except (OSError, AttributeError, StopIteration):
        return None
    number, pointer, scale = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    size.restype, size.argtypes = ctypes.c_size_t, [number] * 4
    pack.restype, pack.argtypes = None, [*[number] * 6, scale, pointer, number, pointer]
    compute.restype = None
    compute.argtypes = [*[number] * 6, pointer, number, pointer, number, scale, pointer, number]
    return found


def can_pack() -> bool:
    """Whether packed products are available."""
    return torch.backends.mkl.is_available() and _library() is not None


def packed(b: torch.Tensor, rows: int) -> torch.Tensor:
    """``b`` (k × n, float32, dense or a dense matrix's transpose) packed for products of ``rows`` rows: a vector."""
    library, (k, n) = _library(), b.shape
    is_turned = b.stride(0) == 1
    size = library.cblas_sgemm_pack_get_size(_SECOND, rows, n, k)
    raw = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    begin = -raw.data_ptr() % _ALIGNED
    made = raw[begin : begin + size // 4 * 4].view(torch.float32)
    step = b.stride(1) if is_turned else b.stride(0)
    how = _TRANSPOSED if is_turned else _PLAIN
    library.cblas_sgemm_pack(_ROW_MAJOR, _SECOND, how, rows, n, k, 1.0, b.data_ptr(), step, made.data_ptr())
    return made


def multiply_packed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b``: ``a`` (m × k, dense rows), ``b`` from :func:`packed` for m rows, ``out`` (m × n, dense)."""
    (m, k), n = a.shape, out.shape[1]
    step = a.stride(0) if m > 1 else k
    _library().cblas_sgemm_compute(
        *(_ROW_MAJOR, _PLAIN, _PACKED, m, n, k, a.data_ptr(), step, b.data_ptr(), k, 0.0, out.data_ptr(), n)
    )
