"""Symbolic sizes of a capture: torch's symbols, ranges and guards → the extents of one scope.

One of torch's environments holds the conclusions of the symbolic run and of decompositions about sizes: two are equal,
one is divisible, one is below a bound that forward compares it with. Equal dimensions share a symbol there, and a
dimension that must have the sample's size is a number. :meth:`SymbolicSizes.take_over` asks the scope of extents the
same questions, so that torch's conclusions hold wherever the scope's guards do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch

from autodiff.extents import Dim, Extent, ExtentScope, SizeGuard, maximum, minimum, sample_of
from bridge.base.errors import Unsupported, is_user_file, line_of
from bridge.base.torch_shapes import conclusions, environment, expression, is_decided, range_of
from bridge.capture.observation import Draw, DropoutOperand, Observation, Output, Parameter
from bridge.capture.sample import LEAST, DynamicDim

_SPECIAL = 'dispatch it without dynamic_shapes for that dimension: on_miss="compile" makes an entry for each size'


class SymbolicSizes:
    """The dynamic sizes of the call's arguments.

    Attributes:
        arguments: the traced graph's argument tensors with dynamic sizes, by leaf.
        scope: an extent for each symbol that torch has left.
        lines: guard of the scope -> the line where forward or torch asked for it.
    """

    def __init__(self, dims: Sequence[DynamicDim], values: Sequence[Any]):
        """``values``: the traced graph's value for each leaf of the arguments."""
        self.arguments = {each.leaf: values[each.leaf] for each in dims}
        self.scope = ExtentScope()
        self.lines: dict[SizeGuard, str] = {}
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
        """Makes the extents and asks them torch's conditions → refusals of conditions that extents cannot express, and
        of required dimensions that forward fixes. Called when torch adds no more conditions.

        Args:
            forward: the name for messages without a line, as in ``"Block.forward"``.
            asked: index of a condition -> the user's line, where it is known.
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
        """torch's size as a number or an extent; :class:`NotTranslatedError` for a size that depends on tensors."""
        return extent_of(expression(size), self._symbols) if isinstance(size, torch.SymInt) else int(size)

    def form(self, value: Any) -> Any:
        """A value of the traced graph with extents: fake tensors become :class:`TensorMetadata`, other values stay."""
        if isinstance(value, tuple | list):
            return type(value)(self.form(each) for each in value)
        if isinstance(value, torch.Tensor):
            shape = tuple(map(self.dim, value.shape))
            stride = tuple(map(self.dim, value.stride())) if value.layout is torch.strided else None
            return TensorMetadata(shape, value.dtype, stride, value.requires_grad, value.device)
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
        """Makes an extent for each symbol of the dimensions; equal symbols share one."""
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
        """The sample's numbers, which guards compare, for symbols that occur only in strides (a part of a tensor)."""
        steps = [step for value in self.arguments.values() for step in value.stride()]
        symbols = [expression(step).free_symbols for step in steps if isinstance(step, torch.SymInt)]
        return {symbol: int(self._environment.backed_var_to_val[symbol]) for symbol in set().union(*symbols)}

    def _new(self, name: str, symbol: Any, dims: Sequence[DynamicDim]) -> Dim:
        low = max([LEAST, *(each.low for each in dims)])
        high = min([each.high for each in dims if each.high is not None], default=None)
        return self.scope.symbol(name, int(self._environment.backed_var_to_val[symbol]), low, high)

    def _narrow(self) -> None:
        """Adds torch's bounds to symbols' ranges, or as guards on expressions, as premises of later proofs."""
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
        """Refusals of dimensions that must be dynamic but that forward fixes to the sample's size."""
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
    """An observation with the sample's numbers for its extents."""
    draws, outputs = (each_mapped(each, sample_of) for each in (observation.draws, observation.outputs))
    return replace(observation, draws=draws, outputs=outputs)


def _number(size: torch.SymInt) -> int | None:
    found = expression(size)
    return int(found) if found.is_Integer else None


def _line(place: Any) -> str | None:
    """The user's line of a frame; ``None`` for a frame outside of the user's code. Text is returned."""
    if isinstance(place, str) or place is None:
        return place
    return line_of((place.filename, place.lineno or 0)) if is_user_file(place.filename) else None


def each_mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Draws, results and their parts with every number changed."""
    if isinstance(value, Draw | DropoutOperand | Output | Parameter):
        return replace(value, **{each.name: each_mapped(getattr(value, each.name), change) for each in fields(value)})
    if type(value) in (tuple, list):
        return type(value)(each_mapped(each, change) for each in value)
    return change(value)


# Tensor metadata with extents for dynamic sizes.
#
# It takes the place of a graph's fake tensors: torch's symbolic sizes would record further conditions in their
# environment, after the scope of extents has taken them over.


@dataclass(frozen=True, eq=False)
class TensorMetadata:
    """Shape and dtype of a tensor; ``stride`` and ``device`` may be ``None``."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    stride: tuple[Dim, ...] | None = None
    requires_grad: bool = False
    device: torch.device | None = None

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def dim(self) -> int:
        return len(self.shape)

    def unsqueeze(self, dim: int) -> TensorMetadata:
        """The metadata with one more axis of extent 1, as in ``torch.unsqueeze``."""
        place = dim % (len(self.shape) + 1)
        return TensorMetadata((*self.shape[:place], 1, *self.shape[place:]), self.dtype)

    def to(self, dtype: torch.dtype) -> TensorMetadata:
        """The metadata with another dtype."""
        return replace(self, dtype=dtype)


# Expressions of sizes: torch's sympy expressions → extents; conditions on sizes → answers of their scope.
#
# Floating point enters only where Python rounds a quotient or a multiple by a power of two to an integer (``int(n *
# 0.5)``, ``math.ceil(n / 3)``): exact below 2**52, where float64 has the quotient on the right side.


class NotTranslatedError(ValueError):
    """An expression of sizes that extents cannot express."""

    def __init__(self, expr: Any):
        super().__init__(f"{expr} ({type(expr).__name__})")


def extent_of(expr: Any, symbols: Mapping[Any, Dim]) -> Dim:
    """The integer expression ``expr`` with extents for its symbols; :class:`NotTranslatedError` if there is none."""
    if expr.is_Integer:
        return int(expr)
    if expr in symbols:
        return symbols[expr]
    kind = type(expr).__name__
    if kind in ("FloorToInt", "TruncToInt", "CeilToInt"):
        return _rounded(expr.args[0], symbols, up=kind == "CeilToInt")
    make = _INTEGERS.get(kind)
    if make is None:
        raise NotTranslatedError(expr)
    if kind in ("Pow", "PowByNatural") and not (expr.args[1].is_Integer and expr.args[1] >= 0):
        raise NotTranslatedError(expr)
    return make(*(extent_of(arg, symbols) for arg in expr.args))


def holds(expr: Any, symbols: Mapping[Any, Dim]) -> bool:
    """Whether a condition holds: for all sizes in range, or for the sample, which adds a guard to the extents' scope.
    :class:`NotTranslatedError` if extents cannot express it."""
    kind = type(expr).__name__
    if kind in ("BooleanTrue", "BooleanFalse"):
        return kind == "BooleanTrue"
    if kind == "Not":
        return not holds(expr.args[0], symbols)
    if kind == "And":
        return all(holds(arg, symbols) for arg in expr.args)
    if kind == "Or":  # the first term that holds for the sample: a stronger condition
        return any(holds(arg, symbols) for arg in expr.args)
    if kind not in _RELATIONS:
        raise NotTranslatedError(expr)
    a, b = (extent_of(arg, symbols) for arg in expr.args)
    return bool(_RELATIONS[kind](a, b))


def equal_symbols(
    dims: Sequence[tuple[str, Any]], conditions: Iterable[Any], samples: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Symbols that need no separate extent → the equal expression of other symbols.

    One symbol replaces all symbols of a name, and an equation replaces a symbol by its other side. Products that are
    equal (``a * b == c * d``) make factors with one sample size equal: fewer calls fit, and all passes can prove it.

    Args:
        dims: name and expression of each dimension.
        conditions: torch's conditions.
        samples: values of the symbols in the sample.
    """
    found: dict[Any, Any] = {}

    def put(symbol: Any, expr: Any) -> None:
        for known in found:
            found[known] = found[known].xreplace({symbol: expr})
        found[symbol] = expr

    first: dict[str, Any] = {}
    for name, expr in dims:
        expr = expr.xreplace(found)
        if expr.is_Symbol and first.setdefault(name, expr) != expr:
            put(expr, first[name].xreplace(found))
    for condition in conditions:
        if type(condition).__name__ != "Equality":
            continue
        a, b = (arg.xreplace(found) for arg in condition.args)
        for symbol, other in ((a, b), (b, a)):
            if symbol.is_Symbol and symbol not in other.free_symbols and symbol not in found:
                put(symbol, other)
                break
        else:
            _pair(a, b, samples, put)
    return found


def _pair(a: Any, b: Any, samples: Mapping[Any, Any], put: Callable[[Any, Any], None]) -> None:
    """Makes factors with one sample size equal if that makes the sides of an equation equal."""
    ours, theirs = (sorted(x.free_symbols - y.free_symbols, key=str) for x, y in ((a, b), (b, a)))
    pairs = {}
    for symbol in ours:
        fit = next((other for other in theirs if samples[other] == samples[symbol]), None)
        if fit is not None:
            theirs.remove(fit)
            pairs[symbol] = fit
    if pairs and a.xreplace(pairs) == b:
        for symbol, other in pairs.items():
            put(symbol, other)


def _rounded(expr: Any, symbols: Mapping[Any, Dim], *, up: bool) -> Dim:
    """A quotient, or a multiple by a dyadic float, rounded to an integer."""
    numerator, divisor = _fraction(expr, symbols)
    return -((-numerator) // divisor) if up else numerator // divisor


def _fraction(expr: Any, symbols: Mapping[Any, Dim]) -> tuple[Dim, Dim]:
    kind = type(expr).__name__
    if kind == "IntTrueDiv":
        a, b = (extent_of(arg, symbols) for arg in expr.args)
        return (a, b) if a >= 0 and b > 0 else _refuse(expr)
    if kind == "ToFloat":
        a = extent_of(expr.args[0], symbols)
        return (a, 1) if a >= 0 else _refuse(expr)
    if expr.is_Float:
        numerator, divisor = float(expr).as_integer_ratio()
        return (numerator, divisor) if 0 <= numerator < 2**20 and divisor < 2**20 else _refuse(expr)
    if kind == "Mul" and all(type(arg).__name__ == "ToFloat" or arg.is_Float for arg in expr.args):
        parts = [_fraction(arg, symbols) for arg in expr.args]
        return reduce(_product, (part for part, _ in parts)), reduce(_product, (part for _, part in parts))
    return _refuse(expr)


def _refuse(expr: Any) -> Any:
    raise NotTranslatedError(expr)


def _product(a: Dim, b: Dim) -> Dim:
    return a * b


_INTEGERS: dict[str, Callable[..., Dim]] = {
    "Add": lambda *terms: sum(terms[1:], terms[0]),
    "Mul": lambda *factors: reduce(_product, factors),
    "Pow": lambda base, exponent: reduce(_product, [base] * int(exponent), 1),
    "PowByNatural": lambda base, exponent: reduce(_product, [base] * int(exponent), 1),
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, divisor, modulus: a // divisor % modulus,
    "Max": lambda *args: reduce(maximum, args),
    "Min": lambda *args: reduce(minimum, args),
    "Identity": lambda a: a,
}

_RELATIONS: dict[str, Callable[[Dim, Dim], bool]] = {
    "Equality": lambda a, b: a == b,
    "Unequality": lambda a, b: a != b,
    "StrictLessThan": lambda a, b: a < b,
    "LessThan": lambda a, b: a <= b,
    "StrictGreaterThan": lambda a, b: a > b,
    "GreaterThan": lambda a, b: a >= b,
}
