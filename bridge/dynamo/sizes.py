"""Sizes of Dynamo's graphs: a graph → which dimensions of its inputs vary, and which of its numbers are such sizes.

Dynamo makes a size symbolic when it sees a second value (``dynamic=None``) or at once (``dynamic=True``). The graph
then takes the size as an input of its own, a number, beside the tensors that have it. Here it is read off a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bridge.capture import DynamicDim

__all__ = ["GraphSizes", "sizes_of"]

_LEAST = 2


@dataclass(frozen=True)
class GraphSizes:
    """Positions among a graph's inputs.

    Attributes:
        dims: tensors and their dimensions that vary, each with the name that Dynamo gave its size.
        numbers: numbers that are sizes, each with a tensor and the dimension that tells it.
    """

    dims: tuple[tuple[int, int, str], ...]
    numbers: dict[int, tuple[int, int]]

    @property
    def tensors(self) -> frozenset[int]:
        """The tensors that have such a dimension."""
        return frozenset(position for position, *_ in self.dims)

    def dynamic_dims(self, inputs: Sequence[Any], arguments: Sequence[int]) -> tuple[DynamicDim, ...]:
        """The dimensions, of inputs that are the arguments of a call; one of size 0 or 1 is special, and does not vary.

        Args:
            arguments: their positions among the inputs.
        """
        leaves = {position: leaf for leaf, position in enumerate(arguments)}
        return tuple(
            DynamicDim(leaves[position], dimension, f"input {position}", name, name, _LEAST, None, required=False)
            for position, dimension, name in self.dims
            if inputs[position].shape[dimension] >= _LEAST
        )


def sizes_of(graph: fx.Graph) -> GraphSizes:
    """Finds the sizes among the inputs of a graph of Dynamo's."""
    values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    dims = tuple(
        (position, dimension, _name(size, position, dimension))
        for position, value in enumerate(values)
        if isinstance(value, torch.Tensor)
        for dimension, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt)
    )
    tells: dict[str, tuple[int, int]] = {}
    for position, dimension, _ in dims:
        tells.setdefault(str(values[position].shape[dimension]), (position, dimension))
    numbers = {
        position: tells[str(value)]
        for position, value in enumerate(values)
        if isinstance(value, torch.SymInt) and str(value) in tells
    }
    return GraphSizes(dims, numbers)


def _name(size: torch.SymInt, position: int, dimension: int) -> str:
    return str(size) if str(size).isidentifier() else f"input_{position}_{dimension}"
