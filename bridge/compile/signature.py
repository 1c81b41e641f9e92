"""Size signature: a Relax function → the scope of its symbolic extents, and which of them stands where.

Functions that differ in nothing but the symbols' identity are structurally equal. Two are one program if they speak of
the same symbols of the same scope in the same places.

Kept function: a Relax function by the digest of its canonical text, read when something asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tvm.ir import is_prim_expr

from autodiff.extents import Extent, ExtentScope, from_tir
from autodiff.ir import Call, Expr, Function, ShapeExpr, TensorType, Tuple, TupleType, bindings, extents_of, results
from bridge.artifact import key_of
from bridge.compile.runtime.kernel_store import canonical_text

__all__ = ["KeptFunction", "SizeSignature", "digest_of", "size_signature"]


@dataclass(frozen=True)
class SizeSignature:
    """``scope`` is ``None`` for a static function; ``places``: the symbolic extents in the order in which they stand.

    Equal if the scopes are one object, and what they answer becomes a guard in one place (``scope.assumed``).
    """

    scope: ExtentScope | None = None
    places: tuple = ()


def size_signature(func: Function) -> SizeSignature:
    """The signature of a function in flat form. A symbol of a backward may stand in neither parameters nor results.

    Raises:
        ValueError: the function speaks of symbols of several scopes.
    """
    found = [extent for value in (*func.params, *results(func)) for extent in _of_type(value.ty)]
    found += [extent for var, value in bindings(func) for extent in _of_binding(var, value)]
    if not found:
        return SizeSignature()
    if any(extent.scope is not found[0].scope for extent in found):
        raise ValueError("wanted symbolic extents of one scope, got those of several")
    scope = found[0].scope
    return SizeSignature(scope, (scope.assumed, *(extent.terms for extent in found)))


def _of_type(ty: object) -> Iterator[Extent]:
    if isinstance(ty, TupleType):
        for field in ty.fields:
            yield from _of_type(field)
    elif isinstance(ty, TensorType) and isinstance(ty.shape, ShapeExpr):
        yield from (extent for extent in extents_of(ty) if isinstance(extent, Extent))


def _of_binding(var: Expr, value: Expr) -> Iterator[Extent]:
    yield from _of_type(var.ty)
    if isinstance(value, Call):
        for arg in value.args:
            yield from _of_argument(arg)


def _of_argument(arg: Expr) -> Iterator[Extent]:
    if isinstance(arg, Tuple):
        for field in arg.fields:
            yield from _of_argument(field)
    elif isinstance(arg, ShapeExpr):
        yield from (found for found in map(from_tir, arg.values) if isinstance(found, Extent))
    elif is_prim_expr(arg):
        found = arg.value if isinstance(getattr(arg, "value", None), int | float) else from_tir(arg)
        if isinstance(found, Extent):
            yield found


@dataclass(frozen=True)
class KeptFunction:
    """A function of the disk cache.

    Attributes:
        digest: of it, see :func:`digest_of`.
        read: the function in flat form.
    """

    digest: str
    read: Callable[[], Function]


def digest_of(function: Function) -> str:
    """Equal for functions of equal text, in every process. ``ValueError``: see
    :func:`~bridge.compile.runtime.kernel_store.canonical_text`."""
    return key_of(canonical_text([function]))
