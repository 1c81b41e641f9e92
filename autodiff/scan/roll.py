"""Rolling up: a function in which the steps of a loop stand one after the other -> the same with a scan.

A run of bindings that is proven to be a loop (:mod:`autodiff.scan.prove`) becomes one call of its body; what its steps
read and make becomes tensors with the steps in front. Exact: the scan runs the same operators on the same values. What
cannot be proven stays as it is.

Marked loops: a function in which one step of a loop stands between marks -> the same with scans.

    library.loop_first(first, loop, place, length, reverse)    a carry as the step sees it
    library.loop_part(whole, loop, place)                      the step's part of a tensor with the steps in front
    library.loop_last(next, loop, place)                       the carry after the last step
    library.loop_steps(y, loop, place, length)                 a result of all steps, the steps in front

What depends on the first two and is read by the last two, of one ``loop``, is its body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm.relax import op

from autodiff.body import Binding, Body, NameSupply, Scope, on_functions
from autodiff.extents import Dim, from_tir
from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Function,
    TensorType,
    Tuple,
    TupleGetItem,
    Var,
    bindings,
    build_function,
    dtype,
    library_name,
    results,
    shape,
    substitute,
    used_vars,
    with_outputs,
)
from autodiff.scan.binding_rows import BindingRows, Gathered, unviewed, with_operands
from autodiff.scan.operator import Scan, body_text, scan_call
from autodiff.scan.prove import Carry, Constant, Local, ProvenLoop, StepParts, find_loops

__all__ = ["from_marks", "roll_up"]


@on_functions
def roll_up(body: Body) -> None:
    """Rolls loops up, one after the other: a later one reads what the scan of an earlier one makes.

    Safe: see the module's docstring. All types are to be static.
    """
    while any(_Roller(body, loop).roll() for loop in find_loops(BindingRows(body)) if _is_of_bindings(loop)):
        body.prune()


def _is_of_bindings(loop: ProvenLoop) -> bool:
    """Whether a loop reads no parts of what another one makes, which is no scan yet."""
    return not any(isinstance(parts.of, tuple) for parts in loop.parts)


class _Roller:
    """One loop on its way to a scan."""

    def __init__(self, body: Body, loop: ProvenLoop):
        self.body, self.loop = body, loop
        self.run = body.bindings[loop.start : loop.stop]
        self.reverse = bool(loop.parts) and all(each.falls for each in loop.parts)
        self.names = NameSupply(body.names())
        self.new: list[Binding] = []
        self.stacks: dict[StepParts | Gathered, Var] = {}

    def emit(self, value: Expr, name: str) -> Var:
        """A binding before, or right after, the scan."""
        value = self.body.normalize(value)
        var = DataflowVar(self.names.fresh(name), value.ty)
        self.new.append(self.body.define(var, value))
        return var

    def template(self, index: int) -> Expr:
        """A binding of a step, as it is in the second one."""
        return self.run[self.loop.period + index].value

    def roll(self) -> bool:
        """Replaces the run by the scan."""
        made = self._body()
        if made is None:
            for binding in reversed(self.new):
                self.body.undefine(binding)
            return False
        self._replace(*made)
        return True

    def of_outer(self, role: Constant | StepParts | Gathered) -> Expr:
        """A constant, or the parts of all steps with the steps in front, outside of the loop."""
        if isinstance(role, Constant):
            return role.value.var
        if role not in self.stacks:
            self.stacks[role] = self._stacked(role)
        return self.stacks[role]

    def _stacked(self, role: StepParts | Gathered) -> Var:
        if isinstance(role, Gathered):
            values = role.values[::-1] if self.reverse else role.values
            return self.emit(op.stack(Tuple([each.var for each in values]), 0), "masks")
        whole = self._section(role)
        return self.emit(op.flip(whole, 0), f"{role.of.name}_flipped") if role.falls and not self.reverse else whole

    def _section(self, parts: StepParts) -> Var:
        """The parts of all steps with the steps in front, in the order in which they lie in the binding."""
        name, value, count, extent = parts.of.name, parts.of.var, self.loop.steps, parts.extent
        extents, axis = shape(value), parts.dim
        begin = min(parts.first, parts.first + parts.step * (count - 1))
        end = begin + count * extent
        if (begin, end) != (0, extents[axis]):
            value = self.emit(op.strided_slice(value, [axis], [begin], [end], [1]), f"{name}_section")
        if axis:
            value = self._reshaped(value, (*extents[:axis], count, extent, *extents[axis + 1 :]), f"{name}_steps")
            order = [axis, *(each for each in range(len(extents) + 1) if each != axis)]
            value = self.emit(op.permute_dims(value, order), f"{name}_steps")
        return self._reshaped(value, (count, *parts.form), f"{name}_steps")

    def _reshaped(self, value: Var, extents: tuple[int, ...], name: str) -> Var:
        return value if shape(value) == extents else self.emit(op.reshape(value, extents), name)

    def _is_inside(self, index: int) -> bool:
        """Whether the loop computes a binding of a step."""
        return index not in self.loop.taken

    def _leaving(self) -> list[int]:
        """Bindings of a step whose results are read after the loop."""
        inside, returned = set(self.run), self.body.returned()
        found = [
            place % self.loop.period
            for place, binding in enumerate(self.run)
            if binding in returned or any(user not in inside for user in binding.users)
        ]
        return sorted(set(found))

    def _body(self) -> tuple[Var, list[Carry], list[int]] | None:
        """The scan's result, its carries and its ys; ``None`` if the body cannot be written down."""
        loop = self.loop
        carries = loop.carries
        carried = {carry: Var(f"{self.run[carry.row].name}_before", carry.first.var.ty) for carry in carries}
        xs: dict[Expr, Var] = {}
        constants: dict[Expr, Var] = {}
        local: dict[int, Var] = {}

        def part(whole: Expr, name: str) -> Var:
            if whole not in xs:
                xs[whole] = Var(name, _part_type(whole))
            return xs[whole]

        def inner(role: Any) -> Expr:
            if isinstance(role, Carry):
                return carried[role]
            if isinstance(role, Local) and role.row in local:
                return local[role.row]
            outside = self.of_outer(loop.taken[role.row] if isinstance(role, Local) else role)
            if isinstance(role, Constant):
                return constants.setdefault(outside, Var(outside.name, outside.ty))
            return part(outside, outside.name)

        bound = []
        for index in filter(self._is_inside, range(loop.period)):
            old = self.run[index]
            operands = iter([inner(role) for role in loop.roles[index]])
            local[index] = DataflowVar(old.name, old.var.ty)
            bound.append((local[index], with_operands(self.template(index), operands)))
        ys = [index for index in self._leaving() if self._is_inside(index) and not self._is_last(index, carries)]
        made = [inner(Local(carry.row)) if carry.of is None else carried[carry.of] for carry in carries] + [
            local[index] for index in ys
        ]
        params = [*carried.values(), *xs.values(), *constants.values()]
        text = body_text(build_function(params, bound, made))
        if text is None:
            return None
        scan = Scan(text, len(carries), len(xs), loop.steps, self.reverse)
        tensors = [*(carry.first.var for carry in carries), *xs, *constants]
        return self.emit(scan_call(scan, tensors), "scan"), carries, ys

    def _is_last(self, index: int, carries: list[Carry]) -> bool:
        """Whether after the loop only the last step's result of a binding is read, and that is a carry."""
        if not any(carry.row == index and carry.of is None for carry in carries):
            return False
        inside, returned = set(self.run), self.body.returned()
        earlier = self.run[index :: self.loop.period][:-1]
        return not any(each in returned or any(user not in inside for user in each.users) for each in earlier)

    def _replace(self, scan: Var, carries: list[Carry], ys: list[int]) -> None:
        body, loop = self.body, self.loop
        last = {
            carry.row: self.emit(TupleGetItem(scan, place), self.run[carry.row].name)
            for place, carry in enumerate(carries)
            if carry.of is None
        }
        whole: dict[int, Expr] = {}
        for place, index in enumerate(ys):
            item = TupleGetItem(scan, len(carries) + place)
            whole[index] = self.emit(item, f"{self.run[index].name}_steps")
        after = body.bindings[loop.start + len(self.run) :]
        for binding in after:
            self._join(binding, whole)
        inside, returned = set(self.run), body.returned()
        replaced: dict[Binding, Expr] = {}
        for place, binding in enumerate(self.run):
            step, index = divmod(place, loop.period)
            if index in loop.taken or not (binding in returned or any(user not in inside for user in binding.users)):
                continue
            if step == loop.steps - 1 and index in last:
                replaced[binding] = last[index]
            else:
                replaced[binding] = self._part(whole[index], self._position(step), binding)
        kept = [binding for place, binding in enumerate(self.run) if place % loop.period in loop.taken]
        for binding in after:
            body.substitute(binding, replaced)
        gone = [binding for binding in self.run if binding not in replaced]
        body.finish([*body.bindings[: loop.start], *kept, *self.new, *after], replaced)
        for binding in reversed(gone):
            if binding not in kept:
                body.undefine(binding)

    def _position(self, step: int) -> int:
        return self.loop.steps - 1 - step if self.reverse else step

    def _part(self, whole: Expr, position: int, binding: Binding) -> Var:
        """One step's part of a tensor."""
        value = self.emit(op.strided_slice(whole, [0], [position], [position + 1], [1]), f"{binding.name}_part")
        return self.emit(op.reshape(value, shape(binding.var)), binding.name)

    def _join(self, binding: Binding, whole: dict[int, Expr]) -> None:
        """A concatenation of the results of adjacent steps reads them as one tensor."""
        if binding.op != "relax.concat" or not isinstance(binding.value.args[0], Tuple):
            return
        fields = [self.body.binding(field) for field in binding.value.args[0].fields]
        if None in fields or len({shape(field.var) for field in fields}) > 1:
            return
        place = {each: divmod(index, self.loop.period) for index, each in enumerate(self.run)}
        found = [place.get(unviewed(field)) for field in fields]
        if len(found) < 2 or None in found or len({index for _, index in found}) > 1 or found[0][1] not in whole:
            return
        positions = [self._position(step) for step, _ in found]
        first, step = positions[0], positions[1] - positions[0]
        if abs(step) != 1 or positions != [first + step * index for index in range(len(positions))]:
            return
        value, begin = whole[found[0][1]], min(positions)
        if len(positions) < self.loop.steps:
            value = self.emit(op.strided_slice(value, [0], [begin], [begin + len(positions)], [1]), "part")
        if step < 0:
            value = self.emit(op.flip(value, 0), "flipped")
        part = shape(fields[0].var)
        axis = binding.value.attrs.axis
        axis = 0 if axis is None else int(axis) % len(part)
        value = self._reshaped(value, (len(positions), *part), "joined")
        if axis:
            order = [*range(1, axis + 1), 0, *range(axis + 1, len(part) + 1)]
            value = self.emit(op.permute_dims(value, order), "joined")
        self.body.assign(binding, op.reshape(value, shape(binding.var)))


def _part_type(whole: Expr) -> TensorType:
    return TensorType(shape(whole)[1:], dtype(whole))


_GIVEN, _MADE = ("library.loop_first", "library.loop_part"), ("library.loop_last", "library.loop_steps")


@dataclass
class _Marked:
    """The marks of a loop: of each kind by place, the variable and what it is given."""

    first: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    part: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    last: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    steps: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    length: Dim = 0
    reverse: bool = False


def from_marks(func: Function) -> Function:
    """The function with a scan for each marked loop; the same object if there are none.

    ``ValueError`` if marks are missing, or if what is between them is a result or cannot be written down.
    """
    marked = _marked(func)
    if not marked:
        return func
    scope = Scope(var.name for var in (*func.params, *(var for var, _ in bindings(func))))
    depending = {number: _depending(func, loop) for number, loop in marked.items()}
    of_steps = set().union(*depending.values())
    values = dict(bindings(func))
    replaced: dict[Var, Expr] = {}
    done: set[int] = set()
    for var, value in bindings(func):
        name = library_name(value)
        if var in of_steps:
            continue
        if name in _MADE:
            number = _number(value, 1)
            if number not in done:
                done.add(number)
                body = _body(marked[number], [(each, values[each]) for each in values if each in depending[number]])
                replaced.update(_scanned(marked[number], body, replaced, scope))
            continue
        scope.bind(var, substitute(value, replaced))
    if any(output in of_steps for output in results(func)):
        raise ValueError("a step of a loop is a result")
    outputs = [replaced.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, scope.body, outputs)


def _marked(func: Function) -> dict[int, _Marked]:
    found: dict[int, _Marked] = {}
    for var, value in bindings(func):
        name = library_name(value)
        if name not in _GIVEN and name not in _MADE:
            continue
        loop, kind = found.setdefault(_number(value, 1), _Marked()), name.removeprefix("library.loop_")
        getattr(loop, kind)[_number(value, 2)] = var, value.args[1]
        if kind == "first":
            loop.length, loop.reverse = from_tir(value.args[4]), bool(_number(value, 4))
    return found


def _number(call: Call, place: int) -> int:
    """An argument of a library call that is a number."""
    return int(call.args[1 + place].value)


def _depending(func: Function, loop: _Marked) -> dict[Var, None]:
    """What depends on what a step is given, up to the marks of what it makes; in order."""
    found = dict.fromkeys(var for var, _ in (*loop.first.values(), *loop.part.values()))
    for var, value in bindings(func):
        if library_name(value) not in _MADE and any(read in found for read in used_vars(value)):
            found[var] = None
    return found


def _body(loop: _Marked, depending: list[tuple[Var, Expr]]) -> list[tuple[Var, Expr]]:
    """Of that, what the results of a step need."""
    needed = {value for _, value in (*loop.last.values(), *loop.steps.values())}
    body = []
    for var, value in reversed(depending):
        if var in needed and library_name(value) not in _GIVEN:
            needed.update(used_vars(value))
            body.append((var, value))
    return body[::-1]


def _scanned(loop: _Marked, body: list[tuple[Var, Expr]], replaced: dict[Var, Expr], scope: Scope) -> dict[Var, Expr]:
    """What the marks after the step become."""
    places = [sorted(marks) for marks in (loop.first, loop.last, loop.part, loop.steps)]
    if loop.length < 1 or places[0] != places[1] or any(each != list(range(len(each))) for each in places):
        raise ValueError("marks of a loop are missing")
    first, part = ([marks[place] for place in sorted(marks)] for marks in (loop.first, loop.part))
    made = [marks[place] for marks in (loop.last, loop.steps) for place in sorted(marks)]
    own = {var for var, _ in (*body, *first, *part)}
    read = [each for _, value in body for each in used_vars(value)] + [value for _, value in made]
    constants = [each for each in dict.fromkeys(read) if isinstance(each, Var) and each not in own]
    params = {var: Var(var.name, var.ty) for var in (*(var for var, _ in (*first, *part)), *constants)}
    pairs = [(var, substitute(value, params)) for var, value in body]
    outputs = [params.get(value, value) if isinstance(value, Var) else value for _, value in made]
    text = body_text(build_function(list(params.values()), pairs, outputs))
    if text is None:
        raise ValueError("a literal in the body of a loop cannot be written down")
    scan = Scan(text, len(first), len(part), loop.length, loop.reverse)
    given = [*(value for _, value in (*first, *part)), *constants]
    given = [replaced.get(value, value) if isinstance(value, Var) else value for value in given]
    call = scope.emit(scan_call(scan, given), "scan")
    return {var: scope.emit(TupleGetItem(call, place), var.name) for place, (var, _) in enumerate(made)}
