"""Reverse scan: the backward of a scan's body -> a function that computes the gradients of the whole scan.

The backward runs the steps in the opposite order. Its carries are the gradients of the carries; its xs are the saved
tensors of a step and the gradients of its ys; its ys are the gradients of the xs. The gradient of a constant is a sum
over the steps. Where it is a matrix product, or a row sum of tensors available for all steps, one product (one sum)
over all steps computes it after the loop; otherwise it is a carry. With ``sums_later`` the rows of any sum leave the
loop to be summed over all steps, at most as many elements as the backward reads: on a GPU, starting a sum costs more
than adding the few rows of a step.

Sums over the steps: gradients that every step adds to -> one product, or sum, over all steps.
``sum over t of a_t' b_t`` is the product of all rows ``a`` and all rows ``b``, concatenated; a sum of rows is the sum
of all rows. Operands that are not available for all steps leave the loop as tensors with the steps in front.

Gradient of a scan: the data in its options -> the bindings of its backward.
The options hold the backward of one step, which is the same for all lengths. The backward of the scan is a function of
its tensors, its results and the gradients of some results; :func:`partials` puts its bindings in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tvm import relax
from tvm.relax import op

from autodiff.body import Scope
from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Function,
    TensorType,
    TupleGetItem,
    Var,
    axes_of,
    bindings,
    build_function,
    dtype,
    op_name,
    results,
    shape,
    substitute,
)
from autodiff.scan.hoist import hoist
from autodiff.scan.operator import Scan, body_text, parsed, scan_call, scan_of


class BackwardParameter(NamedTuple):
    """The origin of a parameter of the body's backward: ``kind`` and its number.

    ``"before"``: a carry before the step; ``"x"``, ``"constant"``: inputs of the forward; ``"y"``: a result of the
    forward with the steps in front; ``"grad"``: the gradient of a result of the body, numbered from its carries on.
    """

    kind: str
    index: int


@dataclass(frozen=True)
class BackwardStep:
    """The backward of one step.

    Attributes:
        function: parameters as in ``params`` -> gradients of the ``wanted`` parameters of the forward body.
        params: the origins of its parameters.
        wanted: indices of parameters of the forward body.
        differentiated: indices of results of the forward body that have gradients.
        after: carry read before the step -> the y that holds its values after the steps.
        zero: parameters whose gradient is zero, since no result that is read depends on them.
    """

    function: Function
    params: tuple[BackwardParameter, ...]
    wanted: tuple[int, ...]
    differentiated: tuple[int, ...]
    after: dict[int, int]
    zero: tuple[int, ...] = ()


def reverse_scan(scan: Scan, step: BackwardStep, sums_later: bool = False) -> Function | None:
    """Builds the backward of a scan; ``None`` if TVM's JSON cannot hold its body.

    Its parameters: the forward's tensors, its results, gradients of ``step.differentiated``; its results: gradients
    of ``step.wanted``.

    Args:
        scan: the forward, whose results include the saved tensors.
        sums_later: see the module's docstring.
    """
    return _Reverse(scan, step).function(sums_later)


class _Reverse:
    def __init__(self, scan: Scan, step: BackwardStep):
        self.scan, self.step = scan, step
        forward = scan.function
        self.tensors = [_whole(scan, place, param) for place, param in enumerate(forward.params)]
        made = zip(results(forward), scan.type.fields, strict=True)
        self.results = [Var(f"result_{place}", ty) for place, (_, ty) in enumerate(made)]
        self.grads = {place: Var(f"grad_{place}", self.results[place].ty) for place in step.differentiated}
        self.scope = Scope(var.name for var in (*self.tensors, *self.results, *self.grads.values()))
        self.param = dict(zip(step.params, step.function.params, strict=True))
        self.gradient = dict(zip(step.wanted, results(step.function), strict=True))
        self._before: dict[int, Var] = {}

    def function(self, sums_later: bool) -> Function | None:
        scan, step = self.scan, self.step
        first_constant = scan.carries + scan.xs
        carries = [BackwardParameter("grad", place) for place in range(scan.carries)]
        xs = [saved for saved in step.params if saved not in carries and saved.kind != "constant"]
        constants = [saved for saved in step.params if saved.kind == "constant"]
        carried = [place for place in step.wanted if place < scan.carries]
        of_xs = [place for place in step.wanted if scan.carries <= place < first_constant]
        of_constants = [place for place in step.wanted if place >= first_constant]
        sources = dict(bindings(step.function))
        at_hand = {self.param[saved]: saved for saved in xs}
        leaving = [self.gradient[place] for place in of_xs if self.gradient[place] in sources]
        gradients = [self.gradient[place] for place in of_constants]
        spare = sum(math.prod(shape(self.param[saved])) for saved in xs) if sums_later else 0
        sums = _plan_sums(step.function, gradients, [*at_hand, *leaving], spare)
        added = [place for place in of_constants if self.gradient[place] not in sums.of]

        body: list[tuple[Var, Expr]] = list(sources.items())
        carry_params = [self._carry_param(place) for place in carried]
        made = [self.gradient[place] for place in carried]
        totals = []
        for place in added:
            total = Var(f"total_{place}", self.tensors[place].ty)
            more = DataflowVar(f"sum_{place}", total.ty)
            body.append((more, op.add(total, self.gradient[place])))
            totals.append(total)
            made.append(more)
        ys = [*(self.gradient[place] for place in of_xs), *sums.stacked]
        params = [*carry_params, *totals, *(self.param[saved] for saved in (*xs, *constants))]
        text = body_text(build_function(params, body, [*made, *ys]))
        if text is None:
            return None
        backward = Scan(text, len(made), len(xs), scan.length, not scan.reverse)
        firsts = [self._first(place) for place in carried]
        firsts += [self._zeros(self.tensors[place].ty) for place in added]
        given = [*firsts, *map(self._of_all_steps, xs), *(self.tensors[first_constant + s.index] for s in constants)]
        called = self.scope.emit(scan_call(backward, given), "scan")
        items = [self.scope.emit(TupleGetItem(called, place), "item") for place in range(len(made) + len(ys))]
        found = dict(zip((*carried, *added), items, strict=False))
        found |= dict(zip(of_xs, items[len(made) :], strict=False))
        stacked = dict(zip(sums.stacked, items[len(made) + len(of_xs) :], strict=True))
        stacked |= {self.gradient[place]: found[place] for place in of_xs}
        stacked |= {var: self._of_all_steps(saved) for var, saved in at_hand.items() if var in sums.read}
        for place in of_constants:
            if place not in found:
                found[place] = sums.emit(self.gradient[place], stacked, self.scope)
        outputs = [found[place] for place in step.wanted]
        params = [*self.tensors, *self.results, *self.grads.values()]
        return build_function(params, self.scope.body, outputs)

    def _carry_param(self, place: int) -> Var:
        known = self.param.get(BackwardParameter("grad", place))
        return Var(f"unused_{place}", self.tensors[place].ty) if known is None else known

    def _first(self, place: int) -> Expr:
        """The gradient of a carry after the last step."""
        known = self.grads.get(place)
        return self._zeros(self.tensors[place].ty) if known is None else known

    def _zeros(self, ty: TensorType) -> Var:
        return self.scope.emit(op.zeros(ty.shape, str(ty.dtype)), "zeros")

    def _of_all_steps(self, saved: BackwardParameter) -> Var:
        """A saved tensor, or a gradient, with the steps in front."""
        match saved.kind:
            case "before":
                if saved.index not in self._before:
                    self._before[saved.index] = self._values_before(saved.index)
                return self._before[saved.index]
            case "x":
                return self.tensors[self.scan.carries + saved.index]
            case "y":
                return self.results[saved.index]
            case _:
                return self.grads[saved.index]

    def _values_before(self, carry: int) -> Var:
        """The values of a carry before each step: the first value, then the values after all steps but the last."""
        first, after = self.tensors[carry], self.results[self.step.after[carry]]
        first = self.scope.emit(op.reshape(first, (1, *shape(first))), "first")
        steps = self.scan.length
        if steps == 1:
            return first
        begin = 1 if self.scan.reverse else 0
        rest = self.scope.emit(op.strided_slice(after, [0], [begin], [begin + steps - 1], [1]), "rest")
        parts = [rest, first] if self.scan.reverse else [first, rest]
        return self.scope.emit(op.concat(relax.Tuple(parts), 0), "before")


def _whole(scan: Scan, place: int, param: Var) -> Var:
    """A variable for the scan's tensor that a parameter of its body reads."""
    stacked = scan.carries <= place < scan.carries + scan.xs
    extents = (scan.length, *shape(param)) if stacked else shape(param)
    return Var(f"tensor_{place}", TensorType(extents, dtype(param)))


@dataclass
class _Sums:
    """The gradients that are summed after the loop.

    Attributes:
        of: the gradients, by their variable in a step.
        stacked: variables of a step that leave the loop for the sums.
        read: ``stacked``, and the variables available for all steps.
    """

    definitions: Mapping[Var, Expr]
    of: set[Expr] = field(default_factory=set)
    stacked: list[Var] = field(default_factory=list)
    read: set[Var] = field(default_factory=set)

    def emit(self, value: Expr, whole: Mapping[Var, Expr], scope: Scope) -> Var:
        """The sum of a gradient over all steps; ``whole``: variable of a step -> its tensor with the steps in front."""
        call = self.definitions[value]
        match op_name(call):
            case "relax.permute_dims":
                made = op.permute_dims(self.emit(call.args[0], whole, scope))
            case "relax.add":
                made = op.add(*(self.emit(arg, whole, scope) for arg in call.args))
            case "relax.reshape":
                made = op.reshape(self.emit(call.args[0], whole, scope), shape(call))
            case "relax.sum":
                axes = [0, *(axis + 1 for axis in axes_of(call))]
                made = op.sum(whole[call.args[0]], axes, False)
            case _:
                left = _columns(*self._factor(call.args[0]), whole, scope, rows_last=True)
                right = _columns(*self._factor(call.args[1]), whole, scope, rows_last=False)
                made = op.matmul(left, right, call.attrs.out_dtype)
        return scope.emit(made, "sum")

    def _factor(self, value: Var) -> tuple[Var, bool]:
        """The variable of a product's factor, and whether it is transposed."""
        definition = self.definitions.get(value)
        if op_name(definition) == "relax.permute_dims" and len(shape(value)) == 2:
            return definition.args[0], True
        return value, False

    def factors(self, value: Expr, any_sum: bool = False) -> list[Var] | None:
        """The factors of all products, and the operands of all row sums, of which a gradient is made; ``None`` if it is
        made otherwise. ``any_sum``: accepts sums whose rows are not available after the loop yet."""
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


def _plan_sums(step: Function, gradients: Sequence[Expr], at_hand: Sequence[Var], spare: int = 0) -> _Sums:
    """Chooses the gradients to sum after the loop.

    Args:
        step: the backward of one step.
        gradients: results of the step that are summed over the steps.
        at_hand: parameters available for all steps. Other parameters are no factors.
        spare: elements of a step that may leave the loop for sums of rows alone.
    """
    sums = _Sums(dict(bindings(step)))
    others = {param for param in step.params if param not in at_hand}
    sums.read.update(at_hand)
    for any_sum in (False, False, True):  # values that leave the loop for a product are available to a sum
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


def _columns(factor: Var, transposed: bool, whole: Mapping[Var, Expr], scope: Scope, rows_last: bool) -> Var:
    """A factor of all steps as a matrix whose summed axis merges the steps; it is the last axis if ``rows_last``."""
    value = whole[factor]
    steps, first, second = shape(value)
    summed_last = rows_last != transposed  # of the two axes of a step's factor
    if summed_last:  # [steps, kept, summed]
        value = scope.emit(op.permute_dims(value, [1, 0, 2]), "factor")
        value = scope.emit(op.reshape(value, (first, steps * second)), "factor")
        return value if rows_last else scope.emit(op.permute_dims(value), "factor")
    value = scope.emit(op.reshape(value, (steps * first, second)), "factor")
    return scope.emit(op.permute_dims(value), "factor") if rows_last else value


def gradient_of(step: BackwardStep, sums_later: bool) -> dict[str, Any]:
    """A step as JSON data for a scan's ``gradient``; ``ValueError`` if TVM's JSON cannot hold one of its literals."""
    text = body_text(step.function)
    if text is None:
        raise ValueError(_UNWRITTEN)
    return {
        "step": text,
        "params": [list(saved) for saved in step.params],
        "wanted": list(step.wanted),
        "differentiated": list(step.differentiated),
        "after": [list(pair) for pair in step.after.items()],
        "zero": list(step.zero),
        "sums_later": sums_later,
    }


def backward_of(scan: Scan) -> Function:
    """The backward of a scan whose options have a gradient, as :func:`reverse_scan` builds it."""
    told = scan.gradient
    params = tuple(BackwardParameter(*each) for each in told["params"])
    after = {carry: y for carry, y in told["after"]}
    step = BackwardStep(parsed(told["step"]), params, tuple(told["wanted"]), tuple(told["differentiated"]), after)
    function = reverse_scan(dataclasses.replace(scan, gradient=None), step, told["sums_later"])
    if function is None:
        raise ValueError(_UNWRITTEN)
    return hoist(function)


def partials(call: Call, y: Var, g: Var, emit: Callable[[Expr], Var]) -> list[Expr | None]:
    """The gradients of the tensors of a scan's call, from its results ``y`` and their gradients ``g``."""
    scan, tensors = scan_of(call)
    told = scan.gradient
    zeros = {place: emit(op.zeros(tensors[place].ty.shape, dtype(tensors[place]))) for place in told["zero"]}
    if not told["wanted"]:
        return [zeros.get(place) for place in range(len(tensors))]
    function = backward_of(scan)
    made = [emit(TupleGetItem(y, place)) for place in range(len(y.ty.fields))]
    grads = [emit(TupleGetItem(g, place)) for place in told["differentiated"]]
    known: dict[Var, Expr] = dict(zip(function.params, (*tensors, *made, *grads), strict=True))
    for var, value in bindings(function):
        known[var] = emit(substitute(value, known))
    found = dict(zip(told["wanted"], (known[value] for value in results(function)), strict=True))
    found |= zeros
    return [found.get(place) for place in range(len(tensors))]


_UNWRITTEN = "a literal in the body of a loop cannot be written down"
