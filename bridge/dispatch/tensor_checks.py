"""Whether tensors look exactly as they did: type, element type, device, layout, requires_grad, shape, strides, flags.

Dynamo's own guard does that for a list of tensors in one call, 60 ns a tensor where attribute by attribute takes 400.
It is not a public interface, so it is put to the test once per process, with a tensor for each thing that may differ;
should it not be there, or not see one of them, the attributes are compared one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import nn

from bridge.base.torch_internals import neg_view, tensor_guards

__all__ = ["LAYOUT", "tensor_checks"]

#: What a tensor must look like, besides its type and strides.
LAYOUT = attrgetter("shape", "dtype", "requires_grad", "device", "layout")

Checks = Callable[[Sequence[torch.Tensor]], bool]


def tensor_checks(tensors: Sequence[torch.Tensor]) -> Checks:
    """A test that as many tensors look exactly like these. It may say no where only torch's modes differ.

    The tensors are not kept alive.
    """
    if tensors and _dynamo_is_exact():
        return _by_dynamo(tensors)
    return _by_attributes(tensors)


def _by_dynamo(tensors: Sequence[torch.Tensor]) -> Checks:
    check = tensor_guards()(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return lambda now: check(*now)


def _by_attributes(tensors: Sequence[torch.Tensor]) -> Checks:
    types = list(map(type, tensors))
    layouts = list(map(LAYOUT, tensors))
    strides = list(map(torch.Tensor.stride, tensors))

    def check(now: Sequence[torch.Tensor]) -> bool:
        return (
            list(map(type, now)) == types
            and list(map(LAYOUT, now)) == layouts
            and list(map(torch.Tensor.stride, now)) == strides
            and not any(map(torch.Tensor.is_neg, now))
            and not any(map(torch.Tensor.is_inference, now))
        )

    return check


@functools.cache
def _dynamo_is_exact() -> bool:
    """Whether Dynamo's guard is there, knows a tensor again, and sees every difference that matters."""
    sample = torch.zeros(2, 3)
    try:
        check = _by_dynamo([sample])
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    with torch.inference_mode():
        inference = torch.zeros(2, 3)
    swapped = torch.zeros(2, 3)
    swapped.data = torch.zeros(3, 2)
    different = [
        torch.zeros(3, 2),
        torch.zeros(2, 3, 1),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 1).expand(2, 3),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        neg_view(torch.zeros(2, 3)),
        nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        torch.zeros(2, 3).as_subclass(_Subclass),
        inference,
        swapped,
        3,
    ]
    return check([torch.ones(2, 3)]) and not any(check([each]) for each in different)


class _Subclass(torch.Tensor):
    pass
