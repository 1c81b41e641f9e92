"""Sizes of a call: argument tensors → the values of the symbols, or a failure if the entry does not serve them.

Each symbol is read from one dimension: the first whose extent is the symbol, or else a multiple of it plus a constant.
All other dimensions of all arguments are compared with their extents' values for these sizes. The lowering's guards on
sizes are checked by ``scope.broken()``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from autodiff.extents import Dim, Extent, ExtentScope, SizeGuard, Symbol
from autodiff.lazy import cached_property
from bridge.base.errors import ARGUMENTS, GuardFailure, Unsupported, UnsupportedModule
from bridge.base.tensor_properties import same_strides
from bridge.capture import Captured

__all__ = ["ArgumentSizes", "Sizes", "argument_sizes"]

Sizes = dict[str, int]
"""Values of a scope's symbols, by name."""


@dataclass(frozen=True)
class _Place:
    """The dimension that defines a symbol: ``tensor.shape[dimension] == factor * symbol + offset``."""

    tensor: int
    dimension: int
    factor: int = 1
    offset: int = 0


class ArgumentSizes:
    """The symbolic extents of the argument tensors of an entry.

    Args:
        scope: the scope of the extents.
        shapes, strides: of each argument tensor.
        names: of the tensors, for messages.
        lines: guard of the scope → the source line that caused it.
        proven: a tensor, one of its dimensions, and a growing collection of its allowed sizes; ``None``: any size.
        known: number of tensors that exist before data-dependent sizes are computed
            (:mod:`bridge.capture.counted_dims`); ``None``: all. Guards on the remaining sizes are not checked.

    Raises:
        ValueError: no dimension of an argument defines a symbol.

    Example:
        >>> scope = ExtentScope()
        >>> rows = scope.symbol("rows", 5, high=9)
        >>> sizes = ArgumentSizes(scope, [(rows, 3)], [(3, 1)], ["x"])
        >>> sizes.of([torch.ones(7, 3)]), sizes.failure([torch.ones(10, 3)]).reason
        ({'rows': 7}, 'shape of x: dimension 0 (rows) is 10, compiled for 2 <= rows <= 9')
    """

    def __init__(
        self,
        scope: ExtentScope,
        shapes: Sequence[Sequence[Dim]],
        strides: Sequence[Sequence[Dim]],
        names: Sequence[str],
        lines: Mapping[SizeGuard, str] = MappingProxyType({}),
        proven: tuple[int, int, Collection[int]] | None = None,
        known: int | None = None,
    ):
        self.scope, self._lines, self._proven = scope, lines, proven
        places = {symbol.name: _place_of(symbol.name, shapes) for symbol in scope.samples}
        count = len(shapes) if known is None else known
        self._shapes = [tuple(shape) for shape in shapes[:count]]
        self._names = names[:count]
        self._places = {name: place for name, place in places.items() if place.tensor < count}
        self._read = [(place.tensor, place.dimension) for place in self._places.values()]
        flat = [each for dims in zip(self._shapes, strides, strict=False) for part in dims for each in part]
        self._told = [not isinstance(each, Extent) or self._tells(each.symbols) for each in flat]
        self._values = scope.compiled([each if told else -1 for each, told in zip(flat, self._told, strict=True)])
        self._samples = {symbol.name: size for symbol, size in scope.samples.items()}

    @property
    def count(self) -> int:
        """Number of argument tensors."""
        return len(self._shapes)

    def _tells(self, symbols: Collection[Symbol]) -> bool:
        """Whether the known tensors define all these symbols."""
        return all(symbol.name in self._places for symbol in symbols)

    @cached_property
    def guards(self) -> tuple[SizeGuard, ...]:
        """The lowering's guards on sizes; read first when the compilation has finished, and constant from then on."""
        return self.scope.guards

    @cached_property
    def _broken(self) -> Callable[[Sizes], SizeGuard | None]:
        return self.scope.broken([each for each in self.guards if self._tells(each.symbols)])

    def key(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The extents of the defining dimensions; equal for two calls if and only if their sizes are."""
        return tuple([tensors[tensor].shape[dimension] for tensor, dimension in self._read])

    def of(self, tensors: Sequence[torch.Tensor]) -> Sizes:
        """The sizes of a call whose argument tensors match."""
        found = zip(self._places.items(), self.key(tensors), strict=True)
        return self._samples | {name: (extent - place.offset) // place.factor for (name, place), extent in found}

    def failure(self, tensors: Sequence[torch.Tensor]) -> GuardFailure | None:
        """The first mismatch of dense tensors' shapes, or ``None``."""
        return self.broken(tensors) or self._unproven(tensors)

    def broken(self, tensors: Sequence[torch.Tensor]) -> GuardFailure | None:
        """:meth:`failure`, except that sizes need not be proven."""
        for shape, name, tensor in zip(self._shapes, self._names, tensors, strict=True):
            if tensor.dim() != len(shape):
                return _another_shape(name, shape, tensor)
        for place in self._places.values():
            if (tensors[place.tensor].shape[place.dimension] - place.offset) % place.factor:
                return _another_shape(self._names[place.tensor], self._shapes[place.tensor], tensors[place.tensor])
        sizes = self.of(tensors)
        for (shape, _), expected, name, tensor in zip(
            self.layouts(tensors), self._shapes, self._names, tensors, strict=True
        ):
            if tuple(tensor.shape) != shape:
                return _another_shape(name, expected, tensor)
        broken = self._broken(sizes)
        return None if broken is None else self._outside(broken, sizes)

    def _unproven(self, tensors: Sequence[torch.Tensor]) -> GuardFailure | None:
        if self._proven is None:
            return None
        tensor, dimension, sizes = self._proven
        size, name = tensors[tensor].shape[dimension], self._names[tensor]
        if size in sizes:
            return None
        what = f"dimension {dimension} is {size}, for which nothing has told yet that the same steps are made"
        return GuardFailure(ARGUMENTS, f"shape of {name}", what)

    def strided(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors with matching shapes have the compiled strides for these sizes."""
        return all(
            same_strides(tensor.stride(), stride, tensor.shape)
            for tensor, (_, stride) in zip(tensors, self.layouts(tensors), strict=True)
        )

    def layouts(self, tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The expected shape and strides of each argument tensor for their sizes."""
        values = self._values(self.of(tensors))
        if not all(self._told):
            given = [each for tensor in tensors for each in (*tensor.shape, *tensor.stride())]
            values = [value if told else now for value, told, now in zip(values, self._told, given, strict=True)]
        values = iter(values)
        return [(_next(values, len(shape)), _next(values, len(shape))) for shape in self._shapes]

    def __str__(self) -> str:
        """A line for each symbol, and one for each guard on sizes."""
        found = []
        for symbol, sample in self.scope.samples.items():
            place = self._places[symbol.name]
            where = f"dimension {place.dimension} of {self._names[place.tensor]}"
            is_symbol = (place.factor, place.offset) == (1, 0)
            told = where if is_symbol else f"{where} is {self._shapes[place.tensor][place.dimension]}"
            found.append(f"{symbol}: {told}, {self._range(symbol.name)}, {sample} in the sample")
        return "\n".join([*found, *(f"{guard}{self._asked(guard)}" for guard in self.guards)])

    def _asked(self, guard: SizeGuard) -> str:
        """The source line that caused a guard, if known."""
        line = self._lines.get(guard)
        return f" (asked by {line})" if line else ""

    def _range(self, name: str) -> str:
        bounds = next(bounds for symbol, bounds in self.scope.ranges.items() if symbol.name == name)
        low = f"{bounds.low} <= " if bounds.low is not None else ""
        high = f" <= {bounds.high}" if bounds.high is not None else ""
        return f"{low}{name}{high}"

    def _outside(self, broken: SizeGuard, sizes: Sizes) -> GuardFailure:
        """The failure of sizes that break a guard."""
        involved = sorted(symbol.name for symbol in broken.symbols)
        place = self._places[involved[0]]
        field = f"shape of {self._names[place.tensor]}"
        if broken in self.guards or len(involved) > 1:
            given = ", ".join(f"{name} = {sizes[name]}" for name in involved)
            return GuardFailure(ARGUMENTS, field, f"compiled for {broken}, called with {given}{self._asked(broken)}")
        (name,) = involved
        extent = place.factor * sizes[name] + place.offset
        what = f"dimension {place.dimension} ({self._shapes[place.tensor][place.dimension]}) is {extent}"
        return GuardFailure(ARGUMENTS, field, f"{what}, compiled for {self._range(name)}")


def argument_sizes(captured: Captured, names: Sequence[str], *, counted: bool = True) -> ArgumentSizes | None:
    """The symbolic extents of a captured call's argument tensors; ``None``: static shapes.

    Args:
        names: of the tensors, for messages.
        counted: whether the tensors of data-dependent sizes exist already.

    Raises:
        UnsupportedModule: no argument defines a size.
    """
    if captured.sizes.scope is None:
        return None
    try:
        shapes, strides = captured.sizes.shapes, captured.sizes.strides
        known, proven = captured.loop.any_length, None
        if known is not None:
            proven = sum(captured.given.is_tensor[: known.leaf]), known.dimension, known.proven
        names = [*names, *(f"count_{place}" for place in range(captured.sizes.counted))]
        known = None if counted else len(shapes) - captured.sizes.counted
        return ArgumentSizes(captured.sizes.scope, shapes, strides, names, captured.sizes.lines, proven, known)
    except ValueError as error:
        problem = Unsupported("dynamic_shapes", f"{captured.module_name}.forward", str(error))
        raise UnsupportedModule(captured.module_name, [problem], cause=error) from None


def _place_of(name: str, shapes: Sequence[Sequence[Dim]]) -> _Place:
    """The first dimension that is the symbol; else the first that is a multiple of it plus a constant."""
    found = None
    for tensor, shape in enumerate(shapes):
        for dimension, extent in enumerate(shape):
            linear = extent.linear if isinstance(extent, Extent) else None
            if linear is not None and linear[0].name == name:
                place = _Place(tensor, dimension, *linear[1:])
                if (place.factor, place.offset) == (1, 0):
                    return place
                found = found or place
    if found is None:
        raise ValueError(f"wanted an argument with a dimension that tells {name}, got shapes {list(shapes)}")
    return found


def _next(values: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple([next(values) for _ in range(count)])


def _another_shape(name: str, shape: Sequence[Dim], tensor: torch.Tensor) -> GuardFailure:
    wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    return GuardFailure(ARGUMENTS, f"shape of {name}", f"compiled for {wanted}, called with {tuple(tensor.shape)}")
