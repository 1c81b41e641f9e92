"""Sums over the steps of a loop: gradients that every step adds to -> one product, or sum, over all steps.

``sum over t of a_t' b_t`` is the product of all rows ``a`` and all rows ``b``, one below the other; a sum of rows
likewise. What is needed for that beyond what is at hand for all steps leaves the loop as a tensor with the steps in
front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tvm.relax import op

from autodiff.ir import Expr, Function, Var, bindings, op_name, shape
from autodiff.rewrite import Scope

__all__ = ["Sums", "plan_sums"]


@dataclass
class Sums:
    """How gradients are summed after the loop.

    Attributes:
        of: the gradients, by their variable in a step.
        stacked: variables of a step that leave the loop for that.
        read: those, and what is at hand, that the sums read.
    """

    definitions: Mapping[Var, Expr]
    of: set[Expr] = field(default_factory=set)
    stacked: list[Var] = field(default_factory=list)
    read: set[Var] = field(default_factory=set)

    def emit(self, value: Expr, whole: Mapping[Var, Expr], scope: Scope) -> Var:
        """The sum of a gradient over all steps; ``whole``: what is read, with the steps in front."""
        call = self.definitions[value]
        match op_name(call):
            case "relax.permute_dims":
                made = op.permute_dims(self.emit(call.args[0], whole, scope))
            case "relax.add":
                made = op.add(*(self.emit(arg, whole, scope) for arg in call.args))
            case "relax.reshape":
                made = op.reshape(self.emit(call.args[0], whole, scope), shape(call))
            case "relax.sum":
                axes = [0, *(int(axis) + 1 for axis in _axes(call))]
                made = op.sum(whole[call.args[0]], axes, False)
            case _:
                left = _columns(*self._factor(call.args[0]), whole, scope, rows_last=True)
                right = _columns(*self._factor(call.args[1]), whole, scope, rows_last=False)
                made = op.matmul(left, right, call.attrs.out_dtype)
        return scope.emit(made, "sum")

    def _factor(self, value: Var) -> tuple[Var, bool]:
        """What a factor is, and whether transposed."""
        definition = self.definitions.get(value)
        if op_name(definition) == "relax.permute_dims" and len(shape(value)) == 2:
            return definition.args[0], True
        return value, False

    def factors(self, value: Expr, any_sum: bool = False) -> list[Var] | None:
        """The factors of all products that a gradient is made of, and what its sums of rows read; ``None`` if it is
        made of anything else. ``any_sum``: also of sums whose rows would leave the loop for nothing else."""
        call = self.definitions.get(value) if isinstance(value, Var) else None
        name = op_name(call)
        if name == "relax.matmul" and all(len(shape(arg)) == 2 for arg in call.args):
            return [self._factor(arg)[0] for arg in call.args]
        if name == "relax.sum" and isinstance(call.args[0], Var) and not call.attrs.keepdims:
            return [call.args[0]] if any_sum or call.args[0] in self.read else None
        if name in ("relax.reshape", "relax.add") or (name == "relax.permute_dims" and len(shape(value)) == 2):
            if name == "relax.add" and len({tuple(shape(arg)) for arg in (value, *call.args)}) > 1:
                return None
            args = call.args[:] if name == "relax.add" else call.args[:1]
            parts = [self.factors(arg, any_sum) for arg in args]
            return None if None in parts else [each for part in parts for each in part]
        return None


def plan_sums(step: Function, gradients: Sequence[Expr], at_hand: Sequence[Var], spare: int = 0) -> Sums:
    """What is summed after the loop.

    Args:
        step: the backward of one step.
        gradients: those results of it that are to be summed.
        at_hand: its parameters that are at hand for all steps. Other parameters are no factors.
        spare: elements of a step that may leave the loop for sums of rows alone.
    """
    sums = Sums(dict(bindings(step)))
    others = {param for param in step.params if param not in at_hand}
    sums.read.update(at_hand)
    for any_sum in (False, False, True):  # what leaves the loop for a product is at hand for a sum
        for gradient in gradients:
            found = sums.factors(gradient, any_sum)
            if gradient in sums.of or found is None or any(each in others for each in found):
                continue
            leaving = [each for each in dict.fromkeys(found) if each not in sums.read]
            elements = sum(math.prod(shape(each)) for each in leaving) if any_sum else 0
            if elements > spare:
                continue
            spare -= elements
            sums.of.add(gradient)
            sums.stacked += leaving
            sums.read.update(leaving)
    return sums


def _axes(call: Expr) -> list[int]:
    rank = len(shape(call.args[0]))
    return list(range(rank)) if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]


def _columns(factor: Var, transposed: bool, whole: Mapping[Var, Expr], scope: Scope, rows_last: bool) -> Var:
    """A factor of all steps: the axis that is summed over, and the steps, are one; last where ``rows_last``."""
    value = whole[factor]
    steps, first, second = shape(value)
    summed_last = rows_last != transposed  # of the two axes of a step's factor
    if summed_last:  # [steps, kept, summed]
        value = scope.emit(op.permute_dims(value, [1, 0, 2]), "factor")
        value = scope.emit(op.reshape(value, (first, steps * second)), "factor")
        return value if rows_last else scope.emit(op.permute_dims(value), "factor")
    value = scope.emit(op.reshape(value, (steps * first, second)), "factor")
    return scope.emit(op.permute_dims(value), "factor") if rows_last else value
