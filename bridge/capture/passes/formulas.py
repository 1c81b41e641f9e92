"""Decompositions of this process: kind of call and torch's settings → the calls that it decomposes to.

Of two modules that are captured one after the other, the second has only those kinds of calls decomposed that the first
had not: decomposing is a good part of what a capture takes. Kept are calls of torch's own operators, with plain
constants, on tensors of known sizes, by layouts instead of fake tensors: these belong to one capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.torch_cuda import read_settings
from bridge.base.torch_internals import FakeTensor, FakeTensorMode, pytree
from bridge.state import constant_key

__all__ = [
    "Formula",
    "clear_formulas",
    "copied_formula",
    "decomposition_settings",
    "known_formula",
    "remember_formula",
]

_MOST = 4096
"""Formulas that are kept; a large model has a few hundred."""


@dataclass(frozen=True)
class Formula:
    """What a kind of call decomposes to: its inputs, the calls, and a result per tensor that the operator returns."""

    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class _Layout(NamedTuple):
    """A fake tensor, as far as a capture looks at it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype
    device: torch.device

    def made(self, mode: FakeTensorMode) -> torch.Tensor:
        """Such a fake tensor, in memory of its own that is as large."""
        with mode:
            plain = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            if (self.offset, self.elements) == (0, _elements(plain)):
                return plain
            memory = torch.empty(self.elements, dtype=self.dtype, device=self.device)
            return memory.as_strided(self.shape, self.stride, self.offset)


_KNOWN: LeastRecentlyUsed[tuple, Formula] = LeastRecentlyUsed(_MOST)
"""Of each call, ``meta["val"]`` is a layout, or several."""


def clear_formulas() -> None:
    """Forgets what this process has decomposed."""
    _KNOWN.clear()


def known_formula(node: fx.Node, key: tuple) -> Formula | None:
    """What a call of this kind was decomposed to before, with fake tensors like the node's; ``None`` if none was.

    Args:
        node: the call.
        key: its :func:`bridge.capture.passes.kinds.kind_key`, and :func:`decomposition_settings`.
    """
    found = _KNOWN.get(key) if _is_kept(node) else None
    if found is None:
        return None
    mode = _leaves(node.meta["val"])[0].fake_mode
    return copied_formula(found, lambda value: _mapped(value, _Layout, lambda layout: layout.made(mode)))


def remember_formula(node: fx.Node, key: tuple, formula: Formula) -> None:
    """Keeps what a call was decomposed to, if it can be kept."""
    if not _is_kept(node):
        return
    nodes = {*formula.inputs, *formula.calls}
    made = [value for call in formula.calls for value in _leaves(call.meta.get("val"))]
    if any(not _is_plain(value) or value.requires_grad for value in made):
        return
    if all(nodes.issuperset(call.all_input_nodes) for call in formula.calls):
        _KNOWN.put(key, copied_formula(formula, lambda value: _mapped(value, FakeTensor, _layout)))


def decomposition_settings() -> tuple[Any, ...]:
    """What a decomposition may ask of torch beside its arguments."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.mkldnn.enabled,
        repr(read_settings()),
    )


def _is_kept(node: fx.Node) -> bool:
    """Whether a kind's key says all: of an operator of torch's, plain constants, and tensors of known sizes."""
    if node.target.namespace != "aten":
        return False
    values = [*(source.meta.get("val") for source in node.all_input_nodes), *_leaves(node.meta.get("val"))]
    constants = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, fx.Node)]
    return all(map(_is_plain, values)) and all(constant_key(constant) is not None for constant in constants)


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _is_plain(value: Any) -> bool:
    """A strided tensor of known sizes, in memory that holds a whole number of its elements."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return False
    numbers = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return all(type(number) is int for number in numbers) and numbers[-1] % value.element_size() == 0


def _elements(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes() // value.element_size()


def _layout(value: FakeTensor) -> _Layout:
    shape, stride = tuple(value.shape), value.stride()
    return _Layout(shape, stride, value.storage_offset(), _elements(value), value.dtype, value.device)


def _mapped(value: Any, kind: type, function: Any) -> Any:
    """A value of this kind, or several of them in a list or a tuple."""
    return function(value) if isinstance(value, kind) else type(value)(map(function, value))


def copied_formula(formula: Formula, value_of: Callable[[Any], Any]) -> Formula:
    """The formula in a graph of its own, that holds nothing else; the values that its nodes stand for are mapped."""
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    for node in formula.inputs:
        own[node] = graph.placeholder(node.name)
    for node in formula.calls:
        args, kwargs = fx.map_arg((node.args, node.kwargs), own.__getitem__)
        own[node] = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        own[node].meta["val"] = value_of(node.meta["val"])
    return Formula(*(tuple(map(own.__getitem__, each)) for each in (formula.inputs, formula.calls, formula.results)))
