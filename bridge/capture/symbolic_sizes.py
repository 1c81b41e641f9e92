"""Symbolic sizes of a capture: torch's symbols, ranges and guards → the extents of one scope.

What the run on symbolic sizes and decompositions conclude about sizes (two are equal, one is divisible, one is below
a bound that forward compares it with) is written down in one environment of torch's. Two dimensions that are equal
share a symbol there, and one that has to be the sample's is a number. :meth:`SymbolicSizes.take_over` asks the scope
of extents the same questions, so that what torch has concluded holds wherever the scope's guards do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch

from autodiff.extents import Dim, Extent, ExtentScope, Guard, sample_of
from bridge.base.errors import Unsupported, is_user_file, line_of
from bridge.base.torch_shapes import conclusions, environment, expression, is_decided, range_of
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.observation import Draw, Observation, Operand, Output, Parameter
from bridge.capture.sympy_extents import NotTranslatedError, equal_symbols, extent_of, holds
from bridge.capture.tensor_form import TensorForm

__all__ = ["SymbolicSizes", "at_sample", "each_mapped"]

_LEAST = 2
_SPECIAL = 'dispatch it without dynamic_shapes for that dimension: on_miss="compile" makes an entry for each size'


class SymbolicSizes:
    """The sizes of the call's arguments that vary.

    Attributes:
        arguments: the traced graph's argument tensors that have such sizes, by leaf.
        scope: an extent for each symbol that torch has left.
        lines: where forward or torch asked for what became a guard of the scope.
    """

    def __init__(self, dims: Sequence[DynamicDim], values: Sequence[Any]):
        """``values``: what stands for each leaf of the arguments in the traced graph."""
        self.arguments = {each.leaf: values[each.leaf] for each in dims}
        self.scope = ExtentScope()
        self.lines: dict[Guard, str] = {}
        self._asked: Mapping[int, str] = {}
        self._dims = dims
        self._sizes = [self.arguments[each.leaf].shape[each.dimension] for each in dims]
        self._symbols: dict[Any, Dim] = {}
        symbolic = [size for size in self._sizes if isinstance(size, torch.SymInt)]
        self._environment = environment(symbolic[0]) if symbolic else None

    @property
    def environment(self) -> Any:
        """torch's ``ShapeEnv``; ``None`` where no size is left symbolic."""
        return self._environment

    def take_over(self, forward: str, asked: Mapping[int, str] = MappingProxyType({})) -> list[Unsupported]:
        """Makes the extents, and asks them what torch concluded; what cannot be asked, and what should vary and must
        not. To be called when torch asks no more.

        Args:
            forward: what to name where no line is known, as in ``"Block.forward"``.
            asked: of conclusions by their place, the user's line, where it is known.
        """
        self._asked = asked
        problems = self._fixed(forward)
        if self._environment is None:
            return problems
        self._make_symbols()
        for place, (condition, frame) in enumerate(conclusions(self._environment)):
            known = len(self.scope.guards)
            where = asked.get(place) or _line(frame) or forward
            try:
                condition = self._environment.replace(condition)
                if not holds(condition, self._symbols):
                    raise NotTranslatedError(condition)
            except NotTranslatedError as error:
                problems.append(
                    Unsupported("a condition on sizes", where, f"has no form as a guard: {error}", _SPECIAL)
                )
            self.lines.update(dict.fromkeys(self.scope.guards[known:], where))
        self._narrow()
        return problems

    def dim(self, size: int | torch.SymInt) -> Dim:
        """A size of torch's as a number or an extent. :class:`NotTranslatedError` for one that a tensor gives."""
        return extent_of(expression(size), self._symbols) if isinstance(size, torch.SymInt) else int(size)

    def form(self, value: Any) -> Any:
        """A value of the traced graph, fake tensors as :class:`TensorForm`; what extents do not have stays."""
        if isinstance(value, tuple | list):
            return type(value)(self.form(each) for each in value)
        if isinstance(value, torch.Tensor):
            shape = tuple(map(self.dim, value.shape))
            stride = tuple(map(self.dim, value.stride())) if value.layout is torch.strided else None
            return TensorForm(shape, value.dtype, stride, value.requires_grad, value.device)
        if isinstance(value, torch.SymInt):
            return self.dim(value) if is_decided(self._environment, expression(value)) else value
        if isinstance(value, torch.SymBool) and is_decided(self._environment, expression(value)):
            return holds(expression(value), self._symbols)
        return value

    def observation(self, observation: Observation) -> Observation:
        """An observation of the run, with extents in draws and results."""
        draws, outputs = (each_mapped(each, self._plain) for each in (observation.draws, observation.outputs))
        return replace(observation, draws=draws, outputs=outputs)

    def _plain(self, value: Any) -> Any:
        return self.dim(value) if isinstance(value, torch.SymInt) else value

    def _make_symbols(self) -> None:
        """An extent for each symbol of the dimensions, one for those that are equal."""
        pairs = [
            (each, expression(size))
            for each, size in zip(self._dims, self._sizes, strict=True)
            if isinstance(size, torch.SymInt)
        ]
        asked = [self._environment.replace(condition) for condition, _ in conclusions(self._environment)]
        equal = equal_symbols([(each.name, expr) for each, expr in pairs], asked, self._environment.backed_var_to_val)
        names: set[str] = set()
        for each, expr in sorted(pairs, key=lambda pair: not pair[1].is_Symbol):
            for symbol in sorted(expr.xreplace(equal).free_symbols - self._symbols.keys(), key=str):
                name = each.name if expr.is_Symbol else f"{each.name}_part"
                while name in names:
                    name += "_"
                names.add(name)
                same = [dim for dim, other in pairs if other.xreplace(equal) == symbol]
                self._symbols[symbol] = self._new(name, symbol, same)
        self._symbols.update({symbol: extent_of(expr, self._symbols) for symbol, expr in equal.items()})
        self._symbols = {**self._of_strides(), **self._symbols}

    def _of_strides(self) -> dict[Any, Dim]:
        """Strides that no size tells, of an argument that is a part of something: the sample's, which is what calls are
        held against."""
        steps = [step for value in self.arguments.values() for step in value.stride()]
        symbols = [expression(step).free_symbols for step in steps if isinstance(step, torch.SymInt)]
        return {symbol: int(self._environment.backed_var_to_val[symbol]) for symbol in set().union(*symbols)}

    def _new(self, name: str, symbol: Any, dims: Sequence[DynamicDim]) -> Dim:
        low = max([_LEAST, *(each.low for each in dims)])
        high = min([each.high for each in dims if each.high is not None], default=None)
        return self.scope.symbol(name, int(self._environment.backed_var_to_val[symbol]), low, high)

    def _narrow(self) -> None:
        """Bounds that torch took for granted or found: of a symbol its range, of anything else a guard.

        What is asked from now on can be proven with them.
        """
        for each, size in zip(self._dims, self._sizes, strict=True):
            extent = self.dim(size)
            if not isinstance(extent, Extent):
                continue
            for symbol in (expression(size), expression(size, original=True)):
                low, high = range_of(self._environment, symbol) if symbol.is_Symbol else (None, None)
                low = max(each.low, low or 0)
                high = min((bound for bound in (each.high, high) if bound is not None), default=None)
                self._bound(extent, low, high)

    def _bound(self, extent: Extent, low: int, high: int | None) -> None:
        if extent.linear is not None and extent.linear[1:] == (1, 0):
            key, *_ = extent.linear
            self.scope.narrow(key, low, high)
        elif extent < low or (high is not None and extent > high):
            raise AssertionError(f"{extent} is not between {low} and {high}")

    def _fixed(self, forward: str) -> list[Unsupported]:
        """Dimensions that are meant to vary and that forward fixes to the sample's size."""
        found = []
        for each, size in zip(self._dims, self._sizes, strict=True):
            number = int(size) if not isinstance(size, torch.SymInt) else _number(size)
            if each.required and number is not None:
                reason = f"dimension {each.dim} is meant to vary, and forward is for the sample's {number} alone"
                where = self._who_fixed(size) or forward
                found.append(Unsupported(f"dynamic_shapes{each.place}", where, reason, "Dim.AUTO lets it be static"))
        return found

    def _who_fixed(self, size: Any) -> str | None:
        if not isinstance(size, torch.SymInt):
            return None
        own = expression(size, original=True).free_symbols
        concluded = enumerate(conclusions(environment(size)))
        asked = [
            self._asked.get(place) or _line(frame)
            for place, (condition, frame) in concluded
            if own & condition.free_symbols
        ]
        return next(filter(None, asked), None)


def at_sample(observation: Observation) -> Observation:
    """An observation with numbers for its extents, the sample's."""
    draws, outputs = (each_mapped(each, sample_of) for each in (observation.draws, observation.outputs))
    return replace(observation, draws=draws, outputs=outputs)


def _number(size: torch.SymInt) -> int | None:
    found = expression(size)
    return int(found) if found.is_Integer else None


def _line(place: Any) -> str | None:
    """The user's line of a frame."""
    if isinstance(place, str) or place is None:
        return place
    return line_of((place.filename, place.lineno or 0)) if is_user_file(place.filename) else None


def each_mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Draws, results and their parts with every number changed."""
    if isinstance(value, Draw | Operand | Output | Parameter):
        return replace(value, **{each.name: each_mapped(getattr(value, each.name), change) for each in fields(value)})
    if type(value) in (tuple, list):
        return type(value)(each_mapped(each, change) for each in value)
    return change(value)
