"""Creation operators (full, arange, …) → Relax constants and fills."""

from __future__ import annotations

import numpy as np
from tvm import relax

from bridge.aten.dims import dims, has_extents, numbers_only
from bridge.aten.registry import converts
from bridge.base.devices import HOST
from bridge.base.torch_internals import aten


@converts(aten.full.default, aten.full_like.default)
def full(importer, node, size_or_tensor, value, **layout):
    return importer.filled(importer.out(node), value)


@converts(aten.scalar_tensor.default)
def scalar_tensor(importer, node, value, **layout):
    return importer.constant(value, importer.out_dtype(node))


@converts(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(importer, node, *args, **layout):
    return importer.filled(importer.out(node), 0)


@converts(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(importer, node, *args, **layout):
    return importer.filled(importer.out(node), 1)


@converts(
    aten.empty.memory_format,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def empty(importer, node, *args, **layout):
    # eager's memory is uninitialized: any value is right, this one is reproducible
    return importer.filled(importer.out(node), 0)


@converts(aten.arange.start_step, aten.arange.start, aten.arange.default)
def arange(importer, node, *bounds, **layout):
    start, _, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    element_type = importer.out_dtype(node)
    ints = "float" not in element_type
    (extent,) = dims(importer.out(node).shape)
    if not has_extents((start, step)):
        start, step = (int(b) if ints else float(b) for b in (start, step))
    elif not ints:
        numbers_only("arange of floating point numbers", start, step)
    if ints and step > 0:  # relax infers a wrong extent for a negative step
        return importer.emit(relax.op.arange(start, start + extent * step, step, element_type))
    index = importer.emit(relax.op.arange(0, extent, 1, "int64"))
    scaled = relax.op.multiply(importer.cast(index, element_type), importer.constant(step, element_type))
    return importer.emit(relax.op.add(importer.emit(scaled), importer.constant(start, element_type)))


_WINDOWS = ("bartlett", "blackman", "hamming", "hann", "kaiser")


@converts(
    *(getattr(aten, name).default for name in ("tril_indices", "triu_indices", "fft_fftfreq", "fft_rfftfreq")),
    *(getattr(aten, f"{name}_window").default for name in _WINDOWS),
    *(getattr(aten, f"{name}_window").periodic for name in _WINDOWS),
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
    aten.kaiser_window.beta,
)
def constant_table(importer, node, *args, **layout):
    # numbers alone decide it: what torch's kernel makes of them once is what it makes of them at every call
    numbers_only(str(node.target), *args)
    table = node.target(*args, **{**layout, "dtype": importer.out(node).dtype, "device": HOST})
    return relax.const(np.asarray(table.numpy()), importer.out_dtype(node))
