"""Graph builder: operands in, loop IR nodes out; what every translation builds with.

Shape operations give views, not nodes. Where a view does not fit the loops that read it, the builder copies, or
recomputes the arithmetic that made it (:mod:`bridge.compile.passes.recompute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from autodiff.ir import Constant, Expr, Tuple, Var, dtype, shape
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Concat, LibraryCall, Node, Operand, Pointwise, Reduction, Scalar, Value, whole
from bridge.compile.passes.recompute import box_of_arithmetic, permuted_arithmetic
from bridge.compile.schedule.products import ProductPolicy
from bridge.compile.schedule.reduction import identity, reduction_stages
from bridge.compile.schedule.space import share_loops

__all__ = ["Builder"]


class Builder:
    """Collects the nodes of one function.

    Attributes:
        products: the backend's choices for matrix products.
        env: Relax variables to operands (lists for tuples).
        variable: the one being bound; ``hint``, its name, is that of values made for it.
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
        self.hint = "t"

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
        return Value(self.hint, tuple(extents), element_type)

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        if isinstance(node, Pointwise) and not isinstance(node, Concat):
            self._producers[node.out] = node
        return node

    def producer(self, value: Value) -> Pointwise | None:
        """The node that computes a value by arithmetic, or ``None``."""
        return self._producers.get(value)

    def _through(self, operand: Operand | Scalar) -> Operand | Scalar:
        """A slice of the result of cheap arithmetic is computed where it is read, and the rest perhaps never."""
        if isinstance(operand, Scalar) or operand.view.numel >= operand.value.numel:
            return operand
        if operand not in self._slices:
            found = box_of_arithmetic(self.producer(operand.value), operand)
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
        views_read = [operand.view for operand in operands if isinstance(operand, Operand)]
        if elements == 0 or share_loops(views_read, elements, inside):
            return operands
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
        remaining = [extent for axis, extent in enumerate(operand.shape) if axis not in axes]
        if not axes:
            return self.cast(operand, element_type)
        if operand.view.numel == 0:
            # eager has no max or min of nothing, but its softmax of nothing: there the result has no reader
            fill = 0 if 0 in remaining else identity(op, element_type)
            return self.dense(Scalar(fill, element_type, tuple(remaining)))
        stages = reduction_stages(operand.shape, axes)
        if not stages:
            return self.reshape(self.cast(operand, element_type), remaining)
        for left, (outer, length, inner) in zip(reversed(range(len(stages))), stages, strict=True):
            (operand,) = self._walkable([operand], outer * length * inner, (length, inner))
            accumulated = compute_type(element_type) if left else element_type
            out = self.fresh((outer * inner,) if left else remaining, accumulated)
            self.add(Reduction(op, operand, outer, length, inner, out))
            operand = whole(out)
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
        if isinstance(operand, Operand):
            if operand.view.numel and not share_loops([operand.view], operand.view.numel):  # more axes than loops
                out = self.fresh(operand.shape, operand.dtype)
                self.add(LibraryCall("copy", (operand,), (out,)))
                return whole(out)
            node = self.producer(operand.value)
            moved = permuted_arithmetic(node, operand)
            if moved is not None and self._walkable(moved, operand.view.numel, None) is moved:
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
