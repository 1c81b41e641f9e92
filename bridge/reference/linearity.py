"""Linearity: nodes of a traced graph and some of their inputs → whether what they compute is linear in these.

A backward is called once for each gradient that arrives in a graph, and what it gives is summed. Where part of a graph
is computed by other nodes than eager's, gradients arrive apart that eager adds up first: the same for what is linear.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from bridge.base.torch_internals import aten
from bridge.capture import STOP_GRADIENT

__all__ = ["is_linear"]


def _overloads(*names: str) -> frozenset:
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_OF_THE_FIRST = _overloads(
    *"neg view reshape _unsafe_view permute transpose t expand squeeze unsqueeze sum mean clone alias slice".split(),
    *"select index index_select gather flip roll cumsum constant_pad_nd tril triu unfold diagonal repeat".split(),
    *"conj real imag view_as_real view_as_complex _conj trace contiguous".split(),
) | {STOP_GRADIENT, operator.getitem}
"""Linear in the first argument, whatever the others are, which may not depend on it."""
_PRODUCTS = _overloads("mul", "mm", "bmm", "matmul", "mv", "dot", "convolution")
"""Linear in each of two operands."""
_SUMS = _overloads("add", "sub", "rsub")
"""Linear in two operands that both are linear."""
_QUOTIENTS = _overloads("div")
_CASTS = _overloads("_to_copy")
_CHOICES = frozenset({aten.where.self})
_IGNORED = _overloads("_assert_tensor_metadata")


def is_linear(steps: Sequence[fx.Node], inputs: Iterable[fx.Node], results: Iterable[fx.Node] = ()) -> bool:
    """Whether each node of ``steps``, in order, is linear in ``inputs`` or does not depend on them; ``results`` do."""
    depending = set(inputs)
    for node in steps:
        read = [source for source in node.all_input_nodes if source in depending]
        if not read or node.target in _IGNORED:
            continue
        if not _is_linear(node, depending):
            return False
        depending.add(node)
    return all(result in depending for result in results)


def _is_linear(node: fx.Node, depending: set[fx.Node]) -> bool:
    first, *rest = [_depends(arg, depending) for arg in node.args]
    if any(_depends(arg, depending) for arg in node.kwargs.values()):
        return False
    if node.target in _OF_THE_FIRST:
        return first and not any(rest)
    if node.target in _PRODUCTS:
        return [first, *rest].count(True) == 1
    if node.target in _SUMS:
        return first and rest[0]
    if node.target in _QUOTIENTS:  # not one that is rounded
        return first and not any(rest) and node.kwargs.get("rounding_mode") is None
    if node.target in _CASTS:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if node.target in _CHOICES:
        return not first and all(flag or _is_zero(arg) for flag, arg in zip(rest, node.args[1:], strict=True))
    return False


def _depends(arg: object, depending: set[fx.Node]) -> bool:
    found = []
    fx.node.map_arg(arg, found.append)
    return any(each in depending for each in found)


def _is_zero(arg: object) -> bool:
    if not isinstance(arg, fx.Node):
        return isinstance(arg, int | float) and arg == 0
    if arg.target in _ZEROS:
        return True
    numbers = [each for each in arg.args if isinstance(each, int | float)]
    return arg.target in _FILLED and numbers == [0]


_ZEROS = _overloads("zeros", "zeros_like", "new_zeros")
_FILLED = _overloads("full", "full_like", "scalar_tensor", "new_full")
