"""Rolling up: a function with the unrolled steps of a loop -> the same function with a scan.

A run of bindings that is proven to be a loop (:mod:`autodiff.scan.prove`) becomes one call of its body; the inputs and
results of its steps become tensors with the steps in front. Exact: the scan runs the same operators on the same values.

Bindings as rows: two bindings are of one kind if they call the same operator with the same attributes and literals, on
operands of the same types. The begin of a slice, and the item taken of a split, may differ.

Marked loops: a function with one step of a loop between marks -> the same function with scans.

    library.loop_first(first, loop, place, length, reverse)    a carry as the step sees it
    library.loop_part(whole, loop, place)                      the step's part of a tensor with the steps in front
    library.loop_last(next, loop, place)                       the carry after the last step
    library.loop_steps(y, loop, place, length)                 a result of all steps, the steps in front

The values that depend on the first two marks of a ``loop``, and that the last two read, are its body.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tvm.relax import op
from tvm_ffi import StructuralKey

from autodiff.body import Binding, Body, NameSupply, Scope, on_functions
from autodiff.extents import Dim, from_tir
from autodiff.ir import (
    VARS,
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
    op_name,
    operands,
    results,
    shape,
    substitute,
    used_vars,
    with_operands,
    with_outputs,
)
from autodiff.ops import RESHAPES
from autodiff.scan.operator import Scan, body_text, scan_call
from autodiff.scan.prove import Constant, Local, Part, Producer, ProvenLoop, Rows, StepParts, find_loops
from autodiff.scan.replay import LoopReplay, Movements, ReplayedLoop

__all__ = ["from_marks", "roll_up"]


@on_functions
def roll_up(body: Body) -> None:
    """Rolls up loops until there are none left, in functions of static types; a later loop may read an earlier scan."""
    while (loops := find_loops(rows := _BindingRows(body))) and _Roller(body, rows, loops).roll():
        body.prune()


_SLICE, _MASK = "relax.strided_slice", "mask_"


class _Gathered(NamedTuple):
    """Dropout masks, one parameter per step. Only masks are stacked: copies of weights would cost more than loops."""

    values: tuple[Binding, ...]


class _BindingRows(Rows):
    """The bindings of a body; the form of a part is its shape."""

    def __init__(self, body: Body):
        self._body, self.needed = body, body.returned()
        self.made = dict.fromkeys(body.parameters(), Producer(-1, 0))
        self.made.update((binding, Producer(row, 0)) for row, binding in enumerate(body.bindings))
        self.reads = [binding.reads for binding in body.bindings]
        self.taken = [self._taken(binding) for binding in body.bindings]
        self.kinds = list(map(self._kind, body.bindings, self.taken))

    def columns(self, loop: ProvenLoop, index: int) -> list[Sequence[Binding]] | None:
        """The operands of a binding, in all steps; ``None`` for a result with extent 0, which a reshape cannot hold."""
        group = [self._body.bindings[row] for row in loop.group(index)]
        if isinstance(group[0].var.ty, TensorType) and 0 in shape(group[0].var):
            return None
        read = [[self._body.binding(operand) for operand in operands(each.value)] for each in group]
        return None if any(None in each for each in read) else list(zip(*read, strict=True))

    def part(self, value: Binding) -> Part | None:
        """The part that a value is, perhaps reshaped."""
        found = self._taken(_unviewed(value))
        return None if found is None else found._replace(form=shape(value.var))

    def is_readable(self, parts: StepParts) -> bool:
        """Whether the parts are adjacent."""
        return abs(parts.step) == parts.extent

    def gathered(self, values: Sequence[Binding]) -> _Gathered | None:
        params = [each for each in values if each.value is None and each.name.startswith(_MASK)]
        are_masks = len(params) == len(values) and all(dtype(each.var) == "bool" for each in params)
        return _Gathered(tuple(values)) if are_masks else None

    def _taken(self, binding: Binding) -> Part | None:
        value = binding.value
        if type(value) is TupleGetItem:
            split = self._body.binding(value.tuple_value)
            if split is None or split.op != "relax.split" or not split.reads:  # of a constant
                return None
            base, axis, before = split.reads[0], int(split.value.attrs.axis), split.value.ty.fields[: value.index]
            axis %= len(shape(base.var))
            begin = sum(int(field.shape.values[axis]) for field in before)
        elif value is not None and binding.op == _SLICE:
            axes, begins, _, steps = ([int(number) for number in arg.fields] for arg in value.args[1:5])
            if len(axes) != 1 or steps != [1] or not binding.reads:
                return None
            base, axis = binding.reads[0], axes[0] % len(shape(binding.var))
            begin = max(begins[0] + (shape(base.var)[axis] if begins[0] < 0 else 0), 0)
        else:
            return None
        return Part(base, axis, begin, shape(binding.var)[axis], shape(binding.var))

    def _kind(self, binding: Binding, part: Part | None) -> Hashable:
        value = binding.value
        if part is None:
            return _key(value)
        if type(value) is TupleGetItem:
            return "part", StructuralKey(value.ty), _key(value.tuple_value)
        return "part", StructuralKey(value.ty), *map(_key, (*value.args[:2], *value.args[4:]))


def _key(value: Expr) -> Hashable:
    kind = type(value)
    if kind is Call:
        attrs = None if value.attrs is None else StructuralKey(value.attrs)
        return (op_name(value) or StructuralKey(value.op), attrs, StructuralKey(value.ty), *map(_key, value.args[:]))
    if kind in VARS:
        return "var", StructuralKey(value.ty)
    if kind is Tuple:
        return ("tuple", *map(_key, value.fields[:]))
    if kind is TupleGetItem:
        return "item", value.index, StructuralKey(value.ty), _key(value.tuple_value)
    return StructuralKey(value)


def _unviewed(part: Binding) -> Binding:
    """The binding under a chain of reshapes."""
    while part.value is not None and part.op in RESHAPES:
        (part,) = part.reads
    return part


class _NotWrittenError(Exception):
    """TVM's JSON cannot hold a literal of a body."""


class _MadeBindings(Movements):
    """Bindings made or kept, in order."""

    def __init__(self, body: Body):
        self.body, self.names = body, NameSupply(body.names())
        self.all: list[Binding] = []
        self.new: list[Binding] = []

    def emit(self, value: Expr, name: str) -> Var:
        """A new binding."""
        value = self.body.normalize(value)
        var = DataflowVar(self.names.fresh(name), value.ty)
        self.new.append(self.body.define(var, value))
        self.all.append(self.new[-1])
        return var

    def shape(self, value: Var) -> tuple[int, ...]:
        return shape(value)

    def slice(self, value: Var, dim: int, begin: int, end: int, step: int = 1) -> Var:
        return self.emit(op.strided_slice(value, [dim], [begin], [end], [step]), f"{value.name}_section")

    def permute(self, value: Var, axes: list[int]) -> Var:
        return self.emit(op.permute_dims(value, axes), value.name)

    def flip(self, value: Var) -> Var:
        return self.emit(op.flip(value, 0), f"{value.name}_flipped")

    def windows(self, value: Var, parts: StepParts, steps: int) -> Var:
        """All steps' parts as one tensor; the parts are adjacent."""
        extents, dim = shape(value), parts.dim
        if dim:
            value = self.reshaped(value, (*extents[:dim], steps, parts.extent, *extents[dim + 1 :]))
            value = self.to_front(value, dim)
        return self.reshaped(value, (steps, *parts.form))

    def reshaped(self, value: Var, extents: tuple[int, ...]) -> Var:
        """The value in another shape."""
        return value if shape(value) == extents else self.emit(op.reshape(value, extents), f"{value.name}_steps")


class _Roller(LoopReplay):
    """Replaces proven loops by scans."""

    def __init__(self, body: Body, rows: _BindingRows, loops: list[ProvenLoop]):
        self.body, self.out, self.emit = body, (out := _MadeBindings(body)), out.emit
        self.changed: dict[Binding, Expr] = {}
        super().__init__(rows, loops, out)

    def roll(self) -> bool:
        """Replaces all steps by scans; ``False`` if TVM's JSON cannot hold a body."""
        body = self.body
        try:
            self.run()
        except _NotWrittenError:
            for binding in reversed(self.out.new):
                body.undefine(binding)
            return False
        steps = {body.bindings[row]: None for row in self.loop_of}
        replaced = {each: self.value(each) for each in self.rows.needed if each in steps}
        for binding, value in self.changed.items():
            body.assign(binding, value)
        kept = {*self.out.all}
        gone = [each for each in body.bindings if each in steps and each not in kept and each not in replaced]
        body.finish(self.out.all, {each: value for each, value in replaced.items() if each not in kept})
        for binding in reversed(gone):
            body.undefine(binding)
        return True

    def outside(self, value: Binding) -> Expr:
        return value.var

    def of_step(self, whole: Var, position: int, value: Binding) -> Var:
        part = self.emit(op.strided_slice(whole, [0], [position], [position + 1], [1]), f"{value.name}_part")
        return self.emit(op.reshape(part, shape(value.var)), value.name)

    def row(self, row: int) -> None:
        binding = self.body.bindings[row]
        value = self._joined(binding)
        if value is None:
            new = {read.var: self.value(read) for read in binding.reads}
            new = {var: value for var, value in new.items() if value is not var}
            value = substitute(binding.value, new) if new else None
        if value is not None:
            self.changed[binding] = value
        self.out.all.append(binding)

    def _joined(self, binding: Binding) -> Expr | None:
        """A concatenation of adjacent steps' results, read as one tensor; ``None`` for other bindings."""
        if binding.op != "relax.concat" or not isinstance(binding.value.args[0], Tuple):
            return None
        fields = [self.body.binding(field) for field in binding.value.args[0].fields]
        if None in fields or len({shape(field.var) for field in fields}) > 1:
            return None
        values = [self._leaving(field) for field in fields]
        part, axis = shape(fields[0].var), binding.value.attrs.axis
        if len(fields) < 2 or len(self.adjacent(values)) > 1 or self._is_taken(values[0]):
            return None
        whole = self.out.reshaped(self.of_steps(values), (len(fields), *part))
        return op.reshape(self.out.to_dim(whole, 0 if axis is None else int(axis) % len(part)), shape(binding.var))

    def _leaving(self, value: Binding) -> Binding:
        """The value under the reshapes after a loop: the step's result that leaves it, perhaps a reshape itself."""
        while value.value is not None and value.op in RESHAPES and self.place(value) is None:
            (value,) = value.reads
        return value

    def _is_taken(self, value: Binding) -> bool:
        number, _, producer = self.place(value)
        return producer.row in self.loops[number].taken

    def loop(self, number: int, loop: ProvenLoop, known: ReplayedLoop) -> None:
        run, carries = self.body.bindings[loop.start : loop.stop], loop.carries
        self.out.all += [run[row - loop.start] for index in loop.taken for row in loop.group(index)]
        carried = {carry: Var(f"{run[carry.row].name}_before", carry.first.var.ty) for carry in carries}
        firsts = [self.value(carry.first) for carry in carries]
        whole = {role: self._of_all_steps(role, known) for role in (*loop.parts, *loop.of_kind(_Gathered))}
        xs = {value: Var(value.name, TensorType(shape(value)[1:], dtype(value))) for value in whole.values()}
        outer = {role: self.value(role.value) for role in loop.of_kind(Constant)}
        constants = {value: Var(value.name, value.ty) for value in outer.values()}
        inner: dict[Any, Expr] = {**carried, **{role: xs[value] for role, value in whole.items()}}
        inner.update((role, constants[value]) for role, value in outer.items())
        inner.update((Local(index), inner[parts]) for index, parts in loop.taken.items())
        bound = []
        for index, roles in enumerate(loop.roles):
            if roles is not None:
                old, template = run[index], run[loop.period + index].value
                inner[Local(index)] = var = DataflowVar(old.name, old.var.ty)
                bound.append((var, with_operands(template, iter([inner[role] for role in roles]))))
        ys = sorted(self.leaving(number))
        made = [inner[Local(carry.row)] if carry.of is None else carried[carry.of] for carry in carries]
        made += [inner[Local(*y)] for y in ys]
        params = [*carried.values(), *xs.values(), *constants.values()]
        text = body_text(build_function(params, bound, made))
        if text is None or not all(isinstance(param.ty, TensorType) for param in params):
            raise _NotWrittenError
        scan = Scan(text, len(carries), len(xs), loop.steps, known.reverse)
        called = self.emit(scan_call(scan, [*firsts, *xs, *constants]), "scan")
        for place, carry in enumerate(carries):
            if carry.of is None:
                last = self.emit(TupleGetItem(called, place), run[carry.row].name)
                known.last.setdefault(Producer(carry.row, 0), last)
        for place, y in enumerate(ys, start=len(carries)):
            known.whole[y] = self.emit(TupleGetItem(called, place), f"{run[y.row].name}_steps")

    def _of_all_steps(self, role: StepParts | _Gathered, known: ReplayedLoop) -> Var:
        if isinstance(role, StepParts):
            return self.in_front(role, known)
        values = role.values[::-1] if known.reverse else role.values
        return self.emit(op.stack(Tuple([self.value(each) for each in values]), 0), "masks")


_GIVEN, _MADE = ("library.loop_first", "library.loop_part"), ("library.loop_last", "library.loop_steps")


@dataclass
class _Marked:
    """The marks of one loop: by kind and place, the mark's variable and its operand."""

    first: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    part: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    last: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    steps: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    length: Dim = 0
    reverse: bool = False


def from_marks(func: Function) -> Function:
    """The function with a scan for each marked loop; the same object if there are none.

    ``ValueError`` if marks are missing, a value between them is a result, or TVM's JSON cannot hold a body.
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
    """The integer argument of a library call at an index."""
    return int(call.args[1 + place].value)


def _depending(func: Function, loop: _Marked) -> dict[Var, None]:
    """The variables that depend on a step's inputs, up to the marks of its results; in order."""
    found = dict.fromkeys(var for var, _ in (*loop.first.values(), *loop.part.values()))
    for var, value in bindings(func):
        if library_name(value) not in _MADE and any(read in found for read in used_vars(value)):
            found[var] = None
    return found


def _body(loop: _Marked, depending: list[tuple[Var, Expr]]) -> list[tuple[Var, Expr]]:
    """The bindings among ``depending`` that the results of a step need."""
    needed = {value for _, value in (*loop.last.values(), *loop.steps.values())}
    body = []
    for var, value in reversed(depending):
        if var in needed and library_name(value) not in _GIVEN:
            needed.update(used_vars(value))
            body.append((var, value))
    return body[::-1]


def _scanned(loop: _Marked, body: list[tuple[Var, Expr]], replaced: dict[Var, Expr], scope: Scope) -> dict[Var, Expr]:
    """Emits the scan; returns the replacements of the marks after the step."""
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
