"""Loop-invariant code motion: a function with scans -> the same, with values that depend on no carry computed outside.

Values that depend on constants alone are computed once. Values that depend on xs are computed for all steps at once
where that saves a matrix product per step; a bias added to that product stays in the steps, where it costs no pass
over memory. Safe: the same values; only a product of all steps' rows may be rounded differently than each step's.

Batching: an operator of one step -> the same operator on tensors with the steps in front.
Matrix products, and the point-wise operators and layer norms around them: one large product for many small ones.

Transposed constants: transposed matrices that every step of a scan reads -> the matrices, transposed in the body.
For products that read a matrix in either order without a copy: no transposed copy is made before the loop. This undoes
the transposes that hoisting moved out of the steps, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from tvm.relax import op

from autodiff.body import Binding, Body, NameSupply, on_functions
from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Function,
    TensorType,
    TupleGetItem,
    Var,
    bindings,
    build_function,
    dtype,
    op_name,
    operands,
    permutation,
    results,
    shape,
    substitute,
    with_operands,
    with_outputs,
)
from autodiff.ops import RESHAPES, having
from autodiff.scan.operator import Scan, body_text, is_scan, scan_call, scan_of

Emit = Callable[[Expr, str], Var]
"""Binds a value under a name."""

Arguments = Mapping[int, Expr]
"""Arguments by their index in a call."""

_ELEMENTWISE = having("elementwise")


def is_product(value: Expr) -> bool:
    """Whether hoisting a call alone pays: a matrix product."""
    return op_name(value) == "relax.matmul"


def batches(value: Expr, xs: Collection[int]) -> bool:
    """Whether one call can replace a step's calls; the arguments at the indices ``xs`` are stacked over the steps."""
    name = op_name(value)
    if name == "relax.matmul":
        left, right = (len(shape(arg)) for arg in value.args[:])
        return set(xs) == {0} and left >= 2 and right == 2
    if name in RESHAPES or name == "relax.nn.layer_norm":
        return set(xs) == {0}
    return name in _ELEMENTWISE


def batched(value: Expr, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    """Batching: a step's call -> one call for all steps; ``xs``, by argument index, and the result are stacked."""
    return _RULES.get(op_name(value), _elementwise)(value, steps, constants, xs, emit)


def _elementwise(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    rank = len(shape(call))
    args = []
    for place, arg in enumerate(call.args[:]):
        value = xs.get(place, constants.get(place, arg))
        if place in xs and len(own := shape(value)[1:]) < rank:
            value = emit(op.reshape(value, (steps, *[1] * (rank - len(own)), *own)), "steps")
        args.append(value)
    return Call(call.op, args, call.attrs, call.ty_args)


def _matmul(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    *outer, inner = shape(call.args[0])
    flat = emit(op.reshape(xs[0], (steps * math.prod(outer), inner)), "steps")
    made = emit(Call(call.op, [flat, constants.get(1, call.args[1])], call.attrs, call.ty_args), "products")
    return op.reshape(made, (steps, *shape(call)))


def _reshape(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    return op.reshape(xs[0], (steps, *shape(call)))


def _layer_norm(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    rank, attrs = len(shape(call)), call.attrs
    weights = [constants.get(place, call.args[place]) for place in (1, 2)]
    axes = [int(axis) % rank + 1 for axis in attrs.axes]
    return op.nn.layer_norm(xs[0], *weights, axes, float(attrs.epsilon), bool(attrs.center), bool(attrs.scale))


_RULES = {
    "relax.matmul": _matmul,
    **dict.fromkeys(RESHAPES, _reshape),
    "relax.nn.layer_norm": _layer_norm,
}


_CHEAP = frozenset({"relax.add", "relax.subtract", "relax.multiply"})
"""Operators that are free in a step, beside the rest of its arithmetic."""


@on_functions
def hoist(body: Body) -> None:
    """Moves the values that depend on no carry out of all scans."""
    for binding in list(body.bindings):
        if is_scan(binding.value):
            _Hoist(body, binding).run()


class _Hoist:
    """Hoisting out of one scan."""

    def __init__(self, body: Body, binding: Binding):
        self.body, self.binding = body, binding
        self.scan, self.tensors = scan_of(binding.value)
        function = self.scan.function
        self.params, self.results = list(function.params), results(function)
        self.values: dict[Var, Expr] = dict(bindings(function))
        last = self.scan.carries + self.scan.xs
        self.constants: dict[Var, Expr] = dict(zip(self.params[last:], self.tensors[last:], strict=True))
        xs = self.params[self.scan.carries : last], self.tensors[self.scan.carries : last]
        self.xs: dict[Var, Expr] = dict(zip(*xs, strict=True))
        self.names = NameSupply(body.names())
        self.new: list[Binding] = []

    def emit(self, value: Expr, name: str) -> Var:
        """Emits a binding before the scan."""
        value = self.body.normalize(value)
        var = DataflowVar(self.names.fresh(name), value.ty)
        self.new.append(self.body.define(var, value))
        return var

    def run(self) -> None:
        fixed, batch = self._split()
        if not fixed and not batch:
            return
        for var, value in self.values.items():
            if var in fixed:
                read = iter([self.constants[each] for each in operands(value)])
                self.constants[var] = self.emit(with_operands(value, read), var.name)
            elif var in batch:
                self.xs[var] = self._for_all_steps(var, value)
        gone = fixed | batch
        made = self._body(gone)
        if made is None:
            for binding in reversed(self.new):
                self.body.undefine(binding)
            return
        self._replace(*made)

    def _split(self) -> tuple[set[Var], set[Var]]:
        """The variables that are the same in all steps, and the variables computed for all steps at once."""
        fixed: set[Var] = set()
        possible: set[Var] = set()
        pays: set[Var] = set()
        for var, value in self.values.items():
            read = list(operands(value))
            kinds = [self._kind(each, fixed, possible) for each in read]
            if all(kind == "constant" for kind in kinds):
                fixed.add(var)
            elif "carry" not in kinds and batches(value, _places(value, kinds)):
                possible.add(var)
                if is_product(value) or any(each in pays for each in read):
                    pays.add(var)
        for var in reversed(self.values):
            if var in pays:
                pays |= possible.intersection(operands(self.values[var]))
        return fixed, pays - self._last_in_steps(pays)

    def _last_in_steps(self, batch: set[Var]) -> set[Var]:
        """The hoistable variables that stay in the steps: cheap arithmetic of constants and one value of the same
        shape, read by the steps alone."""
        read = {each for var in batch for each in operands(self.values[var])} | {*self.results}
        found: set[Var] = set()
        for var in batch - read:
            value = self.values[var]
            sources = [each for each in operands(value) if each in batch or each in self.xs]
            if op_name(value) in _CHEAP and len(sources) == 1 and shape(sources[0]) == shape(var):
                found.add(var)
        return found

    def _kind(self, var: Var, fixed: set[Var], possible: set[Var]) -> str:
        if var in self.constants or var in fixed:
            return "constant"
        return "x" if var in self.xs or var in possible else "carry"

    def _for_all_steps(self, var: Var, value: Call) -> Var:
        constants: dict[int, Expr] = {}
        xs: dict[int, Expr] = {}
        for place, arg in enumerate(value.args[:]):
            if isinstance(arg, Var):
                (constants if arg in self.constants else xs)[place] = self.constants.get(arg, self.xs.get(arg))
        return self.emit(batched(value, self.scan.length, constants, xs, self.emit), f"{var.name}_steps")

    def _body(self, gone: set[Var]) -> tuple[Scan, list[Expr], dict[int, Expr | int]] | None:
        """The remaining scan, its tensors, and the new form of each old result: an index, or a hoisted tensor; ``None``
        if TVM's JSON cannot hold its body."""
        scan = self.scan
        left = [(var, value) for var, value in self.values.items() if var not in gone]
        became: dict[int, Expr | int] = {place: place for place in range(scan.carries)}
        kept = list(self.results[: scan.carries])
        for place, value in enumerate(self.results[scan.carries :], start=scan.carries):
            if value in self.xs:
                became[place] = self.xs[value]
            elif value in self.constants:
                became[place] = self._repeated(self.constants[value])
            else:
                became[place] = len(kept)
                kept.append(value)
        read = {each for _, value in left for each in operands(value)} | {
            each for each in kept if isinstance(each, Var)
        }
        carries = self.params[: scan.carries]
        inner = {var: _param(var) if var in gone else var for var in (*self.xs, *self.constants) if var in read}
        xs = [var for var in self.xs if var in inner]
        constants = [var for var in self.constants if var in inner]
        left = [(var, with_operands(value, _renamed(value, inner))) for var, value in left]
        kept = [inner.get(each, each) if isinstance(each, Var) else each for each in kept]
        params = [*carries, *(inner[var] for var in (*xs, *constants))]
        text = body_text(build_function(params, left, kept))
        if text is None:
            return None
        tensors = [
            *self.tensors[: scan.carries],
            *(self.xs[var] for var in xs),
            *(self.constants[v] for v in constants),
        ]
        return replace(scan, body=text, xs=len(xs)), tensors, became

    def _repeated(self, value: Expr) -> Var:
        """A value repeated for each step."""
        return self.emit(op.broadcast_to(value, (self.scan.length, *shape(value))), "repeated")

    def _replace(self, scan: Scan, tensors: list[Expr], became: dict[int, Expr | int]) -> None:
        body, old = self.body, self.binding
        called = self.emit(scan_call(scan, tensors), "scan")
        place = body.bindings.index(old)
        replaced: dict[Binding, Expr] = {}
        for user in list(old.users):
            new = became[user.value.index]
            if isinstance(new, int):
                body.assign(user, TupleGetItem(called, new))
            else:
                replaced[user] = new
        for user in list(dict.fromkeys(user for binding in replaced for user in binding.users)):
            body.substitute(user, replaced)
        remaining = [*body.bindings[:place], *self.new, *body.bindings[place + 1 :]]
        body.finish([binding for binding in remaining if binding not in replaced], replaced)
        body.undefine(old)


def _places(value: Call, kinds: list[str]) -> set[int]:
    """Indices of the arguments that differ from step to step; all arguments, where one is a tuple."""
    args = [place for place, arg in enumerate(value.args[:]) if isinstance(arg, Var)] if isinstance(value, Call) else []
    if len(args) != len(kinds):
        return set(range(-1, len(kinds)))
    return {place for place, kind in zip(args, kinds, strict=True) if kind == "x"}


def _param(var: Var) -> Var:
    return Var(var.name, TensorType(shape(var), dtype(var)))


def _renamed(value: Expr, inner: dict[Var, Var]) -> Iterator[Expr]:
    return (inner.get(each, each) for each in operands(value))


def turned_inside(func: Function) -> Function:
    """Transpose sinking into scans: transposes of a scan's constant matrices move into its body.

    The same object if there are none. Only for differentiated functions: the new scans have no gradients.
    """
    values = dict(bindings(func))
    made = {var: _turned(value, values) if is_scan(value) else value for var, value in values.items()}
    if all(made[var] is value for var, value in values.items()):
        return func
    return with_outputs(func, list(made.items()), results(func))


def _turned(call: Call, values: Mapping[Var, Expr]) -> Call:
    scan, tensors = scan_of(call)
    function, first = scan.function, scan.carries + scan.xs
    sources = {place: _matrix(tensor, values) for place, tensor in enumerate(tensors) if place >= first}
    sources = {place: source for place, source in sources.items() if source is not None}
    params, body, inner = list(function.params), [], {}
    for place, source in sources.items():
        old = params[place]
        params[place] = Var(old.name, TensorType(shape(source), dtype(source)))
        inner[old] = DataflowVar(f"{old.name}_turned", TensorType(shape(old), dtype(old)))
        body.append((inner[old], op.permute_dims(params[place])))
    body += [(var, substitute(value, inner)) for var, value in bindings(function)]
    outputs = [inner.get(each, each) if isinstance(each, Var) else each for each in results(function)]
    text = body_text(build_function(params, body, outputs)) if sources else None
    if text is None:
        return call
    given = [sources.get(place, tensor) for place, tensor in enumerate(tensors)]
    return scan_call(replace(scan, body=text, gradient=None), given)


def _matrix(tensor: Expr, values: Mapping[Var, Expr]) -> Expr | None:
    """The matrix whose transpose a tensor is, else ``None``."""
    value = values.get(tensor) if isinstance(tensor, Var) else None
    is_transposed = op_name(value) == "relax.permute_dims" and permutation(value) == [1, 0]
    return value.args[0] if is_transposed else None
