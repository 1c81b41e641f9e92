"""Size signature: a Relax function → the scope of its symbolic extents, and their order of occurrence.

Functions that differ only in the identity of symbols are structurally equal. They share a program only if the same
symbols of the same scope stand in the same places.

Kept function: the digest of a Relax function's canonical text, with a reader of the function.
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
    """``scope``: ``None`` for a static function; ``places``: the symbolic extents in order of occurrence.

    Equality needs the identical scope object: a decision about its extents becomes a guard there (``scope.assumed``).
    """

    scope: ExtentScope | None = None
    places: tuple = ()


def size_signature(func: Function) -> SizeSignature:
    """The signature of a function in flat form; reads bindings as well: a backward may use a symbol only there.

    Raises:
        ValueError: the symbols belong to several scopes.
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
        digest: of the function, see :func:`digest_of`.
        read: reads the function in flat form.
    """

    digest: str
    read: Callable[[], Function]


def digest_of(function: Function) -> str:
    """Text hash of a function: equal text, equal digest in every process. ``ValueError``: see
    :func:`~bridge.compile.runtime.kernel_store.canonical_text`."""
    return key_of(canonical_text([function]))
