"""Instantiation: a function with symbolic extents and their sizes -> the static function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tvm import relax
from tvm.ir import is_prim_expr

from autodiff.extents import ExtentScope, from_tir
from autodiff.extents.polynomial import Terms
from autodiff.ir import (
    Call,
    Expr,
    Function,
    ShapeExpr,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    build_function,
    library_name,
    results,
)
from autodiff.library import number
from autodiff.scan import is_scan, scan_call, scan_of


def instantiate(func: Function, sizes: Mapping[str, int]) -> Function:
    """``func`` in flat form with a number for each extent; the same object if it has none. Variables keep their names.

    ``library.extent`` becomes a constant. ``sizes``: by the symbols' names.

    Raises:
        ValueError: a size is missing, or the function was not made for these sizes (a guard of the scope is broken).
    """
    made = _Instance(sizes)
    params = [made.variable(param) for param in func.params]
    body: list[tuple[Var, Expr]] = []
    for var, value in bindings(func):
        new = made.expr(value)
        if library_name(value) == "library.extent":
            made.values[var] = new
        else:
            body.append((made.variable(var), new))
    outputs = [made.expr(output) for output in results(func)]
    if made.scope is None:
        return func
    return build_function(params, body, outputs, attrs=dict(func.attrs.items()) if func.attrs else None)


class _Instance:
    """Translates types, variables and expressions; ``values``: old variable -> its static replacement."""

    def __init__(self, sizes: Mapping[str, int]):
        self.values: dict[Var, Expr] = {}
        self.scope: ExtentScope | None = None
        self._sizes = dict(sizes)
        self._known: dict[Terms, int] = {}

    def size(self, expr: Expr) -> int:
        """The value of an integer expression."""
        value = from_tir(expr)
        if isinstance(value, int):
            return value
        if self.scope is None:
            self.scope = value.scope
            self._check(value.scope)
        if value.terms not in self._known:
            self._known[value.terms] = self.scope.value(value, self._sizes)
        return self._known[value.terms]

    def _check(self, scope: ExtentScope) -> None:
        missing = [symbol.name for symbol in scope.samples if symbol.name not in self._sizes]
        if missing:
            raise ValueError(f"wanted a size for each extent, got none for {', '.join(missing)}")
        broken = scope.broken()(self._sizes)
        if broken is not None:
            raise ValueError(f"the function is made for sizes with {broken}, got {self._sizes}")

    def typed(self, ty: relax.Type) -> relax.Type:
        """A type with numbers for its extents."""
        if isinstance(ty, TupleType):
            return TupleType([self.typed(field) for field in ty.fields])
        if isinstance(ty, TensorType) and isinstance(ty.shape, ShapeExpr):
            return TensorType([self.size(extent) for extent in ty.shape.values], str(ty.dtype))
        return ty

    def variable(self, var: Var) -> Var:
        """A new variable of the static type that replaces the given one."""
        new = self.values[var] = type(var)(var.name, self.typed(var.ty))
        return new

    def expr(self, value: Expr) -> Expr:
        """An expression with static types."""
        if isinstance(value, Var) and value in self.values:
            return self.values[value]
        if library_name(value) == "library.extent":
            return number(self.size(value.args[1]), str(value.ty.dtype))
        if is_scan(value):
            scan, tensors = scan_of(value)
            length = self.size(relax.prim_value(scan.length))
            return scan_call(replace(scan, length=length), [self.expr(tensor) for tensor in tensors])
        if isinstance(value, Call):
            types = [self.typed(ty) for ty in value.ty_args]
            args = [self.expr(arg) for arg in value.args]
            return Call(value.op, args, value.attrs, types, ret_ty=self.typed(value.ty))
        if isinstance(value, Tuple):
            return Tuple([self.expr(field) for field in value.fields])
        if isinstance(value, TupleGetItem):
            return TupleGetItem(self.expr(value.tuple_value), value.index)
        if isinstance(value, ShapeExpr):
            return ShapeExpr([self.size(extent) for extent in value.values])
        return relax.prim_value(self.size(value)) if _is_integer(value) else value


def _is_integer(value: Expr) -> bool:
    return is_prim_expr(value) and "int" in str(value.ty)
