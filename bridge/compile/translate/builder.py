"""From a Relax function in flat form to the loop graph.

Every Relax operator has a *translation*, registered by name: a function ``(builder, call) -> operand`` (a list of
operands for a tuple-typed call). View operators only change a view (:mod:`bridge.compile.translate.shapes`),
arithmetic becomes point-wise nodes and reductions (:mod:`bridge.compile.translate.arithmetic`), products and the like
become library calls (:mod:`bridge.compile.translate.libcalls`); every other operator is legalized by TVM
(:mod:`bridge.compile.translate.fallback`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from tvm.tirx import FloatImm, IntImm

from autodiff.ir import (
    Call,
    Constant,
    Expr,
    Function,
    ShapeExpr,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    dtype,
    library_name,
    op_name,
    results,
    shape,
    used_vars,
)
from bridge.compile.codegen.pointwise import EXPENSIVE, compute_type
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Concat, Graph, Node, Operand, Pointwise, Reduction, Scalar, Value, whole
from bridge.compile.schedule.products import ProductPolicy
from bridge.compile.schedule.reduction import identity
from bridge.compile.schedule.space import make_space

__all__ = ["Builder", "number", "numbers", "register", "translate"]

Translation = Callable[["Builder", Call], "Operand | Scalar | list"]
_TRANSLATIONS: dict[str, Translation] = {}

_SPLIT_REDUCTION = 8192
"""A reduction of this many elements or more with few results is done in two stages, so that it can run in parallel."""


def register(*names: str) -> Callable[[Translation], Translation]:
    """Register the translation of Relax operators (``"relax.add"``) or library functions (``"library.embedding"``)."""

    def decorate(function: Translation) -> Translation:
        for name in names:
            _TRANSLATIONS[name] = function
        return function

    return decorate


def number(expr: Expr) -> int | float:
    """The Python number of a literal argument. ``TypeError`` if it is not a literal."""
    if isinstance(expr, IntImm | FloatImm):
        return expr.value
    if isinstance(expr, Constant) and not shape(expr):
        return expr.value.numpy().item()
    if isinstance(expr, int | float):
        return expr
    raise TypeError(f"wanted a number known at compile time, got {expr}")


def numbers(expr: Expr) -> list[int]:
    """The integers of a literal tuple or shape."""
    fields = expr.values if isinstance(expr, ShapeExpr) else expr.fields if isinstance(expr, Tuple) else expr
    return [int(number(field)) for field in fields]


class Builder:
    """Collects the nodes of one function.

    Attributes:
        products: the backend's choices for matrix products.
        env: Relax variables to operands (lists for tuples).
        variable: the one being bound.
        readers: of each variable, the expressions that read it; the function itself if it is a result.
    """

    def __init__(self, products: ProductPolicy) -> None:
        self.products = products
        self.env: dict[Var, Operand | Scalar | list] = {}
        self.nodes: list[Node] = []
        self.constants: dict[Value, torch.Tensor] = {}
        self._literals: dict[Constant, Operand | Scalar] = {}
        self._producers: dict[Value, Pointwise] = {}
        self._copies: dict[Operand | Scalar, Operand] = {}
        self._slices: dict[Operand, Operand | Scalar] = {}
        self.variable: Var | None = None
        self.readers: dict[Var, list[Expr]] = {}
        self._hint = "t"

    def get(self, expr: Expr) -> Operand | Scalar | list:
        """The operand of an argument: a variable, a constant or a tuple of those."""
        if isinstance(expr, Var):
            return self.env[expr]
        if isinstance(expr, Constant):
            if expr not in self._literals:
                self._literals[expr] = self._literal(expr)
            return self._literals[expr]
        if isinstance(expr, Tuple):
            return [self.get(field) for field in expr.fields]
        raise TypeError(f"wanted a variable, a constant or a tuple of them as an argument, got {expr}")

    def _literal(self, constant: Constant) -> Operand | Scalar:
        # numpy has no bfloat16, DLPack does. The clone makes torch own the memory.
        tensor = torch.from_dlpack(constant.value).clone()
        if tensor.numel() == 1:
            return Scalar(tensor.item(), dtype(constant), shape(constant))
        return self.constant(tensor.contiguous())

    def constant(self, tensor: torch.Tensor) -> Operand:
        """A tensor baked into the program."""
        value = Value(
            f"const{len(self.constants)}", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "constant"
        )
        self.constants[value] = tensor
        return whole(value)

    def fresh(self, extents: Sequence[int], element_type: str) -> Value:
        """A value to be a node's result."""
        return Value(f"{self._hint}", tuple(extents), element_type)

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        if isinstance(node, Pointwise) and not isinstance(node, Concat):
            self._producers[node.out] = node
        return node

    def box_of_arithmetic(self, operand: Operand) -> tuple[str, list[Operand | Scalar]] | None:
        """``(op, operands)`` that compute a box of the result of cheap arithmetic anew; ``None`` if it is none.

        At most one operand may be as large as the result: then nothing more is read than the result itself.
        """
        node = self._producers.get(operand.value)
        if node is None or node.op in EXPENSIVE:
            return None
        corner = views.box(operand.view, node.out.shape)
        large = [read for read in node.operands if isinstance(read, Operand) and 4 * read.value.numel > node.out.numel]
        if corner is None or len(large) > 1:
            return None
        return node.op, [
            Scalar(read.number, read.dtype, operand.shape)
            if isinstance(read, Scalar)
            else Operand(read.value, views.cut_out(read.view, corner, operand.shape))
            for read in node.operands
        ]

    def _through(self, operand: Operand | Scalar) -> Operand | Scalar:
        """A slice of the result of cheap arithmetic is computed where it is read, and the rest perhaps never."""
        if isinstance(operand, Scalar) or operand.view.numel >= operand.value.numel:
            return operand
        if operand not in self._slices:
            found = self.box_of_arithmetic(operand)
            self._slices[operand] = operand if found is None else self.pointwise(*found, operand.dtype)
        return self._slices[operand]

    def pointwise(self, op: str, operands: Sequence[Operand | Scalar], element_type: str) -> Operand:
        """``op`` on operands broadcast against each other."""
        operands = [self._through(operand) for operand in operands]
        extents = torch.broadcast_shapes(*(operand.shape for operand in operands))
        operands = self._walkable([self.expand(operand, extents) for operand in operands], math.prod(extents), None)
        out = self.fresh(extents, element_type)
        self.add(Pointwise(op, tuple(operands), out))
        return whole(out)

    def _walkable(
        self, operands: list[Operand | Scalar], elements: int, inside: tuple[int, int] | None
    ) -> list[Operand | Scalar]:
        """Operands that one loop nest can read: those whose shapes cut the elements differently are copied first.

        ``inside``: ``(reduced, inner)`` extents of a reduction.
        """
        if elements == 0:
            return operands
        accesses = [(operand.view, 1) for operand in operands if isinstance(operand, Operand)]
        columns = None
        if inside:
            reduced, inner = inside
            columns = reduced if inner == 1 else inner
            # A broadcast view that forces a cut between the kept and the reduced rows.
            accesses.append((views.View((elements // (reduced * inner), reduced, inner), (0, 1, 0)), 1))
        reduces = inside is not None and inside[1] == 1
        if make_space(elements, columns, accesses, reduces=reduces) is not None:
            return operands
        if len(operands) == 1 and inside is None:
            raise AssertionError(f"a single view always has loop extents: {operands}")
        return [operand if isinstance(operand, Scalar) else self.dense(operand) for operand in operands]

    def cast(self, operand: Operand | Scalar, element_type: str) -> Operand | Scalar:
        """``operand`` as another element type; itself if it has that type."""
        if operand.dtype == element_type:
            return operand
        if isinstance(operand, Scalar):
            cast = torch.tensor(operand.number, dtype=getattr(torch, operand.dtype)).to(getattr(torch, element_type))
            return Scalar(cast.item(), element_type, operand.shape)
        return self.pointwise("astype", [operand], element_type)

    def reduce(self, op: str, operand: Operand | Scalar, axes: Sequence[int], element_type: str) -> Operand:
        """Reduce over ``axes`` without keeping them; half types are accumulated in float32 and rounded once."""
        operand = self.dense(operand) if isinstance(operand, Scalar) else operand
        axes = {axis % len(operand.shape) for axis in axes} if operand.shape else set()
        kept = [extent for axis, extent in enumerate(operand.shape) if axis not in axes]
        if not axes:
            return self.cast(operand, element_type)
        if operand.view.numel == 0:
            # eager has no max or min of nothing, but its softmax of nothing: there the result has no reader
            fill = 0 if 0 in kept else identity(op, element_type)
            return self.dense(Scalar(fill, element_type, tuple(kept)))
        # Neighbouring axes of one kind are one axis; what remains alternates kept, reduced, kept, …
        runs: list[tuple[bool, int]] = []
        for axis, extent in enumerate(operand.shape):
            if extent == 1:
                continue
            if runs and runs[-1][0] == (axis in axes):
                runs[-1] = (runs[-1][0], runs[-1][1] * extent)
            else:
                runs.append((axis in axes, extent))
        stages = sum(reduced for reduced, _ in runs)
        if stages == 0:
            return self.reshape(self.cast(operand, element_type), kept)
        accumulated = compute_type(element_type)
        while stages:
            position = max(i for i, (reduced, _) in enumerate(runs) if reduced)
            outer = math.prod(extent for _, extent in runs[:position])
            length = runs[position][1]
            inner = math.prod(extent for _, extent in runs[position + 1 :])
            part = _two_stage(outer, length, inner)
            if part:
                runs[position : position + 1] = [(True, length // part), (True, part)]
                stages += 1
                continue
            stages -= 1
            (operand,) = self._walkable([operand], outer * length * inner, (length, inner))
            out = self.fresh(kept if not stages else (outer * inner,), accumulated if stages else element_type)
            self.add(Reduction(op, operand, outer, length, inner, out))
            operand = whole(out)
            del runs[position]
        return operand

    def dense(self, operand: Operand | Scalar) -> Operand:
        """A value of its own that holds the operand's elements in order, unless it already is one."""
        if isinstance(operand, Operand) and views.is_dense(operand.view) and operand.view.numel == operand.value.numel:
            return operand
        return self.copy(operand)

    def copy(self, operand: Operand | Scalar) -> Operand:
        """The operand's elements in order, in a value of their own.

        What is a permutation of the result of cheap arithmetic is computed in the new order from the start: a bias is
        added while the heads are transposed, and where nothing else reads the first order it is never stored.
        """
        if operand not in self._copies:
            self._copies[operand] = self._copy(operand)
        return self._copies[operand]

    def _copy(self, operand: Operand | Scalar) -> Operand:
        node = self._producers.get(operand.value) if isinstance(operand, Operand) else None
        if node is not None and node.op not in EXPENSIVE:
            reads = [read for read in node.operands if isinstance(read, Operand)]
            large = [read for read in reads if 4 * read.value.numel > node.out.numel]
            moved = [
                Scalar(read.number, read.dtype, operand.shape)
                if isinstance(read, Scalar)
                else (view := views.compose(operand.view, read.view)) and Operand(read.value, view)
                for read in node.operands
            ]
            if len(large) <= 1 and all(moved) and self._walkable(moved, operand.view.numel, None) is moved:
                out = self.fresh(operand.shape, operand.dtype)
                self.add(Pointwise(node.op, tuple(moved), out))
                return whole(out)
        return self.pointwise("copy", [operand], operand.dtype)

    def expand(self, operand: Operand | Scalar, extents: Sequence[int]) -> Operand | Scalar:
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, tuple(extents))
        return Operand(operand.value, views.expand(operand.view, extents))

    def reshape(self, operand: Operand | Scalar, extents: Sequence[int]) -> Operand | Scalar:
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, tuple(extents))
        view = views.reshape(operand.view, extents)
        if view is not None:
            return Operand(operand.value, view)
        copy = self.copy(operand)
        return Operand(copy.value, views.dense(extents))

    def view(self, operand: Operand | Scalar, function: Callable[[views.View], views.View]) -> Operand | Scalar:
        """The operand under a function from view to view."""
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, function(views.dense(operand.shape)).shape)
        return Operand(operand.value, function(operand.view))

    def bind(self, var: Var, value: Expr) -> None:
        """Translate one binding."""
        self._hint, self.variable = var.name, var
        self.env[var] = self._translate(value)
        _check(var, self.env[var], value)

    def _translate(self, value: Expr) -> Operand | Scalar | list:
        if isinstance(value, Var | Constant | Tuple):
            return self.get(value)
        if isinstance(value, TupleGetItem):
            return self.get(value.tuple_value)[value.index]
        name = op_name(value)
        if name is None:
            raise NotImplementedError(f"cannot compile the binding {value}: wanted a call of a Relax operator")
        library = library_name(value)
        translation = _TRANSLATIONS.get(library or name)
        if translation is not None:
            result = translation(self, value)
            if result is not NotImplemented:
                return result
        if library is not None or name == "relax.call_pure_packed":
            known = ", ".join(sorted(n for n in _TRANSLATIONS if n.startswith("library.")))
            raise NotImplementedError(f"no library function {library or value.args[0]} is bound; bound are: {known}")
        return _TRANSLATIONS["fallback"](self, value)


def _two_stage(outer: int, length: int, inner: int) -> int:
    # Depends on the extents alone, as everything that decides the order of a reduction must.
    if inner != 1 or outer >= 16 or length < 2 * _SPLIT_REDUCTION:
        return 0
    divisors = (part for part in range(_SPLIT_REDUCTION, 255, -1) if length % part == 0)
    return next(divisors, 0)


def _check(var: Var, result: Operand | Scalar | list, value: Expr) -> None:
    """A translation's result must have the type that Relax inferred."""
    if isinstance(var.ty, TupleType):
        if not isinstance(result, list) or len(result) != len(var.ty.fields):
            raise AssertionError(f"{value} gives a tuple of {len(var.ty.fields)}, its translation gave {result}")
        types, fields = list(var.ty.fields), result
    else:
        types, fields = [var.ty], [result]
    for ty, field in zip(types, fields, strict=True):
        if not isinstance(ty, TensorType) or ty.shape is None:
            continue
        wanted = (tuple(int(extent) for extent in ty.shape), str(ty.dtype))
        if (field.shape, field.dtype) != wanted:
            raise AssertionError(f"{value} has type {wanted}, its translation has {(field.shape, field.dtype)}")


def translate(func: Function, products: ProductPolicy) -> Graph:
    """The loop graph of a function in flat form.

    Results are values of their own (or parameters themselves). ``NotImplementedError`` names an operator that
    neither this package nor TVM's legalization can compile.
    """
    builder = Builder(products)
    params = [Value(param.name, shape(param), dtype(param), "param") for param in func.params]
    builder.env.update((var, whole(value)) for var, value in zip(func.params, params, strict=True))
    for _, value in bindings(func):
        for argument in used_vars(value):
            builder.readers.setdefault(argument, []).append(value)
    for output in results(func):
        if isinstance(output, Var):
            builder.readers.setdefault(output, []).append(func)
    for var, value in bindings(func):
        if var not in builder.env:
            builder.bind(var, value)
    outputs = [_result(builder, builder.get(output), output) for output in results(func)]
    return Graph(params, builder.constants, _live(builder.nodes, outputs), outputs)


def _live(nodes: Sequence[Node], outputs: Sequence[Operand]) -> list[Node]:
    """The nodes that the results need. Others are left where an operator was computed anew in another order."""
    needed = {output.value for output in outputs}
    live = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outs):
            live.append(node)
            needed.update(operand.value for operand in node.operands if isinstance(operand, Operand))
    return live[::-1]


def _result(builder: Builder, operand: Operand | Scalar, output: Expr) -> Operand:
    if isinstance(output, Var):
        builder._hint = output.name
    if isinstance(operand, Scalar) or not views.is_dense(operand.view) or operand.view.numel != operand.value.numel:
        return builder.pointwise("copy", [operand], operand.dtype)
    if operand.value.source == "node" or (operand.value.source == "param" and operand.shape == operand.value.shape):
        return operand
    return builder.pointwise("copy", [operand], operand.dtype)
