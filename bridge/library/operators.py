"""Any ATen operator by name, and its VJP by torch's autograd; torch's kernels that write into given tensors.

Kernels by name: ``kernel(outs, args, *attributes)``, outs and args tensors. Outs are dense; args may have any strides.
Matrix products have several variants, equal to rounding.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.base.session import SESSION
from bridge.base.tensor_properties import as_parts
from bridge.base.torch_internals import VF, aten, linear_pointwise, overload_named, storage_id
from bridge.capture import apply_opaque, backward_opaque, exchange
from bridge.library.convolution import move, pad_into
from bridge.library.registry import library_function, out_function, out_kernel


@library_function("ran")
def ran(x: torch.Tensor) -> torch.Tensor:
    """A true flag that depends on ``x``: it has been computed."""
    return VF.ones((), dtype=torch.bool, device=x.device)


_WAITING = frozenset(
    "_linalg_eigh _linalg_eigvals linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_matrix_rank linalg_pinv "
    "pinverse".split()
)


def waits_for_the_device(name: str, attributes: Sequence[Any]) -> str | None:
    """The operator of a call, if cuSOLVER synchronizes with the device meanwhile; ``None`` otherwise.

    Stream capture refuses that, and cuSOLVER then fails once more in the thread's next call.
    """
    if name not in ("operator", "operator_vjp"):
        return None
    return attributes[0] if attributes[0].split(".")[1] in _WAITING else None


@functools.lru_cache(maxsize=1024)
def _parsed(name: str, arguments: str) -> tuple[Callable[..., Any], list, list[int]]:
    """An ATen operator, its arguments and keywords, and the saved results, from names and JSON."""
    args, kwargs, *saved = json.loads(arguments)
    return overload_named(name), [args, kwargs], saved[0] if saved else []


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A parsed argument with its tensors."""
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$complex" in value:
        return VF.view_as_complex(tensors[value["$complex"]])
    if "$real" in value:
        part = tensors[value["$real"]]
        return part.to(part.dtype.to_complex())
    if "$number" in value:
        return complex(*value["$number"])
    if "$dtype" in value:
        return getattr(torch, value["$dtype"])
    return {key: _filled(item, tensors) for key, item in value.items()}


_ROW_MAJOR = (aten._embedding_bag.default,)
"""Operators that save other tensors for other strides of their operands (``_of_bags`` in ``bridge/aten/nn.py``)."""


def _operator(name: str, arguments: str, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Runs an ATen operator on arguments written as JSON (see :mod:`autodiff.library`)."""
    target, parsed, _ = _parsed(name, arguments)
    if target in _ROW_MAJOR:
        tensors = tuple(each.contiguous() for each in tensors)
    args, kwargs = _filled(parsed, tensors)
    made = target(*args, **kwargs)
    made = made if isinstance(made, tuple | list) else (made,)
    return tuple(as_parts(each) for each in made if each is not None)


@library_function("operator")
def operator(name, arguments, *tensors):
    """The results of an ATen operator on arguments written as JSON."""
    return _operator(name, arguments, tensors)


def _begins_at(tensor: torch.Tensor) -> tuple[object, ...]:
    return storage_id(tensor), tensor.storage_offset(), tensor.dtype


@library_function("operator_vjp")
def operator_vjp(name, arguments, wanted, outputs, *given):
    """VJP with respect to tensor ``wanted`` from gradients of ``outputs``, indices of the results.

    Zeros where the results do not depend on it. The formula reads saved results as they are given: their recomputation
    might differ, since its inputs may have changed meanwhile.
    """
    *_, saved = _parsed(name, arguments)
    grads = given[len(given) - len(outputs) :]
    count = len(given) - len(outputs) - len(saved)
    results = dict(zip(saved, given[count:], strict=False))
    tensors = [each.detach() if isinstance(each, torch.Tensor) else each for each in given[:count]]

    def as_given(tensor: torch.Tensor) -> torch.Tensor:
        """The given result in place of its recomputation, as the formula saved it: maybe a reshape of the result."""
        for place, each in results.items():
            like = made[place]
            if _begins_at(like) != _begins_at(tensor):
                continue
            if tensor.shape == like.shape and tensor.stride() == like.stride():
                return each
            if tensor.is_contiguous() and like.is_contiguous() and tensor.numel() == like.numel():
                return each.reshape(tensor.shape)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, as_given):
        target = tensors[wanted].requires_grad_()
        made = _operator(name, arguments, tuple(tensors))
        pairs = [(made[index], grad) for index, grad in zip(outputs, grads, strict=True) if made[index].requires_grad]
        if not pairs:
            return VF.zeros_like(target)
        (partial,) = torch.autograd.grad(
            [value for value, _ in pairs], [target], [grad for _, grad in pairs], allow_unused=True
        )
    return VF.zeros_like(target) if partial is None else partial


library_function("collective")(exchange)
library_function("apply_opaque")(apply_opaque)
library_function("backward_opaque")(backward_opaque)


@library_function("tangent")
def tangent(like, number, index):
    return VF.zeros_like(like)


@library_function("custom_gradient")
def custom_gradient(count, *tensors):
    return tuple(VF.zeros_like(each) for each in tensors[2 * count :])


Tensors = Sequence[torch.Tensor]

_FEW_COPIES = 4
"""The number of copies up to which separate launches are faster than one element-by-element kernel."""


@out_kernel("cat")
def _cat(outs: Tensors, args: Tensors, axis: int) -> None:
    """Concatenates the args along an axis.

    On a GPU, torch's kernel moves parts of tensors element by element; a few parts are copied in wider units instead.
    """
    if not args[0].is_cuda or len(args) > _FEW_COPIES or all(each.is_contiguous() for each in args):
        VF.cat(list(args), axis, out=outs[0])
        return
    begin = 0
    for each in args:
        move(each, outs[0].narrow(axis, begin, each.shape[axis]))
        begin += each.shape[axis]


@out_kernel("copy")
def _copy(outs: Tensors, args: Tensors) -> None:
    outs[0].copy_(args[0])


@out_kernel("flip")
def _flip(outs: Tensors, args: Tensors, axis: int) -> None:
    aten.flip.out(args[0], [axis], out=outs[0])


@out_kernel("cumsum")
def _cumsum(outs: Tensors, args: Tensors, axis: int, exclusive: bool) -> None:
    """Cumulative sums along an axis, in the out's type; ``exclusive``: without the element itself."""
    (out,), (x,) = outs, args
    if not exclusive:
        VF.cumsum(x, axis, dtype=out.dtype, out=out)
    elif count := x.shape[axis]:
        out.narrow(axis, 0, 1).fill_(0)
        out.narrow(axis, 1, count - 1).copy_(VF.cumsum(x.narrow(axis, 0, count - 1), axis, dtype=out.dtype))


@out_kernel("gather")
def _gather(outs: Tensors, args: Tensors, axis: int) -> None:
    """``args = (x, index)``, int64: ``out[i][j] = x[index[i][j]][j]`` for axis 0, and so on."""
    VF.gather(args[0], axis, args[1], out=outs[0])


@out_kernel("scatter")
def _scatter(outs: Tensors, args: Tensors, axis: int) -> None:
    """``args = (x, index, source)``: ``x`` with elements replaced by elements of ``source``."""
    VF.scatter(args[0], axis, args[1], args[2], out=outs[0])


@out_kernel("scatter_add")
def _scatter_add(outs: Tensors, args: Tensors, axis: int) -> None:
    """``args = (x, index, source)``: ``x`` with elements of ``source`` added."""
    VF.scatter_add(args[0], axis, args[1], args[2], out=outs[0])


out_function("mm", VF.mm)
out_function("bmm", VF.bmm)
out_function("mm_biased", VF.addmm)  # a matrix product plus a row vector, added before rounding

_ZEROS: dict[tuple[torch.device, int], torch.Tensor] = SESSION.cache("programs", {})
"""Zero vectors by (device, length, a power of two). Never freed: recorded graphs read them at their addresses."""


@out_kernel("pad")
def _pad(outs: Tensors, args: Tensors, begins: Sequence[int] = (0, 0), number: float = 0) -> None:
    """Pads a tensor to the out's shape, with ``number``; ``begins`` defaults to the beginning of a matrix."""
    pad_into(outs[0], args[0], begins, number)


@out_kernel("mm_lt")
def _mm_lt(outs: Tensors, args: Tensors) -> None:
    """A float32 matrix product by cuBLASLt, which torch calls for a product with a bias: here a zero bias.

    Under a foreign stream capture before the first run it is torch's plain product: zeros made there would not last.
    """
    count, device = args[1].shape[1], args[0].device
    key = device, 1 << (count - 1).bit_length()
    if key not in _ZEROS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            VF.mm(args[0], args[1], out=outs[0])
            return
        _ZEROS[key] = VF.zeros(key[1], device=device)
    VF.addmm(_ZEROS[key][:count], args[0], args[1], out=outs[0])


@out_kernel("mm_swapped")
def _mm_swapped(outs: Tensors, args: Tensors) -> None:
    """A matrix product computed as the transposed product of the transposes, which BLAS tiles differently."""
    outs[0].copy_(VF.mm(args[1].t(), args[0].t()).t())


@out_kernel("linear")
def _linear(outs: Tensors, args: Tensors) -> None:
    """A matrix product by oneDNN's linear layer, whose weight is the transpose of the second operand."""
    outs[0].copy_(linear_pointwise(args[0], args[1].t(), None, "none", [], ""))
